"""Which GPUs are refused, and what is said then. What one does: kernels/test_device.py."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from mosaic.format.errors import InputError
from mosaic.runtime.device.choice import choose_device
from mosaic.runtime.ops.cuda.find import find_gpu


@pytest.fixture
def gpus(monkeypatch):
    """A machine with triton and the GPUs of these compute capabilities."""
    capabilities = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    return capabilities


def refused(number):
    with pytest.raises(InputError) as error:
        find_gpu(number)
    assert error.value.facts["remedy"].endswith("leave --device, --vram and --gpu-layers out")
    return error.value.facts["found"]


def test_no_gpu(gpus):
    assert refused(None) == "no GPU that torch can use"


def test_no_triton(gpus, monkeypatch):
    gpus.append((8, 9))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton" in refused(0)


@pytest.mark.parametrize("number", [2, 5])
def test_no_such_number(gpus, number):
    gpus += [(8, 9), (8, 6)]
    assert refused(number) == "2 GPUs, numbered from 0"


@pytest.mark.parametrize("capability", [(7, 0), (6, 1)])
def test_too_old(gpus, capability):
    gpus += [(8, 6), capability]
    assert refused(1) == f"one of compute capability {capability[0]}.{capability[1]}"


@pytest.mark.parametrize("error", [RuntimeError("no kernel image is available"), OSError("no cc")])
def test_one_on_which_nothing_runs(gpus, monkeypatch, error):
    """Refused, so that a program that was not asked for it can do without."""
    pytest.importorskip("triton")
    gpus.append((8, 9))

    class Broken:
        def __init__(self, number):
            self.number = number

        def try_out(self):
            raise error

    monkeypatch.setattr("mosaic.runtime.ops.cuda.device.CudaDevice", Broken)
    assert refused(0) == f"one on which no kernel runs: {error}"
    assert choose_device("auto").device is None
