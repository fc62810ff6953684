"""A mapped shard that changes while the model runs: a sentence and exit code 2, and no word that is wrong."""

import os
import shutil
import subprocess
import sys

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.engine import Engine
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.loading import LoadOptions
from mosaic.runtime.request import Request
from mosaic.runtime.sampling import Sampling
from mosaic.runtime.weights import Weights

SHRINK = """
import os, sys
from pathlib import Path
from mosaic.runtime.mapped_shard import MappedShard
shard = MappedShard(Path(sys.argv[1]))
os.truncate(sys.argv[1], 4096)
print(shard.buffer[100], flush=True)
print(sum(shard.buffer[5000:]))
"""


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "model")


def test_a_shard_that_shrinks_is_named(copy):
    file = copy / "layers-01.safetensors"
    done = subprocess.run([sys.executable, "-c", SHRINK, file], capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 1
    assert "became shorter" in done.stderr
    assert str(file) in done.stderr
    assert "Traceback" not in done.stderr


def test_another_bus_error_is_none_of_ours(copy):
    code = f"""
import mmap, os
from pathlib import Path
from mosaic.runtime.mapped_shard import MappedShard
shard = MappedShard(Path({str(copy / "layers-01.safetensors")!r}))
with open({str(copy / "other")!r}, "w+b") as stream:
    stream.write(bytes(8192)); stream.flush()
    other = mmap.mmap(stream.fileno(), 0)
    os.truncate(stream.fileno(), 4096)
    other[5000]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -7  # SIGBUS
    assert "became shorter" not in done.stderr


@pytest.mark.parametrize("shard", ["layers-02.safetensors", "outside.safetensors"])
def test_a_mapped_shard_that_is_written_to_is_refused_before_its_token_is_chosen(copy, shard):
    scheduler = Engine.load(copy).scheduler
    scheduler.stop = frozenset()
    tokens = scheduler.run(Request([1, 2, 3], Sampling(temperature=0.0)))
    next(tokens)
    os.utime(copy / shard, ns=(0, 0))
    with pytest.raises(InputError, match="changed while the model was running") as caught:
        next(tokens)
    assert shard in str(caught.value)


def test_damaged_experts_are_found_when_sums_are_checked(copy):
    places = ExpertPlaces(Weights(copy))
    for key in places:
        with (copy / places[key].shard).open("r+b") as stream:
            stream.seek(places[key].offset)
            stream.write(bytes(1 for _ in range(50)))
    with pytest.raises(InputError, match=r"expert \d+ of layer 0 is damaged"):
        Engine.load(copy, options=LoadOptions(check=True)).generate([1], max_tokens=1)


def test_a_mapped_model_that_is_deleted_runs_on(copy):
    engine = Engine.load(copy)
    shutil.rmtree(copy)
    assert engine.generate([1, 2, 3], max_tokens=3).tokens
