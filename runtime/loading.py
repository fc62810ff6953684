"""A model directory made ready to run within a budget of memory."""

from dataclasses import dataclass
from pathlib import Path

from mosaic.runtime.experts.arena import Arena
from mosaic.runtime.experts.cached import CachedExperts
from mosaic.runtime.experts.mapped import MappedExperts
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.store import ExpertStore
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops import Ops
from mosaic.runtime.plan import MemoryPlan, make_plan
from mosaic.runtime.state import KVFormat
from mosaic.runtime.weights import Weights


@dataclass(frozen=True)
class Loaded:
    """A model, the plan it was loaded by, and where its experts come from."""

    model: HybridModel
    plan: MemoryPlan
    places: ExpertPlaces
    experts: ExpertStore


class Loading:
    """First what it would take (`plan`), then `load`."""

    def __init__(self, folder: Path, kv: KVFormat, *, context: int | None = None, budget: int | None = None) -> None:
        self.weights = Weights(folder)
        self.places = ExpertPlaces(self.weights)
        self.plan = make_plan(self.weights, self.places, kv, context, budget)
        self._folder = folder
        self._kv = kv

    def load(self, ops: Ops, *, check: bool = False) -> Loaded:
        """Read what is to stay in memory. `check`: compare checksums of experts when they are first read."""
        experts: ExpertStore
        if self.plan.slots is None:
            self.weights.populate()
            experts = MappedExperts(self.weights, self.places)
        else:
            self.weights.make_resident()
            arena = Arena(self.places, self._folder, self.plan.slots, check=check)
            experts = CachedExperts(self.places, arena)
        return Loaded(HybridModel(self.weights, ops, self._kv, experts), self.plan, self.places, experts)
