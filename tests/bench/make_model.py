"""Makes a model of the 35B's true layer shape with random weights, to measure what no downloaded model can show here.

python tests/bench/make_model.py OUT --layers 8
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for bench and support

from bench.checks import check_absent, check_empty, check_room, check_sizes
from bench.shape import Json, model_config
from bench.write_model import model_bytes, write_model
from bench.write_source import source_bytes, write_source
from mosaic.format.errors import InputError
from mosaic.format.program import run_program

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def command(
    layers: Annotated[int, typer.Option(help="Decoder layers; every fourth and the last are full attention.")],
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Directory; may be left out with --gguf.")] = None,
    source: Annotated[bool, typer.Option("--source", help="Write OUT as the BF16 release.")] = False,
    gguf: Annotated[Path | None, typer.Option(metavar="FILE", help="Write FILE (too): Q8_0 for llama.cpp.")] = None,
    vocab: Annotated[int, typer.Option(help="Rows of embedding and head; the true number is 248320.")] = 512,
    recipe: Annotated[str, typer.Option(help="Recipe of OUT: e4m3, or e4m3-head for an E4M3 head.")] = "e4m3",
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same bytes.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Write the layers of Qwen3.6-35B-A3B with random weights: a Mosaic model directory, or another form of that shape.

    A layer takes 0.84 GB, with --source 1.7 GB, in a GGUF 0.9 GB. The same seed gives the same weights in all three,
    but each in its own precision, and a few E4M3 scales are not those that mosaic-convert would choose: the bytes of
    OUT are not those of a converted --source. There is no vision tower and no MTP, the tokenizer knows bytes only, and
    the text that comes out means nothing.
    """
    check_sizes(layers, vocab)
    config = model_config(layers, vocab)
    if out is None and gguf is None:
        raise InputError("nothing to write", found="neither OUT nor --gguf", remedy="name one of them, or both")
    if source and gguf is not None:
        raise InputError("--source and --gguf exclude each other", remedy="run the program once for each")
    if gguf is not None and layers == 1:
        expected = "2 or more: llama.cpp aborts on this family without a linear attention layer"
        raise InputError("--layers is not usable with --gguf", found=1, expected=expected, remedy="--layers 2")
    if out is not None:
        check_empty(out)
    if gguf is not None:
        check_absent(gguf)
    if out is not None:
        check_room(out, (source_bytes if source else model_bytes)(config))
        if source:
            _timed(out, lambda: write_source(out, config, seed, quiet))
        else:
            _timed(out, lambda: write_model(out, config, seed, quiet, recipe))
    if gguf is not None:
        _gguf(gguf, config, seed, quiet)


def _gguf(file: Path, config: Json, seed: int, quiet: bool) -> None:
    try:
        from bench.write_gguf import gguf_bytes, write_gguf
    except ModuleNotFoundError as error:
        raise InputError("--gguf needs the gguf package", found=error, remedy="pip install gguf") from error
    check_room(file, gguf_bytes(config))
    _timed(file, lambda: write_gguf(file, config, seed, quiet))


def _timed(path: Path, write: Callable[[], None]) -> None:
    start = time.monotonic()
    write()
    seconds = time.monotonic() - start
    files = list(path.iterdir()) if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    print(f"{path}: {size:,} bytes in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s")


if __name__ == "__main__":
    run_program(app)
