"""A checkpoint as small as they get, what it converts to, and conversions disturbed at one moment after the other."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch

from support.killing import Forker
from support.tiny import Tiny, write_checkpoint, write_tokenizer

#: One linear layer, one full one and MTP: four shards, in 1 MB.
SMALLEST = Tiny(layers=2, interval=2, hidden=128, experts=2, top_k=1, head_dim=32, visual=False, shards=2)


@pytest.fixture(scope="session")
def forker():
    with Forker() as process:
        yield process


@pytest.fixture(scope="session")
def made(tmp_path_factory, forker):
    """`bf16`; `tuned`, which has other weights under the same names; and `<source>-<recipe>`, what they convert to."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("smallest")
    write_checkpoint(SMALLEST, folder / "bf16")
    write_tokenizer(folder / "bf16", SMALLEST.vocab)
    write_checkpoint(Tiny(**(vars(SMALLEST) | {"seed": 1})), folder / "tuned")
    for source in ("bf16", "tuned"):
        for recipe in ("e4m3", "experts-only"):
            forker.finish(folder / source, folder / f"{source}-{recipe}", "--recipe", recipe)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def out(tmp_path) -> Path:
    """Where to convert to; gone after the test."""
    yield tmp_path / "out"
    shutil.rmtree(tmp_path)


@pytest.fixture(params=[pytest.param(9, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def step(request):
    """How many moments of a conversion to go on by; all of them take a while."""
    return request.param


@pytest.fixture
def disturbed(forker, out, step):
    """Convert anew, disturbed at one moment, then at a later one, until there are no more: (moment, outcome).

    Some moments are every so many of all of them, or all of the kind `few`.
    """

    def each(source, *options, deed, start=None, few=None, fewest=30, **settings):
        if step > 1 and few:
            settings["only"], fewest = few, 10
        for at in itertools.count(1, 1 if few else step):
            shutil.rmtree(out, ignore_errors=True)
            if start:
                shutil.copytree(start, out)
            done = forker.convert(source, out, *options, at=at, deed=deed, **settings)
            if not done.reached:
                assert done.code == 0, done.text
                assert at > fewest, "most moments went unseen"
                return
            yield at, done

    return each
