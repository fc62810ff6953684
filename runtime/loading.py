"""A model directory made ready to run within a budget of memory."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mosaic.format.errors import InputError
from mosaic.runtime.device import Device
from mosaic.runtime.device.choice import HOST_ONLY, DeviceChoice
from mosaic.runtime.device.part import Part, Tuning, take_part
from mosaic.runtime.experts import profile
from mosaic.runtime.experts.arena import Arena, slot_nbytes
from mosaic.runtime.experts.cached import CachedExperts
from mosaic.runtime.experts.mapped import MappedExperts
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.recorded import RecordedExperts, open_recording
from mosaic.runtime.experts.shards import ShardFiles
from mosaic.runtime.experts.store import ExpertStore
from mosaic.runtime.experts.tier import Tier
from mosaic.runtime.experts.traffic import Traffic
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.machine import steady_heap, total_memory
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops import Ops
from mosaic.runtime.ops.cpu import CpuOps, threads
from mosaic.runtime.plan import MemoryPlan, Wishes
from mosaic.runtime.plan_vram import VramPlan, VramWishes
from mosaic.runtime.plans import make_plans
from mosaic.runtime.prefill import PREFILL_CHUNK
from mosaic.runtime.progress import Progress, silent
from mosaic.runtime.sizes import format_size
from mosaic.runtime.speeds import speeds
from mosaic.runtime.weights import Weights

ANYTHING = VramWishes()
LEAST_SPAN = 1 << 20  # bytes; less is no measure of a disk


@dataclass(frozen=True)
class LoadOptions:
    """What may be wished of a load beyond its budget. None of it changes a bit of what is computed."""

    check: bool = False  # compare checksums of experts when they are first read
    prefetch: bool = False  # read what the next layer will probably choose
    warm: Path | None = None  # a routing profile: experts to begin with
    record: Path | None = None  # a routing trace to write
    tuning: Tuning = field(default_factory=Tuning)


@dataclass(frozen=True)
class Loaded:
    """A model, and where its experts come from; `tier`: those that a device has of them."""

    model: HybridModel
    experts: ExpertStore
    tier: Tier | None
    check: Callable[[], None]  # InputError if mapped weights were written to; what is read is checked as it is read

    def traffic(self) -> Traffic:
        """What happened since it was loaded."""
        traffic = self.experts.traffic
        return self.tier.traffic(traffic) if self.tier else traffic


class Loading:
    """First what it would take (`plan`), then `load`.

    `ram`: bytes that this process may take; `parallel`: sequences at a time, each of at most `context` tokens;
    `state_budget`: bytes for recurrent states that are kept for later prompts. `chosen`: a device that helps, and
    `vram`: what is wished of its memory.
    """

    def __init__(
        self,
        folder: Path,
        kv: KVFormat,
        *,
        context: int | None = None,
        ram: int | None = None,
        parallel: int = 1,
        state_budget: int | None = None,
        chosen: DeviceChoice = HOST_ONLY,
        vram: VramWishes = ANYTHING,
    ) -> None:
        if ram is not None and ram > total_memory():
            expected, remedy = f"at most {format_size(total_memory())}", "give less with --ram"
            raise InputError(
                "more memory than this machine has", found=format_size(ram), expected=expected, remedy=remedy
            )
        self.weights = Weights(folder)
        self.places = ExpertPlaces(self.weights)
        longest = self.weights.spec.max_position_embeddings
        if context is not None and not 0 < context <= longest:
            expected, remedy = f"1 to {longest:,}", "choose one in this range"
            raise InputError("--context is out of range", found=context, expected=expected, remedy=remedy)
        self._folder = folder
        self.parallel = parallel
        self._wishes = Wishes(kv, context, parallel, state_budget, ram)
        self._chosen, self._vram = chosen, vram

    @cached_property
    def plans(self) -> tuple[MemoryPlan, VramPlan | None]:
        """Of RAM and device. Made when they are first asked for, of a process that has everything else by then."""
        device = self._chosen.device
        try:
            return make_plans(self.weights, self.places, self._wishes, self._vram, device.free() if device else None)
        except InputError:
            if device is None or self._chosen.needed or self._vram != ANYTHING:
                raise
            return make_plans(self.weights, self.places, self._wishes, self._vram, None)

    @property
    def plan(self) -> MemoryPlan:
        """Of RAM."""
        return self.plans[0]

    @property
    def device(self) -> Device | None:
        """The one that has a part of the model."""
        return self._chosen.device if self.plans[1] else None

    @property
    def piece(self) -> int:
        """Most tokens of a prompt that are computed together."""
        vram = self.plans[1]
        return vram.piece if vram and vram.layers else PREFILL_CHUNK

    @property
    def spans(self) -> tuple[Path, int]:
        """A file to measure the disk by, and how much of it to read at a time: as experts are read."""
        largest = max(self.weights.shards.values(), key=lambda shard: len(shard.buffer))
        return largest.file, max(slot_nbytes(self.places), LEAST_SPAN)

    def load(self, ops: Ops, options: LoadOptions, progress: Progress = silent) -> Loaded:
        """Read what is to stay in memory. `progress` is told of bytes."""
        steady_heap()
        experts: ExpertStore
        slots, vram = self.plan.slots, self.plans[1]  # what is refused is refused before anything is opened for writing
        wanted = self._wanted(options.warm) if options.warm else []
        writer = None
        if options.record:
            writer = open_recording(options.record, self.places, self._folder.name)
        check: Callable[[], None] = _nothing
        if slots is None:
            self.weights.populate(progress)
            experts = MappedExperts(self.weights, self.places, check=options.check)
            check = ShardFiles(self._folder, self.weights.shards).check_all
        else:
            if vram:
                self.weights.make_resident(progress, vram.layers, head=not vram.head)
            else:
                self.weights.make_resident(progress)
            experts = cached = CachedExperts(self.places, Arena(self.places, self._folder, slots, check=options.check))
            cached.warm(wanted, progress)
        if writer:
            weakref.finalize(experts, writer.close)
            experts = RecordedExperts(experts, writer)
        part = self._part(ops, vram, options.tuning) if vram else Part(None, None)
        model = HybridModel(
            self.weights, ops, self._wishes.kv, experts, foretell=options.prefetch,
            mixing=part.tier.from_host if part.tier else None, elsewhere=part.elsewhere,
        )  # fmt: skip
        if vram:
            self.weights.release_dense(vram.layers, head=vram.head)
        return Loaded(model, experts, part.tier, check)

    def _part(self, ops: Ops, vram: VramPlan, tuning: Tuning) -> Part:
        """What the device has of the model."""
        device, wishes = self.device, self._wishes
        assert device
        assert isinstance(ops, CpuOps)
        rate = speeds(*self.spans, threads()).weights
        expert = max((self.places[key].nbytes for key in self.places), default=0)
        return take_part(
            device, self.weights, self.places, ops, vram, wishes.kv, wishes.parallel, expert / rate, tuning
        )

    def _wanted(self, file: Path) -> list[tuple[int, int]]:
        """Experts in the order in which they are worth a slot."""
        known = profile.load(file, self.places.layers, self.places.num_experts)
        keys = profile.warm(known, self.plan.slots or 0, self.places.top_k) if self.plan.slots else []
        return [divmod(key, self.places.num_experts) for key in keys]


def _nothing() -> None:
    """Nothing is mapped."""
