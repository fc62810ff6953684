"""Official-style FP8 releases of tiny checkpoints: somebody else's files, not Mosaic's output.

Written as the vendor writes them: layers-N.safetensors without padding, experts un-fused, scales rounded to the
nearest bfloat16 (so the largest weights of a block may clip), the long skip list. Matrices are quantised whatever
their shape; a ragged one gets a scale grid rounded up, which is what a hostile or unusual release looks like.
"""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open

from support.shards import INDEX, write_shards

BLOCK = 128
LARGEST = 448.0

QUANTISED = re.compile(
    r"\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|in_proj_qkvz|out_proj)"
    r"|mlp(\.shared_expert|\.experts\.\d+)?\.(gate|up|down)_proj)\.weight$"
)
FUSED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)$")
LAYER = re.compile(r"^model\.(language_model\.)?layers\.(?P<layer>\d+)\.")


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that the index lists."""
    weight_map = json.loads((Path(folder) / INDEX).read_text())["weight_map"]
    tensors = {}
    for file in dict.fromkeys(weight_map.values()):
        with safe_open(Path(folder) / file, framework="pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 (not a mapping)
    return tensors


def write_official_fp8(source_folder: Path, folder: Path, scale_dtype: torch.dtype = torch.bfloat16) -> None:
    """Quantise the checkpoint in `source_folder` into `folder`, which becomes an FP8 release of it."""
    source_folder, folder = Path(source_folder), Path(folder)
    shutil.copytree(source_folder, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in unfuse(read_checkpoint(source_folder)).items():
        shard = files.setdefault(_file(name), {})
        if QUANTISED.search(name):
            shard[name], shard[f"{name}_scale_inv"] = quantise(tensor, scale_dtype)
        else:
            shard[name] = tensor
    write_shards(folder, files)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": _skip_list([name for shard in files.values() for name in shard]),
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=4))


def quantise(weight: torch.Tensor, scale_dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> codes [N, K] float8_e4m3fn and their multipliers [ceil(N/128), ceil(K/128)]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [grid rows, 128, grid columns, 128]
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / LARGEST, 1.0).to(scale_dtype)
    quotient = (blocks / scale.float()[:, None, :, None]).clamp(-LARGEST, LARGEST)
    codes = quotient.to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1)
    return codes[:rows, :columns].contiguous(), scale


def dequantise(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes [N, K], scale [ceil(N/128), ceil(K/128)] -> float32 [N, K]; exact for bfloat16 scales."""
    rows, columns = codes.shape
    spread = scale.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.float() * spread


def unfuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights with one matrix per expert and kind."""
    single = {}
    for name, tensor in tensors.items():
        fused = FUSED.match(name)
        if fused is None:
            single[name] = tensor
            continue
        kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[fused["kind"]]
        for e, expert in enumerate(tensor):
            for kind, matrix in zip(kinds, expert.chunk(len(kinds)), strict=True):
                single[f"{fused['experts']}.{e}.{kind}.weight"] = matrix
    return single


def _file(name: str) -> str:
    if name.startswith("mtp."):
        return "mtp.safetensors"
    layer = LAYER.match(name)
    return f"layers-{layer['layer']}.safetensors" if layer else "outside.safetensors"


def _skip_list(names: list[str]) -> list[str]:
    """modules_to_not_convert as published, `model.embed_tokens` and the fused `in_proj_ba` included."""
    modules = {"lm_head", "model.embed_tokens"}
    for name in names:
        module = name.removesuffix(".weight").removesuffix(".bias")
        outside = module.endswith((".embed_tokens", "model.norm", "language_model.norm"))
        if outside or name.endswith("_scale_inv") or QUANTISED.search(name):
            continue
        modules.add(module)
        if module.endswith(".in_proj_b"):
            modules.add(f"{module}a")
    return sorted(modules)
