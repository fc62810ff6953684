"""An answer on its way to a person: text as it comes, figures beside it."""

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING

from mosaic.runtime.live import LiveLine

if TYPE_CHECKING:
    from mosaic.runtime.engine import Engine
    from mosaic.runtime.ops.profiled import ProfiledOps
    from mosaic.runtime.sampling import Sampling


class Figures(StrEnum):
    """How figures are shown."""

    TEXT = "text"
    JSON = "json"
    LIVE = "live"  # in the terminal's last line while the answer grows, and as text after it


class Answer:
    """Streams the answer to a rendered prompt to standard output."""

    def __init__(
        self,
        engine: "Engine",
        sampling: "Sampling",
        seed: int | None,
        max_tokens: int | None,
        stats: str | None,
        profiled: "ProfiledOps | None",
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._max_tokens = max_tokens
        self._stats = stats
        self._live = LiveLine() if stats == Figures.LIVE else None
        self._profiled = profiled

    def __call__(self, text: str) -> str:
        """The answer; what was printed is what is returned. Ctrl-C in a chat ends the answer, not the chat."""
        from mosaic.runtime.engine import Stats

        stats = Stats()
        parts: list[str] = []
        tokenizer = self._engine.tokenizer
        stream = tokenizer.stream()
        tokens = self._engine.generate(tokenizer.encode(text), self._sampling, self._seed, self._max_tokens, stats)
        profile: list[str] = []
        if self._profiled:
            self._profiled.reset()
        try:
            for token in tokens:
                if self._profiled and not parts:
                    profile += ["prompt", *self._profiled.table(self._profiled.elapsed), ""]
                    self._profiled.reset()
                parts.append(stream.push(token))
                print(parts[-1], end="", flush=True)
                if self._live:
                    self._live.show(live_text(stats.as_dict()))
        finally:
            if self._live:
                self._live.close()
            parts.append(stream.finish())
            print(parts[-1], end="", flush=True)
        if stats.stop_reason == "context full":
            print(f"\nnote: the context of {self._engine.context:,} tokens is full", end="", file=sys.stderr)
        if self._profiled:
            from mosaic.runtime.machine import read_ceiling
            from mosaic.runtime.ops.cpu import threads

            elapsed = self._profiled.elapsed
            if not profile:  # no token came
                profile += ["prompt", *self._profiled.table(elapsed), ""]
                self._profiled.reset()
                elapsed = self._profiled.elapsed
            table = self._profiled.table(elapsed, read_ceiling(0.5, threads()))
            profile += [f"answer, {stats.decoded_tokens} tokens", *table]
            print("", *profile, sep="\n", file=sys.stderr)
        self._report(stats.as_dict())
        return "".join(parts)

    def _report(self, figures: dict[str, float | int | str | None]) -> None:
        if self._stats == Figures.JSON:
            print(f"\n{json.dumps(figures)}", file=sys.stderr)
        elif self._stats:
            print(
                f"\nprompt {figures['prompt_tokens']} tokens ({figures['reused_tokens']} reused), "
                f"{figures['prefill_tok_s']} tok/s; "
                f"answer {figures['generated_tokens']} tokens, {figures['decode_tok_s']} tok/s, "
                f"{figures['weight_bytes_per_token']:,} weight bytes per token, {figures['decode_gb_s']} GB/s"
                f"{_of(figures['weights_ceiling_gb_s'])}; "
                f"experts {tier_text(figures)}; ended by {figures['stop_reason']}",
                file=sys.stderr,
            )


def tier_text(figures: dict[str, float | int | str | None]) -> str:
    """Where experts were found."""
    text = f"{figures['expert_hit_rate']:.1%} in memory"
    if figures["disk_bytes"]:
        ceiling = _of(figures["disk_ceiling_gb_s"])
        text += (f", {figures['disk_bytes']:,} bytes from the disk at {figures['disk_gb_s']} GB/s{ceiling}, "
                 f"{figures['stall_seconds']} s waiting for it")  # fmt: skip
    if figures["prefetch_recall"] is not None:
        text += (f", {figures['read_ahead_and_used']} of {figures['read_ahead_experts']} read ahead were used, "
                 f"recall {figures['prefetch_recall']:.1%}")  # fmt: skip
    return text


def _of(ceiling: float | int | str | None) -> str:
    return f" of {ceiling}" if ceiling else ""


def live_text(figures: dict[str, float | int | str | None]) -> str:
    """One line while the answer grows."""
    return (f"{figures['generated_tokens']} tokens, {figures['decode_tok_s']} tok/s, {figures['decode_gb_s']} GB/s of "
            f"weights; experts {tier_text(figures)}")  # fmt: skip
