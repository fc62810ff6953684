"""The tensors of a tiny checkpoint: noise with chosen gains, drawn block by block.

Two devices make the 128x128 blocks of a matrix differ in size without upsetting the activations.

* Draw.linear gives every block a power of two of its own, never the one of the block beside or above it, and divides
  by the root mean square over the matrix.
* Powers of four that cancel: rows of `up` against columns of `down`, `v` against `o`, rows of the GDN input projection
  against the depthwise filter behind them. These are exact in every float type, and leave the function as it was.

The gains are chosen for a hidden size of some hundreds: logits of standard deviation about 2, attention neither flat
nor one-hot, every expert in use.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

import torch

from support.tiny_config import vision_config

if TYPE_CHECKING:
    from support.tiny import Tiny

Tensors = dict[str, torch.Tensor]

BLOCK = 128
REACH = 4  # the cancelling sizes go from 2^-4 to 2^4
BRANCH = 0.4  # more would let float32 round-off grow past 1e-4 of the logits in transformers itself


class Draw:
    """Random tensors by name: one generator each, so that no tensor depends on which others exist."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def normal(self, name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator(name)) * std + mean

    def uniform(self, name: str, *shape: int, low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator(name)) * (high - low) + low

    def integers(self, name: str, *shape: int, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=self._generator(name))

    def powers(self, name: str, count: int, width: int = BLOCK) -> torch.Tensor:
        """[count]: a power of four for each run of `width` indices; even steps, so that odd ones stay odd."""
        exponents = 2 * self.integers(name, -(-count // width), low=-REACH // 2, high=REACH // 2)
        return torch.exp2(exponents.float()).repeat_interleave(width)[:count]

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """[rows, columns] that multiplies the root mean square of its input by about `gain`."""
        grid = (-(-rows // BLOCK), -(-columns // BLOCK))
        checker = (torch.arange(grid[0])[:, None] + torch.arange(grid[1])) % 2  # odd steps between neighbours
        exponents = checker + 2 * self.integers(name + ":blocks", *grid, low=0, high=2)
        sizes = torch.exp2(-exponents.float()).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
        sizes = sizes * (gain / math.sqrt(columns)) / sizes.square().mean().sqrt()
        return self.normal(name, rows, columns) * sizes

    def _generator(self, name: str) -> torch.Generator:
        own = name.removeprefix("model.").removeprefix("language_model.")  # the same in nested and flat layouts
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed}:{own}".encode()))  # torch reads 32 bits of it


def build_tensors(tiny: Tiny) -> Tensors:
    """Every tensor under its published name, in the order the shards hold them."""
    draw = Draw(tiny.seed)
    base = "model.language_model" if tiny.nested else "model"
    # A tied head would repeat its input if the embedding dominated the residual stream: keep it small.
    width = 2.0 / math.sqrt(tiny.hidden) if tiny.tie else 1.0
    tensors = {f"{base}.embed_tokens.weight": draw.normal("embed_tokens", tiny.vocab, tiny.hidden, std=width)}
    for i, kind in enumerate(tiny.layer_types):
        dense = i in tiny.mlp_only_layers
        tensors |= _layer(draw, tiny, f"{base}.layers.{i}", kind == "full_attention", dense, tiny.fused)
    tensors |= _norm(draw, tiny, f"{base}.norm", tiny.hidden)
    if not tiny.tie:
        tensors["lm_head.weight"] = draw.linear("lm_head", tiny.vocab, tiny.hidden, 2.0)
    if tiny.hybrid and tiny.mtp:
        tensors |= _mtp(draw, tiny)
    if tiny.nested and tiny.visual:
        tensors |= _visual(draw, tiny)
    return {name: tensor.to(_dtype(tiny, name)).contiguous() for name, tensor in tensors.items()}


def _dtype(tiny: Tiny, name: str) -> torch.dtype:
    wide = tiny.old and name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
    return torch.float32 if wide else getattr(torch, tiny.dtype)


def _branch(tiny: Tiny) -> float:
    """Gain of the matrices that write into the residual stream; against a small tied embedding, a small one."""
    return BRANCH / 2 if tiny.tie else BRANCH


def _norm(draw: Draw, tiny: Tiny, p: str, size: int, gain: float = 1.0) -> Tensors:
    """[size]; the hybrid families store the gain less one."""
    return {f"{p}.weight": draw.normal(p, size, std=0.15, mean=gain - tiny.hybrid)}


def _layer(draw: Draw, tiny: Tiny, p: str, full: bool, dense: bool, fused: bool) -> Tensors:
    tensors = _norm(draw, tiny, f"{p}.input_layernorm", tiny.hidden)
    tensors |= _attention(draw, tiny, f"{p}.self_attn") if full else _gated_delta(draw, tiny, f"{p}.linear_attn")
    tensors |= _norm(draw, tiny, f"{p}.post_attention_layernorm", tiny.hidden)
    if dense:
        return tensors | _mlp(draw, tiny, f"{p}.mlp", tiny.dense_inter)
    return tensors | _moe(draw, tiny, f"{p}.mlp", fused)


def _attention(draw: Draw, tiny: Tiny, p: str) -> Tensors:
    """Query rows come with their gate rows, head by head, in the hybrid families."""
    hidden, dim = tiny.hidden, tiny.head_dim
    q_dim = 2 * dim if tiny.hybrid else dim
    q_sizes = torch.exp2(2.0 * draw.integers(f"{p}.q_proj:heads", tiny.heads, low=0, high=1) - 1)  # half or twice
    k_sizes = draw.powers(f"{p}.k_proj:heads", tiny.kv_heads, width=1)  # undone by k_norm
    v_sizes = draw.powers(f"{p}.v_proj:heads", tiny.kv_heads, width=1)  # undone by o_proj
    per_head = tiny.heads // tiny.kv_heads
    q = draw.linear(f"{p}.q_proj", tiny.heads * q_dim, hidden, 1.3)
    k = draw.linear(f"{p}.k_proj", tiny.kv_heads * dim, hidden, 1.3)
    v = draw.linear(f"{p}.v_proj", tiny.kv_heads * dim, hidden)
    o = draw.linear(f"{p}.o_proj", hidden, tiny.heads * dim, _branch(tiny))
    return {
        f"{p}.q_proj.weight": q * q_sizes.repeat_interleave(q_dim)[:, None],
        f"{p}.k_proj.weight": k * k_sizes.repeat_interleave(dim)[:, None],
        f"{p}.v_proj.weight": v * v_sizes.repeat_interleave(dim)[:, None],
        f"{p}.o_proj.weight": o / v_sizes.repeat_interleave(per_head * dim),
        **_norm(draw, tiny, f"{p}.q_norm", dim, gain=1.6),
        **_norm(draw, tiny, f"{p}.k_norm", dim),
    }


def _gated_delta(draw: Draw, tiny: Tiny, p: str) -> Tensors:
    keys, values = tiny.linear_key_heads * tiny.linear_key_dim, tiny.linear_value_heads * tiny.linear_value_dim
    channels = 2 * keys + values
    sizes = draw.powers(f"{p}.in_proj_qkv:rows", channels)  # undone by conv1d
    qkv = draw.linear(f"{p}.in_proj_qkv", channels, tiny.hidden, 1.2) * sizes[:, None]
    z = draw.linear(f"{p}.in_proj_z", values, tiny.hidden, 1.5)
    b = draw.linear(f"{p}.in_proj_b", tiny.linear_value_heads, tiny.hidden, 1.5)
    a = draw.linear(f"{p}.in_proj_a", tiny.linear_value_heads, tiny.hidden)
    tensors = _decay(draw, tiny, p)
    tensors[f"{p}.conv1d.weight"] = draw.normal(f"{p}.conv1d", channels, 1, tiny.conv_kernel, std=0.5)
    tensors[f"{p}.conv1d.weight"] /= sizes[:, None, None]
    tensors[f"{p}.norm.weight"] = draw.normal(f"{p}.norm", tiny.linear_value_dim, std=0.15, mean=1.0)  # gain itself
    tensors[f"{p}.out_proj.weight"] = draw.linear(f"{p}.out_proj", tiny.hidden, values, _branch(tiny))
    if tiny.nested:
        projections = {"in_proj_qkv": qkv, "in_proj_z": z, "in_proj_b": b, "in_proj_a": a}
    else:
        q, k, v = qkv.split([keys, keys, values])
        projections = {"in_proj_qkvz": _by_key_head(tiny, q, k, v, z), "in_proj_ba": _by_key_head(tiny, b, a)}
    return tensors | {f"{p}.{kind}.weight": projection for kind, projection in projections.items()}


def _by_key_head(tiny: Tiny, *parts: torch.Tensor) -> torch.Tensor:
    """Regroup rows as qwen3_next stores them: for each key head its share of every part, in turn."""
    shares = [part.unflatten(0, (tiny.linear_key_heads, -1)) for part in parts]
    return torch.cat(shares, dim=1).flatten(0, 1)


def _decay(draw: Draw, tiny: Tiny, p: str) -> Tensors:
    """g = -exp(A_log) softplus(a + dt_bias), one of each per value head."""
    heads = tiny.linear_value_heads
    if tiny.decay == "strong":
        a_log, dt_bias = torch.linspace(-5.0, 5.0, heads), torch.linspace(-2.0, 3.0, heads)
    else:
        a_log = draw.uniform(f"{p}.A_log", heads, low=1.0, high=16.0).log()
        step = draw.uniform(f"{p}.dt_bias", heads, low=math.log(0.003), high=math.log(0.15)).exp()
        dt_bias = step + torch.log(-torch.expm1(-step))  # inverse of softplus
    return {f"{p}.A_log": a_log, f"{p}.dt_bias": dt_bias}


def _mlp(draw: Draw, tiny: Tiny, p: str, inter: int, place: int = 1) -> Tensors:
    """One SwiGLU. `place` among the experts sees to it that no two neighbours have matrices of the same sizes."""
    whole = draw.powers(f"{p}:whole", 1) * 2.0 ** (place % 2)
    sizes = whole * draw.powers(f"{p}.up_proj:rows", inter)
    gate = draw.linear(f"{p}.gate_proj", inter, tiny.hidden, 1.5 * 2.0 ** (place % 3 - 1))  # this one is felt
    up = draw.linear(f"{p}.up_proj", inter, tiny.hidden, 1.5)
    down = draw.linear(f"{p}.down_proj", tiny.hidden, inter, _branch(tiny))
    return {
        f"{p}.gate_proj.weight": gate,
        f"{p}.up_proj.weight": up * sizes[:, None],
        f"{p}.down_proj.weight": down / sizes,
    }


def _moe(draw: Draw, tiny: Tiny, p: str, fused: bool) -> Tensors:
    router = draw.normal(f"{p}.gate", tiny.experts, tiny.hidden, std=2.0 / math.sqrt(tiny.hidden))
    tensors = {f"{p}.gate.weight": router}
    experts: Tensors = {}
    for e in range(tiny.experts):
        experts |= _mlp(draw, tiny, f"{p}.experts.{e}", tiny.moe_inter, e)
    tensors |= _fuse(experts, f"{p}.experts", tiny.experts) if fused else experts
    if tiny.hybrid:
        tensors |= _mlp(draw, tiny, f"{p}.shared_expert", tiny.shared_inter)
        tensors[f"{p}.shared_expert_gate.weight"] = draw.linear(f"{p}.shared_expert_gate", 1, tiny.hidden, 1.5)
    return tensors


def _fuse(experts: Tensors, p: str, count: int) -> Tensors:
    """gate_up_proj [E, 2I, H], gate rows first, and down_proj [E, H, I]; these two names have no `.weight`."""
    kinds = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = ([experts[f"{p}.{e}.{kind}.weight"] for e in range(count)] for kind in kinds)
    return {
        f"{p}.gate_up_proj": torch.cat([torch.stack(gate), torch.stack(up)], dim=1),
        f"{p}.down_proj": torch.stack(down),
    }


def _mtp(draw: Draw, tiny: Tiny) -> Tensors:
    tensors = {"mtp.fc.weight": draw.linear("mtp.fc", tiny.hidden, 2 * tiny.hidden)}
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors |= _norm(draw, tiny, f"mtp.{norm}", tiny.hidden)
    return tensors | _layer(draw, tiny, "mtp.layers.0", full=True, dense=False, fused=tiny.fused and not tiny.old)


def _visual(draw: Draw, tiny: Tiny) -> Tensors:
    """The vision tower, to be carried through unread."""
    sizes = vision_config(tiny)
    h, inter, patch = sizes["hidden_size"], sizes["intermediate_size"], sizes["patch_size"]
    merged = h * sizes["spatial_merge_size"] ** 2
    shapes = {"patch_embed.proj": (h, sizes["in_channels"], sizes["temporal_patch_size"], patch, patch)}
    for b in range(sizes["depth"]):
        block = {"norm1": (h,), "norm2": (h,), "attn.qkv": (3 * h, h), "attn.proj": (h, h)}
        block |= {"mlp.linear_fc1": (inter, h), "mlp.linear_fc2": (h, inter)}
        shapes |= {f"blocks.{b}.{module}": shape for module, shape in block.items()}
    shapes |= {"merger.norm": (h,), "merger.linear_fc1": (merged, merged)}
    shapes |= {"merger.linear_fc2": (sizes["out_hidden_size"], merged)}
    tensors = {"model.visual.pos_embed.weight": draw.normal("pos_embed", sizes["num_position_embeddings"], h, std=0.02)}
    for module, shape in shapes.items():
        p = f"model.visual.{module}"
        mean, std = (1.0, 0.05) if len(shape) == 1 else (0.0, 1.0 / math.sqrt(math.prod(shape[1:])))
        tensors[f"{p}.weight"] = draw.normal(f"{p}.weight", *shape, mean=mean, std=std)
        tensors[f"{p}.bias"] = draw.normal(f"{p}.bias", shape[0], std=0.02)
    return tensors
