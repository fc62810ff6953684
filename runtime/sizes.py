"""Sizes of memory as people write them, and one that programs agree on."""

import re

from mosaic.format.errors import InputError

ARENA = int(3.2 * (1 << 30))  # bytes of VRAM for experts, unless somebody says how many
UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("iB", 1024), ("B", 1000), ("", 1024))
}
LEAST_BARE_BYTES = 1 << 20  # a number without a unit that is at least so large was meant as bytes
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(option: str, text: str) -> int:
    """Bytes of 8GiB, 3.2 GiB, 800MB or 5000000000B; a bare G is GiB. InputError for anything else."""
    match = SIZE.fullmatch(text)
    units = {name.upper(): factor for name, factor in UNITS.items()}
    if match is None or match[2].upper() not in units or not (nbytes := int(float(match[1]) * units[match[2].upper()])):
        remedy = "write it so"
        if match and not match[2] and float(match[1]):  # nobody means 8 bytes, nor 5 billion GiB
            remedy = f"write {match[1]}{'GiB' if float(match[1]) < LEAST_BARE_BYTES else 'B'}"
        raise InputError(f"{option} is no size", found=text, expected="a number and a unit, as 8GiB", remedy=remedy)
    return nbytes


def format_size(nbytes: float) -> str:
    """In the largest unit that leaves at least 1."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes:.0f} B"
