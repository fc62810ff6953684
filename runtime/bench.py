"""How fast a model is read and run: prompts in the engine's chunks, generation token by token, random token ids."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from mosaic.format.errors import InputError
from mosaic.runtime.experts.traffic import Traffic
from mosaic.runtime.loading import Loaded
from mosaic.runtime.model import HybridModel
from mosaic.runtime.prefill import PREFILL_CHUNK
from mosaic.runtime.state import SequenceState

SHORT_PROMPT = 16  # tokens before those that are generated
WARM_UP = 4  # tokens that are generated first: a device compiles and records what it will do
SEED = 0  # same tokens every time, for every engine that is compared


@dataclass
class Measurement:
    """Speed at one size. `kind`: "prefill" of a prompt of so many tokens, or "decode" of so many, one by one."""

    kind: str
    tokens: int
    values: list[float] = field(default_factory=list)  # tokens per second, one for each repetition
    device_hits: int = 0  # in all of them: experts of layer calls that a device had,
    device_bytes: int = 0  # and bytes of experts that were copied to it

    @property
    def name(self) -> str:
        """As llama-bench calls it."""
        return f"{'pp' if self.kind == 'prefill' else 'tg'}{self.tokens}"

    @property
    def tok_s(self) -> float:
        """The median."""
        return median(self.values)

    @property
    def device_hits_per_token(self) -> float:
        """Experts that a device had."""
        return self.device_hits / (self.tokens * len(self.values))

    @property
    def device_bytes_per_token(self) -> float:
        """Of experts, copied to the device."""
        return self.device_bytes / (self.tokens * len(self.values))

    def as_dict(self) -> dict[str, object]:
        """The size and its outcome."""
        return {
            "name": self.name,
            "kind": self.kind,
            "tokens": self.tokens,
            "tok_s": self.tok_s,
            "min": min(self.values),
            "max": max(self.values),
            "values": self.values,
            "device_hits_per_token": self.device_hits_per_token,
            "device_bytes_per_token": self.device_bytes_per_token,
        }


def random_tokens(vocab_size: int, count: int) -> list[int]:
    """Token ids that no text has. Of two counts, the fewer are the beginning of the more."""
    tokens: list[int] = np.random.default_rng(SEED).integers(0, vocab_size, count).tolist()
    return tokens


def prefill_seconds(model: HybridModel, tokens: Sequence[int], piece: int = PREFILL_CHUNK) -> float:
    """Seconds from an empty sequence to the logits after the last token, in pieces of so many tokens."""
    state = model.new_sequence()
    start = time.perf_counter()
    for first in range(0, len(tokens), piece):
        hidden = model.hidden(tokens[first : first + piece], state)
    model.logits(hidden[-1:])
    return time.perf_counter() - start


def begun(model: HybridModel, tokens: Sequence[int]) -> SequenceState:
    """A sequence that has read the first SHORT_PROMPT of these tokens."""
    state = model.new_sequence()
    model.hidden(tokens[:SHORT_PROMPT], state)
    return state


def decode_seconds(model: HybridModel, state: SequenceState, tokens: Sequence[int]) -> float:
    """Seconds for the logits after each of the tokens that a sequence goes on with, one by one."""
    start = time.perf_counter()
    for token in tokens:
        model.logits(model.hidden([token], state))
    return time.perf_counter() - start


def run_tests(
    loaded: Loaded,
    piece: int,
    prompts: Sequence[int],
    generate: Sequence[int],
    repetitions: int,
    note: Callable[[str], None],
) -> list[Measurement]:
    """All sizes in turn, `repetitions` times over. Prompts are read in pieces of so many tokens.

    Before that the longest prompt is read and some tokens are generated, neither of which is counted.
    """
    model = loaded.model
    tests = [Measurement("prefill", count) for count in prompts] + [Measurement("decode", count) for count in generate]
    longest = model.spec.max_position_embeddings
    for test in tests:
        needed = test.tokens + (SHORT_PROMPT if test.kind == "decode" else 0)
        if needed > longest:
            option = "--prompt" if test.kind == "prefill" else "--generate"
            raise InputError(
                f"{option} {test.tokens} does not fit the context of the model",
                found=f"{needed:,} tokens",
                expected=f"at most {longest:,}",
                remedy="choose fewer",
            )
    tokens = random_tokens(model.spec.vocab_size, max(test.tokens for test in tests) + SHORT_PROMPT)
    note("warming up")
    prefill_seconds(model, tokens[: max(*prompts, SHORT_PROMPT)], piece)
    _decode(loaded, tokens[: SHORT_PROMPT + min(WARM_UP, *generate)])
    for repetition in range(repetitions):
        for test in tests:
            if test.kind == "prefill":
                seconds, traffic = _prefill(loaded, tokens[: test.tokens], piece)
            else:
                seconds, traffic = _decode(loaded, tokens[: SHORT_PROMPT + test.tokens])
            test.values.append(test.tokens / seconds)
            test.device_hits += traffic.device_hits
            test.device_bytes += traffic.device_bytes
            note(f"{test.name}, {repetition + 1} of {repetitions}: {test.values[-1]:.2f} tok/s")
    return tests


def _prefill(loaded: Loaded, tokens: Sequence[int], piece: int) -> tuple[float, Traffic]:
    """Seconds, and what was counted meanwhile."""
    before = loaded.traffic()
    seconds = prefill_seconds(loaded.model, tokens, piece)
    return seconds, loaded.traffic().since(before)


def _decode(loaded: Loaded, tokens: Sequence[int]) -> tuple[float, Traffic]:
    """The same of the tokens behind the first SHORT_PROMPT. A device may have room for one sequence: it ends here."""
    state = begun(loaded.model, tokens)
    before = loaded.traffic()
    seconds = decode_seconds(loaded.model, state, tokens[SHORT_PROMPT:])
    return seconds, loaded.traffic().since(before)
