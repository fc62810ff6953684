"""Which GPUs are refused, and what is said then. What a GPU does: kernels/test_device.py."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from mosaic.format.errors import InputError
from mosaic.runtime.ops.cuda.device import find


@pytest.fixture
def gpus(monkeypatch):
    """A machine with torch for CUDA, triton, and the GPUs of these compute capabilities."""
    capabilities = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", "Model {}".format)
    return capabilities


def refused(number):
    with pytest.raises(InputError) as error:
        find(number)
    assert error.value.facts["remedy"]
    return str(error.value)


def test_torch_without_cuda(gpus, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built with CUDA" in refused(None)


def test_no_triton(gpus, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "mosaic-moe[gpu]" in refused(0)


def test_no_gpu(gpus):
    assert "nvidia-smi" in refused(None)


@pytest.mark.parametrize(("count", "expected"), [(1, "cuda:0"), (3, "cuda:0 to cuda:2")])
def test_no_such_number(gpus, count, expected):
    gpus += [(8, 9)] * count
    assert f"found:    cuda:{count}\n  expected: {expected}\n" in refused(count)


@pytest.mark.parametrize("capability", [(7, 0), (6, 1)])
def test_too_old(gpus, capability):
    gpus += [(8, 6), capability]
    assert f"Model 1: {capability[0]}.{capability[1]}" in refused(1)
