"""A BF16 source of the 35B's true size on a small disk: real headers, holes for data, filled and emptied by layers.

    python tests/bench/sparse_source.py make DIR --layers 40
    python tests/bench/sparse_source.py fill DIR 0:8
    python tests/bench/sparse_source.py punch DIR 0:8

The bytes by which the converter recognises a source (Checkpoint.sample) are there from the start and stay, so that it
takes DIR for the same source whichever layers are filled, and a conversion can go on slice by slice.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for bench and support

from bench.checks import check_empty, check_sizes
from bench.shape import model_config
from bench.sparse import OUTSIDE, fill, make, punch
from mosaic.format.errors import InputError
from mosaic.format.program import run_program

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint directory.")]
What = Annotated[str, typer.Argument(metavar="A:B|outside", help="Layers A to B-1; or embedding, head and norm.")]
Seed = Annotated[int, typer.Option(min=0, help="Same seed, same weights; give all commands the same.")]


@app.command("make")
def make_command(
    folder: Folder,
    layers: Annotated[int, typer.Option(help="Decoder layers; every fourth and the last are full attention.")] = 40,
    vocab: Annotated[int, typer.Option(help="Rows of embedding and head.")] = 248320,
    seed: Seed = 0,
) -> None:
    """Write the headers of a whole checkpoint, and the samples; all other data is one hole per file."""
    check_sizes(layers, vocab)
    check_empty(folder)
    make(folder, model_config(layers, vocab), seed)
    _told(folder)


@app.command("fill")
def fill_command(folder: Folder, what: What, seed: Seed = 0) -> None:
    """Fill tensors with random weights, all but the samples."""
    fill(folder, _layers(what), seed)
    _told(folder)


@app.command("punch")
def punch_command(folder: Folder, what: What) -> None:
    """Give the disk back what tensors take, all but the samples: they read as zeros."""
    punch(folder, _layers(what))
    _told(folder)


def _layers(what: str) -> range | None:
    """The layers of A:B; OUTSIDE for the tensors outside."""
    if what == "outside":
        return OUTSIDE
    first, colon, last = what.partition(":")
    if colon and first.isdecimal() and last.isdecimal() and int(first) < int(last):
        return range(int(first), int(last))
    raise InputError("not layers", found=what, expected="A:B with A below B, or outside", remedy="say 0:8")


def _told(folder: Path) -> None:
    files = [file.stat() for file in folder.iterdir()]
    size, held = sum(file.st_size for file in files), 512 * sum(file.st_blocks for file in files)
    print(f"{folder}: {size:,} bytes, of which {held:,} on the disk")


if __name__ == "__main__":
    run_program(app)
