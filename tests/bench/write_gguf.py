"""Writes the weights of `write_source` as a Q8_0 GGUF, the way llama.cpp's own converter lays this family out.

Facts taken from that converter (llama.cpp as in llama-cpp-python 0.3.36), checked by running the result: names; which
tensors stay F32; zero-centred norms stored plus one; A_log as -exp; the V heads of linear attention in tiled order,
first those that are first of their key head; gate and up of the experts apart. Needs the gguf package.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.gguf_metadata import ARCHITECTURE, add_numbers, add_tokenizer
from bench.random_weights import Q8_BLOCK, RandomWeights
from bench.shape import Json, Weight, fused
from mosaic.format.e4m3 import BFLOAT16
from mosaic.format.tensors import Role

SLICE = 1 << 22  # weights
Rows = tuple[int, int]

#: GGUF names by the ends of Mosaic's keys.
NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "input_norm": "attn_norm.weight",
    "post_norm": "post_attention_norm.weight",
    "attention.query": "attn_q.weight",
    "attention.key": "attn_k.weight",
    "attention.value": "attn_v.weight",
    "attention.output": "attn_output.weight",
    "attention.query_norm": "attn_q_norm.weight",
    "attention.key_norm": "attn_k_norm.weight",
    "delta.qkv": "attn_qkv.weight",
    "delta.z": "attn_gate.weight",
    "delta.b": "ssm_beta.weight",
    "delta.a": "ssm_alpha.weight",
    "delta.output": "ssm_out.weight",
    "delta.conv": "ssm_conv1d.weight",
    "delta.a_log": "ssm_a",
    "delta.dt_bias": "ssm_dt.bias",
    "delta.norm": "ssm_norm.weight",
    "moe.router": "ffn_gate_inp.weight",
    "moe.shared.gate": "ffn_gate_shexp.weight",
    "moe.shared.up": "ffn_up_shexp.weight",
    "moe.shared.down": "ffn_down_shexp.weight",
    "moe.shared_gate": "ffn_gate_inp_shexp.weight",
    "moe.experts.0.gate": "ffn_gate_exps.weight",
    "moe.experts.0.up": "ffn_up_exps.weight",
    "moe.experts.0.down": "ffn_down_exps.weight",
}
F32 = ("norm", "delta.conv", "delta.a_log", "delta.dt_bias", "moe.router", "moe.shared_gate")  # the rest is Q8_0


@dataclass(frozen=True)
class Stored:
    """One tensor of the GGUF: runs of rows of a tensor of the BF16 release, and the order of its column groups."""

    name: str
    shape: tuple[int, ...]
    kind: str  # the end of its key
    weight: Weight
    rows: tuple[Rows, ...]
    columns: tuple[int, ...] = ()  # groups of head_dim columns, if not as they are

    @property
    def quantized(self) -> bool:
        return not self.kind.endswith(F32)

    @property
    def nbytes(self) -> int:
        count = prod(self.shape)
        return count // Q8_BLOCK * (2 + Q8_BLOCK) if self.quantized else 4 * count


def gguf_bytes(config: Json) -> int:
    """Bytes of all tensors."""
    return sum(stored.nbytes for stored in _contents(config))


def write_gguf(file: Path, config: Json, seed: int, quiet: bool = False) -> None:
    """Write `file`."""
    writer = gguf.GGUFWriter(file, ARCHITECTURE)
    add_numbers(writer, config["text_config"])
    add_tokenizer(writer, config)
    contents = list(_contents(config))
    kinds = gguf.GGMLQuantizationType
    for stored in contents:
        kind = kinds.Q8_0 if stored.quantized else kinds.F32
        writer.add_tensor_info(stored.name, stored.shape, np.dtype(np.float32), stored.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout
    stream = writer.fout[0]
    writer.write_padding(stream, stream.tell())
    random = RandomWeights(fused(config), seed)
    total = sum(stored.nbytes for stored in contents)
    with tqdm(total=total, unit="B", unit_scale=True, disable=quiet or None, desc="gguf") as bar:
        for stored in contents:  # not writer.write_tensor_data: it wants whole tensors, and these are large
            for data in _data(stored, random):
                bar.update(stream.write(data.data))
            writer.write_padding(stream, stored.nbytes)
    writer.close()


def _data(stored: Stored, random: RandomWeights) -> Iterator[NDArray[np.generic]]:
    """The bytes of a tensor in order."""
    name, width = stored.weight.name, stored.shape[-1] if len(stored.shape) > 1 else 1
    for first, last in _slices(stored.rows, max(SLICE // width, 1)):
        if stored.quantized:
            blocks = random.q8_0(name, first, last)
            if stored.columns:
                heads = blocks.reshape(last - first, len(stored.columns), -1)
                blocks = np.ascontiguousarray(heads[:, list(stored.columns)])
            yield blocks.reshape(-1)
            continue
        values = random.bfloat16(name, first * width, last * width).view(BFLOAT16).astype(np.float32)
        if stored.kind == "delta.a_log":
            values = -np.exp(values)
        elif stored.weight.role is Role.NORM and stored.kind != "delta.norm":
            values += 1
        yield values


def _slices(rows: tuple[Rows, ...], most: int) -> Iterator[Rows]:
    for first, last in rows:
        for start in range(first, last, most):
            yield start, min(start + most, last)


def _contents(config: Json) -> Iterator[Stored]:
    """Every tensor of the file, in order: what is outside the layers first."""
    text = config["text_config"]
    weights = fused(config)
    for weight in sorted(weights, key=lambda weight: weight.layer is not None):
        prefix = "" if weight.layer is None else f"blk.{weight.layer}."
        kind = weight.key if weight.layer is None else weight.key.split(".", 2)[2]
        if kind == "moe.experts.0.gate":
            experts, both, width = weight.shape
            size = both // 2
            for half, part in ((0, kind), (size, "moe.experts.0.up")):
                rows = tuple((expert * both + half, expert * both + half + size) for expert in range(experts))
                yield Stored(prefix + NAMES[part], (experts, size, width), part, weight, rows)
            continue
        shape = tuple(size for size in weight.shape if size != 1) if kind == "delta.conv" else weight.shape
        rows, columns = _order(kind, prod(shape[:-1]) if len(shape) > 1 else shape[0], text)
        yield Stored(prefix + NAMES[kind], shape, kind, weight, rows, columns)


def _order(kind: str, count: int, text: Json) -> tuple[tuple[Rows, ...], tuple[int, ...]]:
    """The runs of rows and the column groups of a tensor that has `count` rows."""
    key_heads, dim = text["linear_num_key_heads"], text["linear_value_head_dim"]
    heads = np.arange(text["linear_num_value_heads"]).reshape(key_heads, -1).T.reshape(-1).tolist()
    if kind == "delta.output":
        return ((0, count),), tuple(heads)
    if kind in ("delta.qkv", "delta.conv"):
        start = 2 * key_heads * text["linear_key_head_dim"]  # queries and keys stay
        return ((0, start), *((start + head * dim, start + (head + 1) * dim) for head in heads)), ()
    if kind == "delta.z":
        return tuple((head * dim, (head + 1) * dim) for head in heads), ()
    if kind in ("delta.a", "delta.b", "delta.a_log", "delta.dt_bias"):
        return tuple((head, head + 1) for head in heads), ()
    return ((0, count),), ()
