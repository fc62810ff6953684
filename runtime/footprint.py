"""Bytes of what layers remember of a sequence, and of what they hold while they compute a prompt.

Of any decoder layers of a ModelSpec, in RAM or on a device. Pure arithmetic; weights are not counted here.
"""

from collections.abc import Sequence

from mosaic.format.spec import AttentionSpec, GatedDeltaSpec, LayerSpec, Mixer, ModelSpec, MoeSpec
from mosaic.runtime.kv import KVFormat, KVPool, pages_of
from mosaic.runtime.ops.reference_delta import CHUNK

FLOAT = 4  # bytes of an activation, and of a number in a recurrent state
INT32 = 4  # bytes of the number of a page, and of a count of tokens
ALIGNMENT = 16  # bytes: triton compiles a kernel anew for addresses that are no multiples of it


def attention_layers(layers: Sequence[LayerSpec]) -> int:
    """How many of them attend to keys and values; the others have recurrent states."""
    return sum(layer.mixer is Mixer.FULL_ATTENTION for layer in layers)


def kv_nbytes(spec: ModelSpec, layers: Sequence[LayerSpec], kv: KVFormat) -> int:
    """Of the keys and values of one token."""
    return attention_layers(layers) * KVPool(spec.attention.num_kv_heads, spec.attention.head_dim, kv).token_nbytes


def held_pages(context: int, sequences: int) -> int:
    """Pages of one layer for so many sequences, and for states that are kept of them.

    Those share pages, but for copies of last ones, which are begun.
    """
    return sequences * (pages_of(context) + 1) + 1


def row_width(numbers: int) -> int:
    """Of a row that begins with so many int32, in int32: rows of it all begin at a multiple of ALIGNMENT."""
    grain = ALIGNMENT // INT32
    return -(-numbers // grain) * grain


def state_nbytes(spec: ModelSpec, layers: Sequence[LayerSpec]) -> int:
    """Of the recurrent and convolution states of one sequence."""
    delta = spec.gated_delta
    if delta is None:
        return 0
    recurrent = delta.num_value_heads * delta.key_head_dim * delta.value_head_dim
    states = len(layers) - attention_layers(layers)
    return FLOAT * states * (recurrent + (delta.conv_kernel - 1) * delta.conv_dim)


def host_scratch_nbytes(spec: ModelSpec, layers: Sequence[LayerSpec], tokens: int, share: float) -> int:
    """Of what the CPU holds at once while it computes so many tokens of a prompt.

    `layers`: those whose mixers it computes; it may have to compute experts of any. `share` of a layer's experts may be
    computed with at the same time.
    """
    attention, delta, moe = spec.attention, spec.gated_delta, spec.moe
    query, mixers = attention.num_heads * attention.head_dim, [0]
    if attention_layers(layers):
        mixers.append(query * (2 if attention.gated else 1) + 2 * attention.num_kv_heads * attention.head_dim)
        mixers[-1] += 2 * query
    if delta and attention_layers(layers) < len(layers):
        mixers.append(delta.conv_dim + 2 * delta.value_dim)
    ranks = moe.top_k + (1 if moe.shared_intermediate_size else 0)
    packed = 1.5 * (spec.hidden_size + max(moe.intermediate_size, moe.shared_intermediate_size))  # as AMX wants it
    values = 2 * max(mixers) + ranks * spec.hidden_size + 10 * spec.hidden_size
    values += int(packed * max(ranks * share, 1)) if moe.num_experts else 0
    values += 4 * (spec.dense_intermediate_size or 0)
    return FLOAT * values * tokens


def device_scratch_nbytes(spec: ModelSpec, layers: Sequence[LayerSpec], tokens: int) -> int:
    """Of VRAM, at most, for what computing so many tokens of a prompt takes beside what stays there.

    `layers`: those whose mixers are computed there; experts of any layer are. What counts is there at the same time, in
    that half of a layer that holds most; the other half uses the same memory. A product splits its input in two float16
    (`ops/cuda/split`), which take as much as the input. Attention reads pages where they lie.
    """
    hidden, parts = spec.hidden_size, [0]
    if attention_layers(layers):
        parts.append(tokens * _attention_values(spec.attention))
    if spec.gated_delta and attention_layers(layers) < len(layers):
        parts.append(_delta_values(spec.gated_delta, tokens))
    if spec.moe.num_experts:
        parts.append(tokens * _expert_values(spec.moe, hidden))
    if layers:
        parts.append(tokens * 3 * (spec.dense_intermediate_size or 0))  # gate, up, product
    around = 6 * hidden  # a sum, its addend, both added, normed, that split or the half's output, the shared expert's
    return FLOAT * (tokens * around + max(parts))


def _attention_values(spec: AttentionSpec) -> int:
    """Per token, between its normed input and its output."""
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projected = query * (2 if spec.gated else 1) + 2 * key
    return projected + query + key + (3 if spec.gated else 2) * query  # rotated; what was found, that gated, and split


def _delta_values(spec: GatedDeltaSpec, tokens: int) -> int:
    """Between the normed input and the output, when the state walks through the chunks (`ops/cuda/delta_chunk`).

    That is what was projected, twice if it is grouped by key head, what the convolution made of it, what relates the
    tokens of each chunk, and what was read. Less comes after that: what was projected and read, and the latter split.
    """
    heads, chunks = spec.num_value_heads, -(-tokens // CHUNK)
    projected = (spec.conv_dim + spec.value_dim + 2 * heads) * (2 if spec.grouped else 1)
    related = heads * chunks * (2 * CHUNK * CHUNK + 3 * CHUNK + 1)  # pairs; factors of queries and keys; a decay
    return tokens * (projected + spec.conv_dim + spec.value_dim) + related


def _expert_values(spec: MoeSpec, hidden: int) -> int:
    """Per token, between its normed input and the sum of the experts' outputs.

    First comes the shared expert. Then outputs are apart for each expert; with them is either what is between the
    matrices of experts in slots, and its split, or the outputs that the host computed of those that are in none.
    """
    ranks = spec.top_k + (1 if spec.shared_intermediate_size else 0)
    shared = spec.num_experts + 3 * spec.shared_intermediate_size  # scores; gate, up, product
    outputs = ranks * hidden
    routing = 16 * ranks  # choices, weights, and how tokens are sorted by expert
    return max(shared, outputs + max(2 * ranks * spec.intermediate_size, outputs)) + routing
