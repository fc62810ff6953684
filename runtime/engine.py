"""Prompt in, tokens out: prefill in chunks, decode one by one, and keep what the next turn can use."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json
from mosaic.format.layout import CONFIG_FILE
from mosaic.runtime.conversation import Conversation
from mosaic.runtime.experts.traffic import Traffic
from mosaic.runtime.loading import Loading, LoadOptions
from mosaic.runtime.machine import major_faults
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops import Ops
from mosaic.runtime.ops.cpu import threads
from mosaic.runtime.prefill import PREFILL_CHUNK
from mosaic.runtime.sampler import Sampler
from mosaic.runtime.sampling import Sampling, generation_defaults, stop_tokens
from mosaic.runtime.speeds import Speeds, known_speeds
from mosaic.runtime.state import KVFormat
from mosaic.runtime.tokenizer import Tokenizer


@dataclass
class Stats:
    """What one answer took. Times in seconds."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, already in the state from an earlier turn
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decoded_tokens: int = 0  # tokens the model was run for, one at a time
    weight_bytes_per_token: int = 0
    stop_reason: str = ""
    major_faults: int = 0  # pages that had to be read when they were touched
    traffic: Traffic = field(default_factory=Traffic)
    ceilings: Speeds | None = None  # of this machine, if they were measured before

    def as_dict(self) -> dict[str, float | int | str | None]:
        """The figures and what follows from them."""
        computed = self.prompt_tokens - self.reused_tokens
        decode = self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "generated_tokens": self.generated_tokens,
            "prefill_seconds": round(self.prefill_seconds, 4),
            "prefill_tok_s": round(computed / self.prefill_seconds, 2) if self.prefill_seconds else 0.0,
            "decode_seconds": round(self.decode_seconds, 4),
            "decode_tok_s": round(decode, 2),
            "weight_bytes_per_token": self.weight_bytes_per_token,
            "decode_gb_s": round(decode * self.weight_bytes_per_token / 1e9, 3),
            "stop_reason": self.stop_reason,
            **self.traffic.as_dict(),
            "major_faults": self.major_faults,
            "weights_ceiling_gb_s": round(self.ceilings.weights / 1e9, 3) if self.ceilings else None,
            "disk_ceiling_gb_s": round(self.ceilings.disk / 1e9, 3) if self.ceilings else None,
        }


class Engine:
    """One model with one conversation. `context`: most tokens of prompt and answer together."""

    def __init__(
        self,
        model: HybridModel,
        tokenizer: Tokenizer,
        defaults: Sampling,
        stop: frozenset[int],
        context: int,
        traffic: Callable[[], Traffic] = Traffic,
        check: Callable[[], None] = lambda: None,
        ceilings: Speeds | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.stop = stop
        self.context = context
        self._conversation = Conversation(model)
        self._traffic = traffic
        self._check = check
        self._ceilings = ceilings

    def generate(
        self, prompt: Sequence[int], sampling: Sampling, seed: int | None, max_tokens: int | None, stats: Stats
    ) -> Iterator[int]:
        """Tokens that follow the prompt, as they are chosen; ends before a stop token. Fills `stats` as it goes."""
        self._check_prompt(prompt)
        traffic, faults = self._traffic(), major_faults()
        num_tokens = min(self.tokenizer.num_tokens, self.model.spec.vocab_size)
        sampler = Sampler(sampling, seed, num_tokens, prompt=prompt)
        stats.weight_bytes_per_token = self.model.nbytes_per_token
        stats.prompt_tokens = len(prompt)
        stats.ceilings = self._ceilings
        start = time.perf_counter()
        conversation = self._conversation
        conversation.rewind(prompt)
        stats.reused_tokens = len(conversation.tokens)
        logits = self._prefill(prompt[stats.reused_tokens :])
        conversation.mark()
        stats.prefill_seconds = time.perf_counter() - start
        self._count(stats, traffic, faults)
        while len(conversation.tokens) < self.context:
            token = sampler.choose(logits).token
            if token in self.stop:
                stats.stop_reason = "stop token"
                return
            stats.generated_tokens += 1
            yield token
            if stats.generated_tokens == max_tokens:
                stats.stop_reason = "max tokens"
                return
            if len(conversation.tokens) + 1 == self.context:
                break
            start = time.perf_counter()
            logits = self._run([token])
            stats.decode_seconds += time.perf_counter() - start
            stats.decoded_tokens += 1
            self._count(stats, traffic, faults)
        stats.stop_reason = "context full"

    def _count(self, stats: Stats, traffic: Traffic, faults: int) -> None:
        """Note what happened since these figures."""
        stats.traffic = self._traffic().since(traffic)
        stats.major_faults = major_faults() - faults

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise InputError("the prompt is empty", found="no tokens", expected="some text", remedy="write a prompt")
        if len(prompt) > self.context:
            raise InputError(
                "the prompt does not fit the context",
                found=f"{len(prompt):,} tokens",
                expected=f"at most {self.context:,}",
                remedy="shorten the prompt, raise --context if the model allows it, or start a new chat",
            )

    def _prefill(self, tokens: Sequence[int]) -> NDArray[np.floating]:
        """Logits [V] after the tokens, computed in chunks that begin at multiples of PREFILL_CHUNK."""
        first = 0
        while True:
            last = min(first + PREFILL_CHUNK - len(self._conversation.tokens) % PREFILL_CHUNK, len(tokens))
            if last == len(tokens):
                return self._run(tokens[first:])
            self._conversation.extend(tokens[first:last])
            first = last

    def _run(self, tokens: Sequence[int]) -> NDArray[np.floating]:
        """Logits [V] after some tokens."""
        logits = self.model.logits(self._conversation.extend(tokens)[-1:])[0].numpy()
        self._check()  # before anyone believes them
        return logits


def load_engine(
    folder: Path,
    ops: Ops,
    *,
    kv: KVFormat = KVFormat.BF16,
    context: int | None = None,
    ram: int | None = None,
    options: LoadOptions | None = None,
) -> Engine:
    """An engine over a model directory. Without `context`, the model's own, or what `ram` bytes of memory allow."""
    loading = Loading(folder, kv, context=context, ram=ram)
    tokenizer, defaults = Tokenizer(folder), generation_defaults(folder)
    loaded = loading.load(ops, options or LoadOptions())
    stop = defaults.stop | _config_stop(folder)
    return Engine(
        loaded.model,
        tokenizer,
        defaults.sampling,
        stop,
        loading.plan.context,
        lambda: loaded.experts.traffic,
        loaded.check,
        known_speeds(*loading.spans, threads()),
    )


def _config_stop(folder: Path) -> frozenset[int]:
    """Stop tokens that config.json names beside generation_config.json."""
    config = read_json(folder / CONFIG_FILE)
    return stop_tokens(config.get("text_config", config), folder / CONFIG_FILE)
