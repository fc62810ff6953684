"""What --device, --vram and --gpu-layers may be together."""

import pytest

from mosaic.format.errors import InputError
from mosaic.runtime.options import parse_device, vram_size


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", ("cpu", None)),
        ("auto", ("auto", None)),
        ("cuda", ("cuda", None)),
        ("cuda:0", ("cuda", 0)),
        ("cuda:12", ("cuda", 12)),
    ],
)
def test_devices(text, device):
    assert parse_device(text) == device


@pytest.mark.parametrize(
    "text",
    [
        "",
        " cuda",
        "CUDA",
        "gpu",
        "cpu:0",
        "auto:1",
        "cuda:",
        "cuda:-1",
        "cuda:x",
        "cuda:1 ",
        "cuda:0:1",
        "cuda:٣",
        "cuda:1\n",
    ],
)
def test_what_is_no_device(text):
    with pytest.raises(InputError, match="no such --device") as refusal:
        parse_device(text)
    assert "cuda:N" in str(refusal.value)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "auto"])
def test_a_gpu_has_memory(device):
    assert vram_size(device, "3GiB", 4) == 3 << 30
    assert vram_size(device, None, 0) is None
    with pytest.raises(InputError, match="--vram is no size"):
        vram_size(device, "much", None)


def test_the_cpu_has_none():
    assert vram_size("cpu", None, None) is None
    with pytest.raises(InputError, match="--vram means nothing with --device cpu"):
        vram_size("cpu", "3GiB", None)
    with pytest.raises(InputError, match="--gpu-layers means nothing with --device cpu"):
        vram_size("cpu", None, 0)
    with pytest.raises(InputError, match="no such --device"):
        vram_size("tpu", None, None)
