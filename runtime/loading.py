"""A model directory made ready to run within a budget of memory."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mosaic.format.errors import InputError
from mosaic.runtime.experts import profile
from mosaic.runtime.experts.arena import Arena, slot_nbytes
from mosaic.runtime.experts.cached import CachedExperts
from mosaic.runtime.experts.mapped import MappedExperts
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.recorded import RecordedExperts, open_recording
from mosaic.runtime.experts.shards import ShardFiles
from mosaic.runtime.experts.store import ExpertStore
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.machine import steady_heap, total_memory
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops import Ops
from mosaic.runtime.plan import MemoryPlan, Wishes, make_plan
from mosaic.runtime.progress import Progress, silent
from mosaic.runtime.sizes import format_size
from mosaic.runtime.weights import Weights

LEAST_SPAN = 1 << 20  # bytes; less is no measure of a disk


@dataclass(frozen=True)
class LoadOptions:
    """What may be wished of a load beyond its budget. None of it changes a bit of what is computed."""

    check: bool = False  # compare checksums of experts when they are first read
    prefetch: bool = False  # read what the next layer will probably choose
    warm: Path | None = None  # a routing profile: experts to begin with
    record: Path | None = None  # a routing trace to write


@dataclass(frozen=True)
class Loaded:
    """A model, and where its experts come from."""

    model: HybridModel
    experts: ExpertStore
    check: Callable[[], None]  # InputError if mapped weights were written to; what is read is checked as it is read


class Loading:
    """First what it would take (`plan`), then `load`.

    `ram`: bytes that this process may take; `parallel`: sequences at a time, each of at most `context` tokens;
    `state_budget`: bytes for recurrent states that are kept for later prompts.
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

    @cached_property
    def plan(self) -> MemoryPlan:
        """Made when it is first asked for, of a process that has everything else by then."""
        return make_plan(self.weights, self.places, self._wishes)

    @property
    def spans(self) -> tuple[Path, int]:
        """A file to measure the disk by, and how much of it to read at a time: as experts are read."""
        largest = max(self.weights.shards.values(), key=lambda shard: len(shard.buffer))
        return largest.file, max(slot_nbytes(self.places), LEAST_SPAN)

    def load(self, ops: Ops, options: LoadOptions, progress: Progress = silent) -> Loaded:
        """Read what is to stay in memory. `progress` is told of bytes."""
        steady_heap()
        experts: ExpertStore
        slots = self.plan.slots  # what is refused is refused before anything is opened for writing
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
            self.weights.make_resident(progress)
            experts = cached = CachedExperts(self.places, Arena(self.places, self._folder, slots, check=options.check))
            cached.warm(wanted, progress)
        if writer:
            weakref.finalize(experts, writer.close)
            experts = RecordedExperts(experts, writer)
        model = HybridModel(self.weights, ops, self._wishes.kv, experts, foretell=options.prefetch)
        return Loaded(model, experts, check)

    def _wanted(self, file: Path) -> list[tuple[int, int]]:
        """Experts in the order in which they are worth a slot."""
        known = profile.load(file, self.places.layers, self.places.num_experts)
        keys = profile.warm(known, self.plan.slots or 0, self.places.top_k) if self.plan.slots else []
        return [divmod(key, self.places.num_experts) for key in keys]


def _nothing() -> None:
    """Nothing is mapped."""
