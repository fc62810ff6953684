"""A trace, decoded token by token on a simulated machine; and the bytes over PCIe beside those of plain offloading.

Plain offloading: the same slots of VRAM under the same cache policy, but every expert that is not there is copied, and
the CPU computes none. Every token is decoded by itself, those of prompts too. What is counted begins after the first
quarter of the trace, which fills the caches.
"""

from collections import Counter
from dataclasses import dataclass

from mosaic.format.errors import InputError
from mosaic.runtime.experts.replay import fetch
from mosaic.runtime.experts.slots import SlotPolicy
from mosaic.runtime.experts.trace import Trace, TraceHeader
from mosaic.runtime.hardware import Hardware
from mosaic.runtime.simulator.budget import Budget
from mosaic.runtime.simulator.costs import Call, Costs, Spent
from mosaic.runtime.simulator.sizes import ModelSizes
from mosaic.runtime.simulator.tiers import Tiers

WARM_UP = 4  # one part in so many of the trace
LEAST_SAVING = 1e-9  # seconds; decisions are in whole nanoseconds
NONE = Call(0, 0, 0, 0)


@dataclass(frozen=True)
class Outcome:
    """Sums over the tokens that count. `spent`: seconds; `exchanged`: bytes of states that crossed PCIe.

    `offloaded`: experts that plain offloading copies.
    """

    budget: Budget
    tokens: int
    expert: int
    hot: int
    cold: int
    missing: int
    promoted: int
    exchanged: int
    offloaded: int
    spent: Spent

    @property
    def tok_s(self) -> float:
        """Tokens per second."""
        return self.tokens / sum(self.spent.values())

    @property
    def vram_hit_rate(self) -> float:
        """Of all lookups."""
        return self.hot / (self.hot + self.cold)

    @property
    def ram_hit_rate(self) -> float:
        """Of those that VRAM does not have; 1 if it has all."""
        return 1 - self.missing / self.cold if self.cold else 1.0

    @property
    def pcie_nbytes(self) -> int:
        """Bytes over PCIe: copies to VRAM, and states."""
        return self.promoted * self.expert + self.exchanged

    @property
    def offloading_nbytes(self) -> int:
        """The same of plain offloading."""
        return self.offloaded * self.expert

    @property
    def less(self) -> float | None:
        """The share of plain offloading's bytes that is not moved, below 0 if it is more; None if it moves nothing."""
        return 1 - self.pcie_nbytes / self.offloading_nbytes if self.offloading_nbytes else None


def warm_up(trace: Trace) -> int:
    """Tokens that do not count."""
    return len(trace.experts) // WARM_UP


def simulate(trace: Trace, hardware: Hardware, sizes: ModelSizes, budget: Budget) -> Outcome:
    """Decode a trace of at least one token, of the model whose sizes these are.

    InputError if the GPU computes an expert no faster than the CPU.
    """
    header, costs = trace.header, Costs(hardware, sizes, budget)
    saving = costs.cpu - costs.gpu
    if hardware.gpu and saving < LEAST_SAVING:
        rates = f"{hardware.gpu.memory.rate / 1e9:g} and {hardware.ram.rate / 1e9:g} GB/s"
        raise InputError(
            "a GPU that reads weights no faster than the CPU",
            found=rates,
            expected="more in VRAM",
            remedy="set gpu to null in the profile",
        )
    tiers = Tiers(header, budget.vram_slots, budget.ram_slots, costs.copy, saving)
    offloading = Offloading(header, budget.vram_slots)
    counts, spent = Counter[str](), Spent(float)
    clock, first = 0.0, warm_up(trace)

    def spend(cost: Spent) -> float:
        for part, seconds in cost.items():
            spent[part] += seconds
        return sum(cost.values())

    for token, chosen in enumerate(trace.keys().tolist()):
        if token == first:
            counts.clear()
            spent.clear()
        keys = dict(zip(header.layers, chosen, strict=True))
        for layer in range(len(sizes.dense)):
            call = tiers.call(keys[layer], clock) if layer in keys else NONE
            clock += spend(costs.layer(layer, call))
            counts.update(call._asdict(), exchanged=costs.exchanged(layer, call))
        clock += spend(costs.token())
        counts["offloaded"] += offloading.token(chosen)
        tiers.tick()
    names = (*Call._fields, "exchanged", "offloaded")
    tokens = len(trace.experts) - first
    return Outcome(budget, tokens, sizes.expert, spent=spent, **{name: counts[name] for name in names})


class Offloading:
    """Copies to VRAM whatever is asked for and not there."""

    def __init__(self, header: TraceHeader, slots: int) -> None:
        self._slots = SlotPolicy(slots, header.layers, header.num_experts, header.top_k) if slots else None

    def token(self, chosen: list[list[int]]) -> int:
        """Copies for a token; none without VRAM."""
        if not self._slots:
            return 0
        copies = sum(len(fetch(self._slots, keys)) for keys in chosen)
        self._slots.tick()
        return copies
