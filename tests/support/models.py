"""Converts checkpoints for tests and reads the result back without Mosaic's own readers."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mosaic.convert.pipeline import convert
from mosaic.convert.plan import make_plan
from mosaic.convert.quantize import NonFinite
from mosaic.convert.recipe import load_recipe
from mosaic.format.source import Checkpoint
from support.fp8 import dequantise


def convert_folder(source: Path, out: Path, recipe: str = "e4m3", **options: Any) -> Path:
    """Convert `source` into `out` as mosaic-convert does; returns `out`."""
    nonfinite = options.pop("nonfinite", NonFinite.REFUSE)
    settings = {"workers": 2, "overwrite": False, "quiet": True} | options
    with Checkpoint(source) as checkpoint:
        convert(make_plan(checkpoint, load_recipe(recipe), nonfinite), out, **settings)
    return out


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every safetensors file of a folder, through the library."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no iterator
    return tensors


def dequantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights in float32, scales applied."""
    result = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            result[name] = dequantise(tensor, scale)
        elif not name.endswith("_scale_inv"):
            result[name] = tensor.float()
    return result


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Same dtype, shape and bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
