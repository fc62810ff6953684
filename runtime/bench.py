"""How fast a model is read and run: prompts in the engine's chunks, generation token by token, random token ids."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from mosaic.format.errors import InputError
from mosaic.runtime.model import HybridModel
from mosaic.runtime.prefill import PREFILL_CHUNK

SHORT_PROMPT = 16  # tokens before those that are generated
SEED = 0  # same tokens every time, for every engine that is compared


@dataclass
class Measurement:
    """Speed at one size. `kind`: "prefill" of a prompt of so many tokens, or "decode" of so many, one by one."""

    kind: str
    tokens: int
    values: list[float] = field(default_factory=list)  # tokens per second, one for each repetition

    @property
    def name(self) -> str:
        """As llama-bench calls it."""
        return f"{'pp' if self.kind == 'prefill' else 'tg'}{self.tokens}"

    @property
    def tok_s(self) -> float:
        """The median."""
        return median(self.values)

    def as_dict(self) -> dict[str, object]:
        """The size and its outcome."""
        spread = {"min": min(self.values), "max": max(self.values)}
        return {"name": self.name, "kind": self.kind, "tokens": self.tokens, "tok_s": self.tok_s, **spread,
                "values": self.values}  # fmt: skip


def random_tokens(vocab_size: int, count: int) -> list[int]:
    """Token ids that no text has. Of two counts, the fewer are the beginning of the more."""
    tokens: list[int] = np.random.default_rng(SEED).integers(0, vocab_size, count).tolist()
    return tokens


def prefill_seconds(model: HybridModel, tokens: Sequence[int]) -> float:
    """Seconds from an empty sequence to the logits after the last token, in the engine's chunks."""
    state = model.new_sequence()
    start = time.perf_counter()
    for first in range(0, len(tokens), PREFILL_CHUNK):
        hidden = model.hidden(tokens[first : first + PREFILL_CHUNK], state)
    model.logits(hidden[-1:])
    return time.perf_counter() - start


def decode_seconds(model: HybridModel, tokens: Sequence[int]) -> float:
    """Seconds for the logits after each of the tokens behind the first SHORT_PROMPT, one by one."""
    state = model.new_sequence()
    model.hidden(tokens[:SHORT_PROMPT], state)
    start = time.perf_counter()
    for token in tokens[SHORT_PROMPT:]:
        model.logits(model.hidden([token], state))
    return time.perf_counter() - start


def run_tests(
    model: HybridModel, prompts: Sequence[int], generate: Sequence[int], repetitions: int, note: Callable[[str], None]
) -> list[Measurement]:
    """All sizes in turn, `repetitions` times over, after one round of the longest prompt that is not counted."""
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
    prefill_seconds(model, tokens[: max(*prompts, SHORT_PROMPT)])
    for repetition in range(repetitions):
        for test in tests:
            if test.kind == "prefill":
                seconds = prefill_seconds(model, tokens[: test.tokens])
            else:
                seconds = decode_seconds(model, tokens[: SHORT_PROMPT + test.tokens])
            test.values.append(test.tokens / seconds)
            note(f"{test.name}, {repetition + 1} of {repetitions}: {test.values[-1]:.2f} tok/s")
    return tests
