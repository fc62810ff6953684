"""Where the time goes: operations that are timed as they run, and what they read."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mosaic.runtime.kv import KVCache
from mosaic.runtime.ops import Ops
from mosaic.runtime.state import DeltaState
from mosaic.runtime.weights import Weight


@dataclass
class Entry:
    """One operation: calls, seconds, and bytes of weights, keys and values read."""

    calls: int = 0
    seconds: float = 0.0
    nbytes: int = 0


class ProfiledOps:
    """Wraps other operations and notes each call in `entries`."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.entries: dict[str, Entry] = defaultdict(Entry)
        self._start = time.perf_counter()

    def reset(self) -> None:
        """Forget everything so far."""
        self.entries.clear()
        self._start = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning or the last reset."""
        return time.perf_counter() - self._start

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._ops, name)

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = operation(*arguments)
            entry = self.entries[_name(name, arguments)]
            entry.seconds += time.perf_counter() - start
            entry.calls += 1
            entry.nbytes += _nbytes(name, arguments)
            return result

        setattr(self, name, timed)
        return timed

    def table(self, whole: float, ceiling: float | None = None) -> Iterator[str]:
        """Lines for a person, of `whole` seconds; `ceiling` is what the memory gives in bytes/s."""
        entries = sorted(self.entries.items(), key=lambda item: -item[1].seconds)
        rest = whole - sum(entry.seconds for _, entry in entries)
        yield f"{'operation':<32}{'calls':>8}{'ms':>10}{'share':>8}{'GB/s':>8}{'of ceiling':>12}"
        for name, entry in [*entries, ("between operations", Entry(0, rest, 0))]:
            speed = entry.nbytes / entry.seconds if entry.seconds else 0.0
            shown = f"{speed / 1e9:>8.1f}" if entry.nbytes else " " * 8
            share = f"{speed / ceiling:>12.0%}" if entry.nbytes and ceiling else " " * 12
            yield f"{name:<32}{entry.calls:>8}{entry.seconds * 1e3:>10.1f}{entry.seconds / whole:>8.1%}{shown}{share}"


def _name(operation: str, arguments: tuple[Any, ...]) -> str:
    """Linear maps by their shapes, since the head and a gate have little in common."""
    if operation not in ("linear", "linears"):
        return operation
    weights = arguments[1] if operation == "linears" else [arguments[1]]
    rows = "+".join(str(weight.shape[0]) for weight in weights)
    return f"linear {rows}x{weights[0].shape[1]}"


def _nbytes(operation: str, arguments: tuple[Any, ...]) -> int:
    """What a call reads at least, beside activations."""
    if operation == "linears":
        return sum(weight.nbytes for weight in arguments[1])
    if operation in ("linear", "swiglu"):
        return sum(argument.nbytes for argument in arguments[1:] if isinstance(argument, Weight))
    if operation == "experts":
        _, routing, source = arguments
        nbytes: int = source.nbytes(set(routing.experts.flatten().tolist()))
        return nbytes
    if operation == "attention":
        cache: KVCache = arguments[1]
        return cache.nbytes
    if operation == "gated_delta":
        state: DeltaState = arguments[2]
        return state.recurrent.nbytes
    return 0
