"""Which GPUs are refused, and what is said then. What one does: kernels/test_device.py."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from mosaic.format.errors import InputError
from mosaic.runtime.ops.cuda.find import find_gpu


@pytest.fixture
def gpus(monkeypatch):
    """A machine with triton and the GPUs of these compute capabilities."""
    capabilities = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    return capabilities


def refused(number):
    with pytest.raises(InputError) as error:
        find_gpu(number)
    assert error.value.facts["remedy"].endswith("or choose --device cpu")
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
