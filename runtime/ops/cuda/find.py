"""Whether there is a GPU here that can be used. Imports no triton, which many machines have no use for."""

import importlib.util
import subprocess

import torch

from mosaic.format.errors import InputError
from mosaic.runtime.device import Device

LEAST = (7, 5)  # compute capability


def find_gpu(number: int | None) -> Device:
    """The one with a number, or the first. InputError if it cannot be used."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise _unusable("no GPU that torch can use", "install NVIDIA's driver, and a torch that is built for CUDA")
    if importlib.util.find_spec("triton") is None:
        raise _unusable("no triton, which compiles the kernels", "pip install 'mosaic-moe[gpu]'")
    count, number = torch.cuda.device_count(), number or 0
    if number >= count:
        raise _unusable(f"{count} GPUs, numbered from 0", "choose one of these")
    capability = torch.cuda.get_device_capability(number)
    if capability < LEAST:
        raise _unusable(f"one of compute capability {capability[0]}.{capability[1]}", "use a newer one")
    return _tried(number)


def _tried(number: int) -> Device:
    """InputError if nothing runs there: for want of a compiler, of code for this GPU, of its being free."""
    from triton.errors import TritonError

    from mosaic.runtime.ops.cuda.device import CudaDevice

    try:
        device = CudaDevice(number)
        device.try_out()
    except (TritonError, RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        raise _unusable(f"one on which no kernel runs: {error}", "see what is missing") from error
    return device


def _unusable(found: str, remedy: str) -> InputError:
    return InputError(
        "the GPU asked for cannot be used",
        found=found,
        expected=f"an NVIDIA GPU of compute capability {LEAST[0]}.{LEAST[1]} or more",
        remedy=f"{remedy}; for the CPU alone leave --device, --vram and --gpu-layers out",
    )
