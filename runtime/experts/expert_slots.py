"""The experts a GPU holds: slots of one size in one piece of memory. Which expert is where, others decide."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mosaic.format import e4m3
from mosaic.runtime.weights import E4M3Matrix, Expert


def expert_slots(
    empty: Callable[[tuple[int, ...], torch.dtype], Tensor], count: int, hidden: int, inner: int, scales: torch.dtype
) -> "ExpertSlots":
    """So many slots, in memory that `empty` gives."""
    rows, columns = e4m3.grid((inner, hidden))
    codes = empty((count, 3 * inner * hidden), torch.uint8)
    return ExpertSlots(codes, empty((count, 3 * rows * columns), scales), hidden, inner)


@dataclass(frozen=True)
class ExpertSlots:
    """`codes` uint8 [S, 3 * I * H]: gate [I, H], up [I, H], down [H, I] one after the other, as they lie in a shard.

    `scales` bfloat16 or float32 [S, 3 * blocks]: those of gate, up and down, ceil(I/128) * ceil(H/128) each.
    """

    codes: Tensor
    scales: Tensor
    hidden: int
    inner: int

    def __post_init__(self) -> None:
        assert self.codes.dtype == torch.uint8, self.codes.dtype
        assert self.codes.shape[1:] == (3 * self.inner * self.hidden,), self.codes.shape
        assert self.scales.shape == (len(self.codes), 3 * self.blocks), self.scales.shape
        assert self.codes.is_contiguous()
        assert self.scales.is_contiguous()

    @cached_property
    def blocks(self) -> int:
        """Blocks of one matrix."""
        rows, columns = e4m3.grid((self.inner, self.hidden))
        return rows * columns

    @property
    def kind(self) -> tuple[str, str]:
        """Dtypes of codes and scales, as `Place.kind` has them."""
        return "F8_E4M3", {torch.bfloat16: "BF16", torch.float32: "F32"}[self.scales.dtype]

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot."""
        return self.codes[0].nbytes + self.scales[0].nbytes

    @cached_property
    def experts(self) -> list[Expert]:
        """Views of what is in the slots, in order."""
        shapes = [(self.inner, self.hidden), (self.inner, self.hidden), (self.hidden, self.inner)]

        def expert(codes: Tensor, scales: Tensor) -> Expert:
            parts = zip(codes.chunk(3), scales.chunk(3), shapes, strict=True)
            return Expert(*(E4M3Matrix(code.view(shape), scale.view(e4m3.grid(shape))) for code, scale, shape in parts))

        return list(map(expert, self.codes, self.scales))
