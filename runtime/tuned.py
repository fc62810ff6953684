"""What mosaic-run --tune found to be fastest, kept per machine and model: what a run does where nobody says otherwise.

Nothing of it has to be used: what does not fit any more is as if it had never been found.
"""

import os
import platform
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from mosaic.format.catalog import Catalog
from mosaic.runtime.kept import keep, recall
from mosaic.runtime.machine import cores
from mosaic.runtime.ops import Ops
from mosaic.runtime.ops.cpu import CpuOps, isa, set_threads
from mosaic.runtime.options import THREADS_VARIABLE
from mosaic.runtime.plan_vram import PIECES, VramPlan
from mosaic.runtime.sizes import format_size
from mosaic.runtime.wishes import VramWishes

TUNED_FILE = "tuned.json"
DIFFERENCE = 1 / 16  # of a device's memory, more or less: what others take of it comes and goes
TITLES = {
    "threads": "threads",
    "vram": "expert slots",
    "min_hits": "uses before a copy",
    "stream_tokens": "tokens to stream for",
    "piece": "tokens of a piece",
}


def shown(name: str, value: int) -> str:
    """The value of a setting, for people."""
    return format_size(value) if name == "vram" else f"{value:,}"


@dataclass(frozen=True)
class Tuned:
    """Settings; None: not tuned. `vram` is bytes of expert slots, found where a device had `vram_budget` to give,
    and so many `layers` beside them.

    `min_hits`, `stream_tokens`: see device.part.Tuning. `piece`: see VramPlan.
    """

    threads: int | None = None
    vram: int | None = None
    vram_budget: int | None = None
    layers: int | None = None
    min_hits: int | None = None
    stream_tokens: int | None = None
    piece: int | None = None

    def __str__(self) -> str:
        """For people; empty if nothing is."""
        values = ((name, getattr(self, name)) for name in TITLES)
        return ", ".join(f"{TITLES[name]} {shown(name, value)}" for name, value in values if value is not None)

    def beside(self, wished: VramWishes, budget: int | None) -> "Tuned":
        """What of it is left where something is wished, on a device that has so many bytes to give (None: without one).

        How slots and layers share them was found for about as many.
        """
        if budget is None:
            return replace(self, vram=None, piece=None)
        found = self.vram_budget or 0
        same = abs(budget - found) <= found * DIFFERENCE and wished.slots_nbytes is None and wished.layers is None
        return replace(self, vram=self.vram if same else None, piece=self.piece if wished.piece is None else None)

    def leaves(self, plan: VramPlan | None) -> bool:
        """Whether a plan with it has room for as many layers as there were: a longer context may push them out."""
        return plan is None or self.vram is None or plan.layers >= (self.layers or 0)

    def wishes(self, wished: VramWishes) -> VramWishes:
        """What is wished, and this besides."""
        slots = wished.slots_nbytes if self.vram is None else self.vram
        return VramWishes(slots, wished.layers, wished.piece if self.piece is None else self.piece)


UNTUNED = Tuned()


def known_tuning(catalog: Catalog, device: str | None) -> Tuned:
    """Of this machine, with the device of this name or without one, and this model.

    A release may have other settings than the one that kept them: those it does not know are ignored.
    """
    match recall(TUNED_FILE, _key(catalog, device)):
        case dict() as kept:
            found = {name: kept[name] for name in _NAMES & kept.keys()}
            if all(_sound(*each) for each in found.items()):
                return Tuned(**found)
    return UNTUNED


def keep_tuning(catalog: Catalog, device: str | None, tuned: Tuned) -> Path:
    """Keep it in place of what was known; the file. OSError if the cache folder cannot be written to."""
    return keep(TUNED_FILE, _key(catalog, device), asdict(tuned))


def settle_threads(ops: Ops, threads: int | None, tuned: Tuned) -> Tuned:
    """Have the CPU's kernels run on as many threads as were tuned, if nobody said how many. What is done of `tuned`."""
    if not isinstance(ops, CpuOps) or threads is not None or os.environ.get(THREADS_VARIABLE):
        return replace(tuned, threads=None)
    if tuned.threads is not None:
        set_threads(tuned.threads)
    return tuned


_NAMES = {field.name for field in fields(Tuned)}


def _sound(name: str, value: object) -> bool:
    """Whether a setting can have this value."""
    if type(value) is not int:
        return value is None
    if name == "piece":
        return value in PIECES
    return (0 if name in ("vram", "layers") else 1) <= value <= (cores() if name == "threads" else value)


def _key(catalog: Catalog, device: str | None) -> str:
    model = f"{catalog.source_fingerprint} {catalog.plan_digest}"
    return f"{platform.node()}, {isa()}, {cores()} cores, {device or 'no device'}, {model}"
