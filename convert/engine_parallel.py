"""Over how many GPUs vLLM and SGLang can split a model: heads must divide, E4M3 parts in whole blocks. Headers only."""

from collections.abc import Iterator
from typing import NamedTuple

from mosaic.format import e4m3
from mosaic.format.spec import Mixer, ModelSpec
from mosaic.format.tensors import Role

SIZES = tuple(2**power for power in range(7))


class Split(NamedTuple):
    """Something that is cut into as many equal pieces as there are GPUs."""

    what: str
    number: int  # of heads, or of rows that need not stay together
    width: int  # rows or columns of one of them
    quantized: bool
    shared: bool = False  # fewer than there are GPUs may be given to several

    def fits(self, size: int) -> bool:
        """Whether `size` GPUs get equal pieces, of whole blocks if they are E4M3."""
        if self.shared and size > self.number:
            return size % self.number == 0 and self._whole(self.width)
        return self.number % size == 0 and self._whole(self.number // size * self.width)

    def _whole(self, rows: int) -> bool:
        return not self.quantized or rows % e4m3.BLOCK == 0


def splits(spec: ModelSpec, quantized: set[Role], expert_parallel: bool) -> Iterator[Split]:
    """What is cut; with expert parallelism whole experts are given out instead."""
    mixers = {layer.mixer for layer in spec.layers}
    if Mixer.FULL_ATTENTION in mixers:
        numbers, fp8 = spec.attention, Role.ATTENTION in quantized
        yield Split("query heads", numbers.num_heads, numbers.head_dim, fp8)
        yield Split("key and value heads", numbers.num_kv_heads, numbers.head_dim, fp8, shared=True)
    if Mixer.LINEAR_ATTENTION in mixers and spec.gated_delta:
        delta, fp8 = spec.gated_delta, Role.LINEAR_ATTENTION in quantized
        merged = fp8 and not delta.grouped  # grouped rows are one member, which the value heads and wholeness cover
        yield Split("linear-attention key heads", delta.num_key_heads, delta.key_head_dim, merged)
        yield Split("linear-attention value heads", delta.num_value_heads, delta.value_head_dim, fp8)
    moe = spec.moe
    if expert_parallel:
        yield Split("experts", moe.num_experts, 1, False)
    else:
        yield Split("rows of an expert", moe.intermediate_size, 1, Role.ROUTED_EXPERTS in quantized)
    if moe.shared_intermediate_size:
        yield Split("rows of the shared expert", moe.shared_intermediate_size, 1, Role.SHARED_EXPERT in quantized)
    if spec.dense_intermediate_size:
        yield Split("rows of a dense MLP", spec.dense_intermediate_size, 1, Role.DENSE_MLP in quantized)


def sizes(spec: ModelSpec, quantized: set[Role], expert_parallel: bool = False) -> list[int]:
    """The numbers of GPUs, powers of two, that fit."""
    parts = list(splits(spec, quantized, expert_parallel))
    return [size for size in SIZES if all(part.fits(size) for part in parts)]
