"""Hardware profiles (package data, *.yaml): what the simulator takes a machine for. Nothing in them was measured.

A profile has what makers publish and what is assumed of the rest; each line says which. Users write profiles of their
own in the same form.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from mosaic.format.errors import InputError
from mosaic.format.typed import typed
from mosaic.runtime.hardware.plain_yaml import read_plain_yaml

FOLDER = Path(__file__).parent
SUFFIX = ".yaml"
EXAMPLE = "rtx4060-laptop"
MOST = 1e9  # of anything


@dataclass(frozen=True)
class Memory:
    """VRAM or RAM: its size, what others have of it, its bandwidth, and the share of it that kernels reach."""

    size_gib: float
    reserved_gib: float
    read_gb_s: float
    read_share: float

    def __post_init__(self) -> None:
        _check(size_gib=self.size_gib, read_gb_s=self.read_gb_s, read_share=self.read_share)
        if not 0 <= self.reserved_gib < self.size_gib:
            raise ValueError(f"reserved_gib: found {self.reserved_gib} of {self.size_gib}")
        if self.read_share > 1:
            raise ValueError(f"read_share: found {self.read_share}, expected at most 1")

    @property
    def nbytes(self) -> int:
        """All of it."""
        return int(self.size_gib * (1 << 30))

    @property
    def usable(self) -> int:
        """Bytes that are ours."""
        return int((self.size_gib - self.reserved_gib) * (1 << 30))

    @property
    def rate(self) -> float:
        """Bytes of weights that are read and multiplied in a second."""
        return self.read_gb_s * 1e9 * self.read_share


@dataclass(frozen=True)
class Gpu:
    """A graphics card, and the bus to it."""

    memory: Memory
    pcie_gb_s: float  # as copies reach it, one way
    layer_us: float  # launches of a decoder layer
    exchange_us: float  # to hand a state to the CPU and take back what it made of it

    def __post_init__(self) -> None:
        _check(pcie_gb_s=self.pcie_gb_s, layer_us=self.layer_us, exchange_us=self.exchange_us)


@dataclass(frozen=True)
class Cpu:
    """What takes time beside reading weights: in a layer that the CPU computes, and once a token."""

    layer_us: float
    token_us: float

    def __post_init__(self) -> None:
        _check(layer_us=self.layer_us, token_us=self.token_us)


@dataclass(frozen=True)
class Disk:
    """Reads of an expert each, many at a time."""

    read_gb_s: float

    def __post_init__(self) -> None:
        _check(read_gb_s=self.read_gb_s)


@dataclass(frozen=True)
class Hardware:
    """A machine; `gpu`: None if the CPU computes everything."""

    title: str
    gpu: Gpu | None
    ram: Memory
    cpu: Cpu
    disk: Disk

    def __post_init__(self) -> None:
        if not self.title.isprintable():
            raise ValueError("title: not printable")


def known() -> list[str]:
    """Names of the profiles that come with Mosaic."""
    return sorted(file.stem for file in FOLDER.glob(f"*{SUFFIX}"))


def load(name: str) -> Hardware:
    """A profile by its name, or by the path of a file; InputError if it is none."""
    file = FOLDER / f"{name}{SUFFIX}" if name in known() else Path(name)
    if not file.suffix and not file.exists():
        close = get_close_matches(name, known(), n=2)
        raise InputError(
            "no such hardware profile",
            found=name,
            expected=f"{', '.join(known())}, or a file",
            remedy=f"did you mean {' or '.join(close)}?" if close else "choose one, or write a profile of your own",
        )
    try:
        return typed(Hardware, read_plain_yaml(file, "a hardware profile"), "profile")
    except (ValueError, OverflowError) as error:
        raise InputError(
            "not a sound hardware profile",
            file=file,
            found=error,
            expected=f"what {FOLDER / EXAMPLE}{SUFFIX} has",
            remedy="mend it, or choose one of those that mosaic-bench --simulate list shows",
        ) from error


def _check(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number <= MOST:
            raise ValueError(f"{name}: found {number}, expected more than 0, at most {MOST:g}")
