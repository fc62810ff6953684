"""Which device is used, and how it is told that there is none."""

import pytest
import torch

from mosaic.format.errors import InputError
from mosaic.runtime.device.choice import HOST_ONLY, DeviceChoice, choose_device
from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.engine import Engine
from mosaic.runtime.ops.reference import ReferenceOps


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_the_host_does_it_all():
    assert choose_device("cpu") is HOST_ONLY
    assert choose_device("auto") == DeviceChoice(None, needed=False, why="no GPU that torch can use")


@pytest.mark.parametrize(("device", "used"), [("cuda", False), ("cuda:1", False), ("auto", True)])
def test_a_gpu_that_is_not_there(device, used):
    with pytest.raises(InputError, match="the GPU asked for cannot be used") as raised:
        choose_device(device, used=used)
    assert raised.value.facts["found"] == "no GPU that torch can use"
    assert "leave --device, --vram and --gpu-layers out" in raised.value.facts["remedy"]


@pytest.mark.parametrize("options", [{"vram": 1 << 20}, {"gpu_layers": 1}, {"device": "cuda"}])
def test_what_is_said_of_a_gpu_is_not_ignored(tiny, options):
    with pytest.raises(InputError, match="the GPU asked for cannot be used"):
        Engine.load(tiny, **options)
    with pytest.raises(InputError, match="a device needs the CPU's kernels"):
        Engine.load(tiny, ops=ReferenceOps(), **options)


def test_a_device_that_is_full(tiny, monkeypatch):
    """By name it is refused; by itself it is let alone."""
    full = HostDevice(room=1 << 20)
    with pytest.raises(InputError, match="nothing of this model can be on the device"):
        Engine.load(tiny, device=full)
    monkeypatch.setattr("mosaic.runtime.ops.cuda.find.find_gpu", lambda number: full)
    assert Engine.load(tiny, context=64).generate([1], max_tokens=2).tokens
    assert full.memory.used == {}


@pytest.mark.parametrize(
    "options",
    [
        {"device": 0}, {"device": False}, {"threads": 0}, {"threads": -1}, {"threads": "2"}, {"threads": 1.5},
        {"gpu_layers": -1}, {"gpu_layers": "all"}, {"gpu_layers": True}, {"vram": -1}, {"vram": 1.5}, {"ram": -1},
        {"parallel": 0}, {"device": "cpu", "gpu_layers": 2}, {"device": "cpu", "vram": "1GiB"},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_cannot_be_used(tiny, options):
    with pytest.raises(InputError, match=r"out of range|no such device|not used"):
        Engine.load(tiny, **options)
