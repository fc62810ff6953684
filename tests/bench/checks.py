"""What the programs of this folder refuse before they write: sizes, places, and disks without room."""

from pathlib import Path

from mosaic.convert.target import free_space
from mosaic.format.e4m3 import BLOCK
from mosaic.format.errors import InputError

MOST_LAYERS = 200
SMALLEST_VOCAB = 3 * BLOCK  # the tokens of support.tiny_tokenizer fit


def check_sizes(layers: int, vocab: int) -> None:
    """Refuse a model that cannot be."""
    if not 1 <= layers <= MOST_LAYERS:
        raise InputError(
            "--layers is not usable", found=layers, expected=f"1 to {MOST_LAYERS}", remedy="the 35B has 40"
        )
    if vocab < SMALLEST_VOCAB or vocab % BLOCK:
        expected = f"a multiple of {BLOCK}, at least {SMALLEST_VOCAB}"
        raise InputError("--vocab is not usable", found=vocab, expected=expected, remedy="the 35B has 248320")


def check_empty(folder: Path) -> None:
    """Refuse a directory to write that holds something, or cannot be made."""
    if folder.exists() and not folder.is_dir():
        raise InputError("OUT is a file", file=folder, remedy="choose another OUT")
    if folder.is_dir() and (names := sorted(path.name for path in folder.iterdir())):
        raise InputError("OUT is not empty", file=folder, found=", ".join(names[:3]), remedy="choose another OUT")
    _check_parent(folder)


def check_absent(file: Path) -> None:
    """Refuse a file to write that is there, or cannot be made."""
    if file.exists():
        raise InputError("the file is there already", file=file, remedy="remove it, or choose another")
    _check_parent(file)


def check_room(path: Path, nbytes: int) -> None:
    """Refuse if the disk has no room for so many bytes and some small files."""
    needed, free = nbytes + 50_000_000, free_space(path)
    if needed > free:
        raise InputError(
            "not enough room on the disk",
            file=path,
            found=f"{free:,} bytes free",
            expected=f"{needed:,} bytes",
            remedy="fewer layers, or another disk",
        )


def _check_parent(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise InputError("its folder does not exist", file=path, remedy="make the folder first")
