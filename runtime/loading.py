"""A model directory made ready to run within a budget of memory."""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

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
from mosaic.runtime.plan import MemoryPlan
from mosaic.runtime.plan_vram import VramPlan, make_vram_plan
from mosaic.runtime.plans import make_plans
from mosaic.runtime.prefill import PREFILL_CHUNK
from mosaic.runtime.progress import Progress, silent
from mosaic.runtime.sizes import format_size
from mosaic.runtime.speeds import speeds
from mosaic.runtime.tuned import UNTUNED, Tuned
from mosaic.runtime.weights import Weights
from mosaic.runtime.wishes import VramWishes, Wishes

ANYTHING = VramWishes()
LEAST_SPAN = 1 << 20  # bytes; less is no measure of a disk


@dataclass(frozen=True)
class LoadOptions:
    """What may be wished of a load beyond its budget. None of it changes a bit of what is computed."""

    check: bool = False  # compare checksums of experts when they are first read
    prefetch: bool = False  # read what the next layer will probably choose
    warm: Path | None = None  # a routing profile: experts to begin with
    record: Path | None = None  # a routing trace to write
    tuning: Tuning | None = None  # if not what was tuned


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
    `vram`: what is wished of its memory. `tuned`: what is done where nothing is wished; once there is a plan, as much
    of it as really is.
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
        tuned: Tuned = UNTUNED,
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
        self._chosen, self._vram, self.tuned = chosen, vram, tuned

    @cached_property
    def plans(self) -> tuple[MemoryPlan, VramPlan | None]:
        """Of RAM and device. Made when they are first asked for, of a process that has everything else by then."""
        device = self._chosen.device
        budget = device.free() if device else None
        self.tuned = self.tuned.beside(self._vram, budget)
        with suppress(InputError):  # it may fit no more
            plans = make_plans(self.weights, self.places, self._wishes, self.tuned.wishes(self._vram), budget)
            if self.tuned.leaves(plans[1]):
                return plans
        self.tuned = replace(self.tuned, vram=None, piece=None)
        try:
            return make_plans(self.weights, self.places, self._wishes, self._vram, budget)
        except InputError:
            if device is None or self._chosen.needed:
                raise
            return make_plans(self.weights, self.places, self._wishes, self._vram, None)

    def vram_plan(self, vram: VramWishes) -> VramPlan | None:
        """What would lie on the device by other wishes, in the context that was planned; None if that cannot be."""
        plan = self.plans[1]
        assert plan
        wishes = replace(self._wishes, context=plan.context)
        try:
            return make_vram_plan(self.weights, self.places, wishes, vram, plan.budget)
        except InputError:
            return None

    def move(self, find: Callable[[], DeviceChoice], vram: VramWishes) -> None:
        """Plan another part of it for the device, which is found anew; in RAM all stays as planned.

        For another `load`, with the `experts` that were loaded before. Of the model nothing may be left: both at a time
        may be too much. InputError if the part cannot be.
        """
        ram, self._chosen = self.plan, HOST_ONLY
        gc.collect()  # with the device goes all that lies there
        self._chosen, self._vram = find(), vram
        assert self._chosen.device
        wishes = replace(self._wishes, context=ram.context)
        self.plans = ram, make_vram_plan(self.weights, self.places, wishes, vram, self._chosen.device.free())

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

    def load(
        self, ops: Ops, options: LoadOptions, progress: Progress = silent, experts: ExpertStore | None = None
    ) -> Loaded:
        """Read what is to stay in memory. `progress` is told of bytes. `experts`: of an earlier load, to be used on."""
        steady_heap()
        slots, vram = self.plan.slots, self.plans[1]  # what is refused is refused before anything is opened for writing
        wanted = self._wanted(options.warm) if options.warm else []
        writer = None
        if options.record:
            writer = open_recording(options.record, self.places, self._folder.name)
        check: Callable[[], None] = _nothing
        if slots is None:
            self.weights.populate(progress)
            experts = experts or MappedExperts(self.weights, self.places, check=options.check)
            check = ShardFiles(self._folder, self.weights.shards).check_all
        else:
            if vram:
                self.weights.make_resident(progress, vram.layers, head=not vram.head)
            else:
                self.weights.make_resident(progress)
            if not experts:
                arena = Arena(self.places, self._folder, slots, check=options.check)
                experts = cached = CachedExperts(self.places, arena)
                cached.warm(wanted, progress)
        if writer:
            weakref.finalize(experts, writer.close)
            experts = RecordedExperts(experts, writer)
        try:
            part = self._part(ops, vram, options.tuning or self.tuning) if vram else Part(None, None)
            model = HybridModel(
                self.weights, ops, self._wishes.kv, experts, foretell=options.prefetch,
                mixing=part.tier.from_host if part.tier else None, elsewhere=part.elsewhere,
            )  # fmt: skip
        except torch.OutOfMemoryError as error:  # somebody else took it since it was planned
            remedy = "ask for less with --vram or --gpu-layers, or choose --device cpu"
            raise InputError("the device gives no more memory", found=error, remedy=remedy) from error
        if vram:
            self.weights.release_dense(vram.layers, head=vram.head)
        return Loaded(model, experts, part.tier, check)

    @property
    def tuning(self) -> Tuning:
        """What was tuned, or else what is usual."""
        usual = Tuning()
        threshold = self.tuned.stream_tokens or min(usual.stream_tokens, self.piece)
        return Tuning(self.tuned.min_hits or usual.min_hits, threshold)

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
