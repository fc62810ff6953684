"""What may be said of the memory of a run: of this process, and of a device."""

from dataclasses import dataclass

from mosaic.runtime.kv import KVFormat


@dataclass(frozen=True)
class Wishes:
    """What may be said of the memory of a run. Sizes in bytes; what is None is chosen.

    `context`: tokens of a sequence. `parallel`: sequences at a time. `kept`: for recurrent states that later prompts
    may begin with. `budget`: for everything.
    """

    kv: KVFormat = KVFormat.BF16
    context: int | None = None
    parallel: int = 1
    kept: int | None = None
    budget: int | None = None


@dataclass(frozen=True)
class VramWishes:
    """What may be said of the memory of a device; what is None is chosen.

    `slots_nbytes`: for expert slots. `layers`: how many dense layers, from the first on; all if there are fewer.
    `piece`: tokens of a prompt that are computed together.
    """

    slots_nbytes: int | None = None
    layers: int | None = None
    piece: int | None = None
