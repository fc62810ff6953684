"""What came of a simulation, for a person and for a machine."""

from mosaic.runtime.simulator.costs import PARTS
from mosaic.runtime.simulator.simulation import Outcome
from mosaic.runtime.sizes import format_size

GIB, MIB = 1 << 30, 1 << 20
CLAIM = "over 70 %"  # less over PCIe than plain offloading: what Mosaic promises

Outcomes = dict[int, Outcome]  # by bytes of VRAM for experts


def outcome_lines(outcome: Outcome, arena: int) -> list[str]:
    """What a person reads of one budget."""
    budget, tokens = outcome.budget, outcome.tokens
    head = ", and the head" if budget.head_on_gpu else ""
    vram = (
        f"VRAM: {format_size(arena)} for {budget.vram_slots:,} experts; the rest of {budget.gpu_layers} layers{head}; "
    )
    lines = [
        f"{vram if arena else ''}RAM: {budget.ram_slots:,} experts",
        f"expected: {outcome.tok_s:.1f} tok/s, computed from published and assumed figures, not measured",
    ]
    parts = {part: outcome.spent[part] / tokens for part in PARTS if outcome.spent[part]}
    lines += [f"  {part:<24}{seconds * 1e3:>8.2f} ms per token" for part, seconds in parts.items()]
    if not arena:
        return [*lines, f"hits: {outcome.ram_hit_rate:.1%} in RAM"]
    copied = f"{outcome.offloading_nbytes / tokens / MIB:.2f} if every expert that VRAM lacks were copied"
    return [
        *lines,
        f"hits: {outcome.vram_hit_rate:.1%} in VRAM; of the others, {outcome.ram_hit_rate:.1%} in RAM",
        f"PCIe: {outcome.pcie_nbytes / tokens / MIB:.2f} MiB per token, for {outcome.promoted / tokens:.2f} promotions "
        "and the states",
        f"      {copied}: {_less(outcome)} less (claimed: {CLAIM})",
    ]


COLUMNS = (
    ("VRAM, GiB", 9), ("experts", 9), ("hits", 8), ("in RAM", 8), ("tok/s", 8), ("PCIe, MiB/token", 17),
    ("all copied", 12), ("less", 8),
)  # fmt: skip


def table(outcomes: Outcomes) -> list[str]:
    """Budgets side by side."""
    lines = ["".join(f"{name:>{width}}" for name, width in COLUMNS)]
    for arena, each in outcomes.items():
        cells = (
            f"{arena / GIB:.2f}",
            f"{each.budget.vram_slots:,}",
            f"{each.vram_hit_rate:.1%}",
            f"{each.ram_hit_rate:.1%}",
            f"{each.tok_s:.1f}",
            f"{each.pcie_nbytes / each.tokens / MIB:.2f}",
            f"{each.offloading_nbytes / each.tokens / MIB:.2f}",
            _less(each),
        )
        lines.append("".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True)))
    return lines


def outcome_dict(arena: int, outcome: Outcome) -> dict[str, object]:
    """What a machine reads of one budget."""
    tokens = outcome.tokens
    return {
        "vram_bytes": arena,
        "vram_slots": outcome.budget.vram_slots,
        "ram_slots": outcome.budget.ram_slots,
        "gpu_layers": outcome.budget.gpu_layers,
        "head_on_gpu": outcome.budget.head_on_gpu,
        "tokens": tokens,
        "tok_s": outcome.tok_s,
        "seconds_per_token": {part: outcome.spent[part] / tokens for part in PARTS},
        "vram_hit_rate": outcome.vram_hit_rate,
        "ram_hit_rate": outcome.ram_hit_rate,
        "promoted_per_token": outcome.promoted / tokens,
        "pcie_bytes_per_token": outcome.pcie_nbytes / tokens,
        "pcie_bytes_per_token_all_copied": outcome.offloading_nbytes / tokens,
        "pcie_less": outcome.less,
    }


def _less(outcome: Outcome) -> str:
    return "nothing" if outcome.less is None else f"{outcome.less:.1%}"
