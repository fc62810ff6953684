"""How releases cut a checkpoint into files, and the index that says which file holds what. No torch until it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

INDEX = "model.safetensors.index.json"


def split(sizes: Mapping[str, int], stem: str, shards: int) -> dict[str, list[str]]:
    """Cut {name: bytes} into at most `shards` runs of about equal bytes; layers are cut wherever it falls."""
    target = sum(sizes.values()) / shards
    groups: list[list[str]] = [[]]
    done = 0
    for name, size in sizes.items():
        if groups[-1] and done >= target * len(groups) and len(groups) < shards:
            groups.append([])
        groups[-1].append(name)
        done += size
    return {f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def write_shards(folder: Path, files: dict[str, dict[str, torch.Tensor]], float_total: bool = False) -> None:
    """Write {file: {name: tensor}} and the index. Qwen3.6 publishes total_size as a JSON float."""
    from safetensors.torch import save_file

    for file, tensors in files.items():
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, Path(folder) / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    write_index(folder, weight_map, float(total) if float_total else total)


def write_index(folder: Path, weight_map: dict[str, str], total: float) -> None:
    """Write model.safetensors.index.json."""
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (Path(folder) / INDEX).write_text(json.dumps(index, indent=2) + "\n")
