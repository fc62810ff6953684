"""Tiny checkpoints, written once, and copies of them to spoil."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from mosaic.convert.pipeline import convert
from mosaic.convert.plan import make_plan
from mosaic.convert.recipe import load_recipe
from mosaic.format.source import Checkpoint
from support.fp8 import write_official_fp8
from support.tiny import Tiny, write_checkpoint

torch.set_num_threads(1)  # tensors this small gain nothing from more

#: One linear and one full layer, MTP and vision: every kind of tensor there is, in 6 MB.
SMALL = Tiny(layers=2, interval=2, experts=4, top_k=2)


@pytest.fixture(autouse=True)
def light(tmp_path, monkeypatch):
    """Hundreds of copies of a checkpoint: none is kept, and none need survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    yield
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.fixture(scope="session")
def originals(tmp_path_factory):
    """bf16, its FP8 release, and what bf16 converts to. Not to be changed."""
    folder = tmp_path_factory.mktemp("originals")
    write_checkpoint(SMALL, folder / "bf16")
    write_official_fp8(folder / "bf16", folder / "fp8")
    with Checkpoint(folder / "bf16") as source:
        convert(make_plan(source, load_recipe("e4m3")), folder / "out", workers=1, overwrite=False, quiet=True)
    return folder


@pytest.fixture
def bf16(originals, tmp_path) -> Path:
    """A BF16 checkpoint of one's own."""
    return Path(shutil.copytree(originals / "bf16", tmp_path / "bf16"))


@pytest.fixture
def fp8(originals, tmp_path) -> Path:
    """An official-style FP8 checkpoint of one's own."""
    return Path(shutil.copytree(originals / "fp8", tmp_path / "fp8"))


@pytest.fixture
def model(originals, tmp_path) -> Path:
    """A sound model directory of one's own."""
    return Path(shutil.copytree(originals / "out", tmp_path / "model"))
