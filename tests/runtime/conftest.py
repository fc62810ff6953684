"""Model directories to run: the embedded demo and a tiny random model, each converted once per session."""

from pathlib import Path

import pytest
import torch

from mosaic.convert.pipeline import convert
from mosaic.convert.plan import make_plan
from mosaic.convert.recipe import load_recipe
from mosaic.format.source import Checkpoint
from mosaic.recipes import DEMO_CHECKPOINT
from mosaic.runtime.experts.trace import Trace, read_trace
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.loading import Loading, LoadOptions
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.tokenizer import Tokenizer
from support.tiny import Tiny, write_checkpoint, write_tokenizer

torch.set_num_threads(1)

TINY = Tiny(interval=2, layers=4, mtp=False, visual=False, shards=1)  # two linear and two full-attention layers
ROUTED = 400  # tokens of the demo whose routing is recorded


def converted(source: Path, out: Path) -> Path:
    with Checkpoint(source) as checkpoint:
        convert(make_plan(checkpoint, load_recipe("e4m3")), out, workers=1, overwrite=False, quiet=True)
    return out


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo as a model directory. Not to be written to."""
    return converted(DEMO_CHECKPOINT, tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a tokenizer whose token ids are bytes. Not to be written to."""
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_checkpoint(TINY, folder)
    write_tokenizer(folder, TINY.vocab)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_checkpoint: Path) -> Path:
    """`tiny_checkpoint` as a model directory. Not to be written to."""
    return converted(tiny_checkpoint, tiny_checkpoint.parent / "model")


@pytest.fixture(scope="session")
def recorded(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    """The demo's routing of a piece of a held-out text, recorded as mosaic-run records it: the file, what is in it."""
    file = tmp_path_factory.mktemp("routing") / "demo.trace"
    text = (DEMO_CHECKPOINT.parent / "heldout" / "austen.txt").read_text()
    loaded = Loading(demo, KVFormat.BF16, context=ROUTED).load(CpuOps(), LoadOptions(record=file))
    loaded.model.hidden(Tokenizer(demo).encode(text[:4000])[:ROUTED], loaded.model.new_sequence())
    return file, read_trace(file)
