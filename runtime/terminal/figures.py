"""The figures of an answer in words: one line, some lines, or a line that changes while the answer grows."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

LEGIBLE = 100  # from here on tenths say nothing

Figures = Mapping[str, Any]  # Stats.as_dict()


class Form(StrEnum):
    """How figures are shown."""

    TEXT = "text"
    JSON = "json"
    LIVE = "live"  # in the terminal's last line while the answer grows, and as text after it


def figure_text(figures: Figures) -> str:
    """Everything that matters, for --stats text."""
    return (
        f"prompt {figures['prompt_tokens']} tokens ({figures['reused_tokens']} reused), "
        f"{figures['prefill_tok_s']} tok/s; "
        f"answer {figures['generated_tokens']} tokens, {figures['decode_tok_s']} tok/s, "
        f"{figures['weight_bytes_per_token']:,} weight bytes per token, {figures['decode_gb_s']} GB/s"
        f"{_of(figures['weights_ceiling_gb_s'])}; "
        f"experts {tier_text(figures)}; ended by {figures['stop_reason']}"
    )


def status_text(figures: Figures) -> str:
    """One line for after an answer; counts are tokens."""
    return (
        f"prompt {figures['prompt_tokens']:,} ({figures['reused_tokens']:,} reused), "
        f"{_speed(figures['prefill_tok_s'])} tok/s; answer {figures['generated_tokens']:,}, "
        f"{_speed(figures['decode_tok_s'])} tok/s, {_speed(figures['decode_gb_s'])} GB/s, "
        f"hit rate {figures['expert_hit_rate']:.1%}; ended by {figures['stop_reason']}"
    )


def live_text(figures: Figures) -> str:
    """One line while the answer grows."""
    return (f"{figures['generated_tokens']} tokens, {figures['decode_tok_s']} tok/s, {figures['decode_gb_s']} GB/s of "
            f"weights; experts {tier_text(figures)}")  # fmt: skip


def figure_lines(figures: Figures) -> list[str]:
    """Everything there is, a line each."""
    return [f"{name.replace('_', ' '):<24}{_plain(value)}" for name, value in figures.items()]


def tier_text(figures: Figures) -> str:
    """Where experts were found."""
    text, there = f"{figures['expert_hit_rate']:.1%} in memory", figures["device_expert_hits"]
    if there or figures["device_bytes"]:
        share = there / max(there + figures["expert_hits"] + figures["expert_misses"], 1)
        text = f"{share:.1%} on the device, {figures['device_bytes']:,} bytes copied there; of the others {text}"
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


def _speed(value: float | int | str | None) -> str:
    """In about three digits."""
    assert isinstance(value, int | float)
    return f"{value:,.0f}" if value >= LEGIBLE else f"{value:.1f}"


def _plain(value: float | int | str | None) -> str:
    return "unknown" if value is None else f"{value:,}" if isinstance(value, int | float) else value
