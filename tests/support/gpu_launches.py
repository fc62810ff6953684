"""Every function of `mosaic.runtime.ops.cuda` once for each variant of its kernels, at the sizes of the 35B model."""

import torch

from mosaic.format import e4m3
from mosaic.format.spec import GatedDeltaSpec
from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.kv import PAGE_TOKENS
from mosaic.runtime.ops import DeltaInputs, DeltaWeights
from mosaic.runtime.ops.cuda.attention import attend
from mosaic.runtime.ops.cuda.delta import gated_delta_step
from mosaic.runtime.ops.cuda.delta_chunk import gated_delta_chunk
from mosaic.runtime.ops.cuda.experts import add_outputs, apply_experts
from mosaic.runtime.ops.cuda.gates import sigmoid_gate, swiglu_between
from mosaic.runtime.ops.cuda.grouped import apply_experts_grouped
from mosaic.runtime.ops.cuda.matmul import matmul, matmul_plain
from mosaic.runtime.ops.cuda.matvec import matvec
from mosaic.runtime.ops.cuda.norms import add_rms_norm, rms_norm
from mosaic.runtime.ops.cuda.pages import Pages, store
from mosaic.runtime.ops.cuda.rotary import angles, rotate
from mosaic.runtime.ops.cuda.router import route
from mosaic.runtime.state import DeltaState
from mosaic.runtime.weights import E4M3Matrix

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 512, 256, 8
HEADS, KV_HEADS, HEAD_DIM, ROTARY_DIM = 16, 2, 256, 64
DELTA = GatedDeltaSpec(
    num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128, conv_kernel=4, grouped=False
)
SLOTS, PROMPT = 4, 64
BF16, F32 = torch.bfloat16, torch.float32


def launch_all() -> None:
    """Launch each. Of the values only the numbers of slots and pages count."""
    for scales in (BF16, F32):
        matrices(scales)
        experts(scales)
    around()
    attention()
    delta()


def matrices(scales: torch.dtype) -> None:
    shape = (HIDDEN, HIDDEN)
    weight = E4M3Matrix(torch.empty(shape, dtype=torch.uint8), torch.empty(e4m3.grid(shape), dtype=scales))
    for count in (1, 2, 4, 8):
        matvec(torch.empty(count, HIDDEN), weight)
    matvec(torch.empty(1, HIDDEN), torch.empty(EXPERTS, HIDDEN, dtype=scales))
    matmul(torch.empty(PROMPT, HIDDEN), weight)
    matmul_plain(torch.empty(PROMPT, HIDDEN), torch.empty(EXPERTS, HIDDEN, dtype=scales))


def experts(scales: torch.dtype) -> None:
    blocks = 3 * (HIDDEN * INNER // e4m3.BLOCK**2)
    codes = torch.empty(SLOTS, 3 * HIDDEN * INNER, dtype=torch.uint8)
    held = ExpertSlots(codes, torch.empty(SLOTS, blocks, dtype=scales), HIDDEN, INNER)
    for tokens, apply in ((1, apply_experts), (PROMPT, apply_experts_grouped)):
        slots = torch.zeros(tokens, TOP_K + 1, dtype=torch.int32)
        outputs = torch.empty(*slots.shape, HIDDEN)
        apply(torch.empty(tokens, HIDDEN), slots, held, outputs)
        add_outputs(outputs, torch.empty(slots.shape))


def around() -> None:
    x, gain = torch.empty(1, HIDDEN), torch.empty(HIDDEN, dtype=BF16)
    rms_norm(x, gain, 1e-6, 1.0)
    add_rms_norm(x, x, gain, 1e-6, 1.0)
    route(torch.empty(1, EXPERTS), TOP_K, True, torch.empty(1, 1))
    route(torch.empty(1, EXPERTS), TOP_K, False, None)
    sigmoid_gate(x, x)
    sigmoid_gate(x, torch.empty(1, 1))
    swiglu_between(x, x)
    rotate(torch.empty(1, HEADS, HEAD_DIM), angles(torch.arange(1), ROTARY_DIM, 1e7))


def attention() -> None:
    table, length, shape = torch.zeros(2, dtype=torch.int32), torch.tensor([1]).int(), (2, 2, PAGE_TOKENS, KV_HEADS)
    for kind in (F32, BF16, torch.uint8):
        scales = torch.empty(*shape, 1) if kind is torch.uint8 else None
        pages = Pages(torch.empty(*shape, HEAD_DIM, dtype=kind), scales, table, length)
        for tokens in (1, PROMPT):
            query, key = (torch.empty(tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS))
            store(key, key, pages)
            attend(query, pages)


def delta() -> None:
    heads, width = DELTA.num_value_heads, DELTA.num_value_heads * DELTA.value_head_dim
    channels = DELTA.conv_dim
    small = [torch.empty(size, dtype=BF16) for size in (heads, heads, DELTA.value_head_dim)]
    weights = DeltaWeights(torch.empty(channels, DELTA.conv_kernel, dtype=BF16), *small, 1e-6)
    for tokens, apply in ((1, gated_delta_step), (PROMPT + 1, gated_delta_chunk)):
        inputs = DeltaInputs(*(torch.empty(tokens, size) for size in (channels, width, heads, heads)))
        apply(inputs, weights, DeltaState(DELTA))
