"""How far a program is with what takes long, on standard error, and only if that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mosaic.runtime.progress import Progress

if TYPE_CHECKING:
    from tqdm import tqdm

    from mosaic.runtime.request import Generation

PATIENCE = 0.5  # seconds before anything is shown


@contextmanager
def loading_bars() -> Iterator[Progress]:
    """A progress of bytes, each with a bar of its own, which goes when the next begins."""
    from tqdm import tqdm

    bars: list[tqdm[Any]] = []

    def close() -> None:
        while bars:
            bars.pop().close()

    def progress(title: str, nbytes: int) -> Callable[[int], object]:
        close()
        bars.append(tqdm(total=nbytes, desc=title, unit="B", unit_scale=True, unit_divisor=1024, disable=None,
                         leave=False, delay=PATIENCE))  # fmt: skip
        return bars[-1].update

    try:
        yield progress
    finally:
        close()


class PromptBar:
    """How much of a prompt is read: after every layer of every piece of it."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def layer_done(self, generation: "Generation", done: int, layers: int) -> None:
        """So many layers of the piece in work are done."""
        from tqdm import tqdm

        read, total = generation.progress
        if self._bar is None:
            known = generation.stats.reused_tokens
            self._bar = tqdm(total=total, initial=known, desc="reading the prompt", unit=" tokens", disable=None,
                             leave=False, delay=PATIENCE, bar_format=FORM)  # fmt: skip
        self._bar.update(read + generation.piece * done / layers - self._bar.n)

    def close(self) -> None:
        """Give the line back."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


FORM = "{desc}: {percentage:3.0f}% |{bar}| {n:.0f} of {total} tokens, {rate_noinv_fmt}, {remaining} left"
