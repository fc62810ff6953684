"""What the Qwen MoE families share: tensor names, shapes and configuration rules. Not a family by itself."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from mosaic.format.architectures.config import Config
from mosaic.format.index import MOST
from mosaic.format.spec import AttentionSpec, FeedForward, GatedDeltaSpec, LayerSpec, Mixer, ModelSpec, MoeSpec
from mosaic.format.tensors import Part, Piece, Role, TensorSpec

NESTED = "model.language_model."
FLAT = "model."
VISION = "model.visual."
MTP = "mtp."
MOST_EXPERTS = 1 << 18  # of a whole model; the 80B has 24,576. More is a damaged file, and would take for ever


@dataclass(frozen=True)
class Place:
    """A module: its key, its name in the output and in the source, and where it belongs."""

    key: str
    name: str
    source: str
    part: Part
    layer: int | None = None

    def child(self, key: str, name: str) -> "Place":
        """A module below this one."""
        return replace(self, key=f"{self.key}{key}.", name=f"{self.name}{name}.", source=f"{self.source}{name}.")

    def tensor(self, key: str, name: str, shape: tuple[int, ...], role: Role, fusion: str | None = None) -> TensorSpec:
        """A tensor that stands in the source under the same name, whole."""
        fused = f"{self.key}{fusion}" if fusion else None
        pieces = (Piece(f"{self.source}{name}", shape),)
        return TensorSpec(
            f"{self.key}{key}", f"{self.name}{name}", shape, role, self.part, pieces, self.layer, fusion=fused
        )


def source_prefix(names: Collection[str]) -> str:
    """Prefix of the language model's tensors in a source that lists `names`."""
    return NESTED if any(name.startswith(NESTED) for name in names) else FLAT


def common_refusals(config: Config) -> None:
    """Refuse settings that change the function and that Mosaic does not implement."""
    config.require("attention_bias", False, None)
    config.require("hidden_act", "silu")
    config.require("use_sliding_window", False, None)
    config.require("output_gate_type", "silu", "swish", None)
    config.require("mtp_use_dedicated_embeddings", False, None)


def rope(config: Config, head_dim: int, default_partial: float) -> tuple[int, float]:
    """(rotary_dim, theta), from `rope_parameters` or from the older flat keys."""
    config.require("rope_scaling", None)
    section = config.section("rope_parameters") if config.has("rope_parameters") else config
    section.require("rope_type", "default")
    section.require("type", "default")  # the key's older name
    partial = section.number("partial_rotary_factor", config.number("partial_rotary_factor", default_partial))
    rotary_dim = int(head_dim * partial)
    section.check(
        0 < rotary_dim <= head_dim and rotary_dim % 2 == 0, "partial_rotary_factor", "an even share of a head"
    )
    return rotary_dim, section.number("rope_theta")


def attention_spec(config: Config, *, gated: bool, default_partial: float) -> AttentionSpec:
    """The full-attention numbers."""
    heads, kv_heads = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    config.check(heads % kv_heads == 0, "num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = config.integer("head_dim")
    rotary_dim, theta = rope(config, head_dim, default_partial)
    return AttentionSpec(heads, kv_heads, head_dim, rotary_dim, theta, gated)


def gated_delta_spec(config: Config, *, grouped: bool) -> GatedDeltaSpec:
    """The linear-attention numbers."""
    key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    config.check(value_heads % key_heads == 0, "linear_num_value_heads", f"a multiple of {key_heads} key heads")
    return GatedDeltaSpec(
        key_heads,
        value_heads,
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim", minimum=2),
        grouped,
    )


def moe_spec(config: Config, *, shared: bool, normalize_top_k: bool) -> MoeSpec:
    """The mixture-of-experts numbers."""
    experts, top_k = config.integer("num_experts", maximum=MOST), config.integer("num_experts_per_tok")
    config.check(top_k <= experts, "num_experts_per_tok", f"at most num_experts ({experts})")
    layers = config.integer("num_hidden_layers", maximum=MOST)
    config.check(
        layers * experts <= MOST_EXPERTS, "num_experts", f"at most {MOST_EXPERTS:,} in {layers} layers together"
    )
    shared_size = config.integer("shared_expert_intermediate_size") if shared else 0
    return MoeSpec(experts, top_k, config.integer("moe_intermediate_size"), shared_size, normalize_top_k)


def hybrid_mixers(config: Config) -> list[Mixer]:
    """One mixer per layer: `layer_types`, or built from `full_attention_interval` where the list is absent."""
    count = config.integer("num_hidden_layers", maximum=MOST)
    if config.has("layer_types"):
        kinds = config.strings("layer_types")
        known = {kind.value for kind in Mixer}
        config.check(len(kinds) == count and known.issuperset(kinds), "layer_types", f"{count} of {sorted(known)}")
        return [Mixer(kind) for kind in kinds]
    interval = config.integer("full_attention_interval", 4)
    return [Mixer.LINEAR_ATTENTION if (layer + 1) % interval else Mixer.FULL_ATTENTION for layer in range(count)]


def flat_feed_forwards(config: Config) -> list[FeedForward]:
    """One feed-forward kind per layer by `mlp_only_layers` and `decoder_sparse_step`."""
    dense, step = config.integers("mlp_only_layers"), config.integer("decoder_sparse_step", 1)
    return [
        FeedForward.DENSE if layer in dense or (layer + 1) % step else FeedForward.MOE
        for layer in range(config.integer("num_hidden_layers", maximum=MOST))
    ]


def outside(spec: ModelSpec, text: Place, head: Place) -> Iterator[TensorSpec]:
    """Embedding, final norm and, unless tied, the head."""
    vocabulary = (spec.vocab_size, spec.hidden_size)
    yield text.tensor("embedding", "embed_tokens.weight", vocabulary, Role.EMBEDDING)
    yield text.tensor("final_norm", "norm.weight", (spec.hidden_size,), Role.NORM)
    if not spec.tie_embeddings:
        yield head.tensor("head", "lm_head.weight", vocabulary, Role.LM_HEAD)


def decoder_layer(spec: ModelSpec, kinds: LayerSpec, place: Place) -> Iterator[TensorSpec]:
    """Every tensor of one decoder layer: experts first, as they stand in a shard."""
    hidden = (spec.hidden_size,)
    if kinds.feed_forward is FeedForward.MOE:
        yield from _moe(spec, place)
    else:
        assert spec.dense_intermediate_size is not None
        yield from _swiglu(spec, place.child("mlp", "mlp"), spec.dense_intermediate_size, Role.DENSE_MLP)
    yield place.tensor("input_norm", "input_layernorm.weight", hidden, Role.NORM)
    yield place.tensor("post_norm", "post_attention_layernorm.weight", hidden, Role.NORM)
    if kinds.mixer is Mixer.FULL_ATTENTION:
        yield from _attention(spec, place.child("attention", "self_attn"))
    else:
        yield from _gated_delta(spec, place.child("delta", "linear_attn"))


def mtp_block(spec: ModelSpec) -> Iterator[TensorSpec]:
    """The multi-token-prediction block: projection, norms and one full-attention MoE layer."""
    place = Place("mtp.", MTP, MTP, Part.MTP)
    hidden = spec.hidden_size
    layer = LayerSpec(Mixer.FULL_ATTENTION, FeedForward.MOE)
    yield from decoder_layer(spec, layer, place.child("layers.0", "layers.0"))
    yield place.tensor("projection", "fc.weight", (hidden, 2 * hidden), Role.MTP_PROJECTION)
    yield place.tensor("embedding_norm", "pre_fc_norm_embedding.weight", (hidden,), Role.NORM)
    yield place.tensor("hidden_norm", "pre_fc_norm_hidden.weight", (hidden,), Role.NORM)
    yield place.tensor("norm", "norm.weight", (hidden,), Role.NORM)


def skip_list(unquantized: list[TensorSpec]) -> list[str]:
    """One entry per module as the official releases write it; experts as one module, never one by one.

    The embedding is listed without its nested prefix and the fused name of the b and a projections beside theirs,
    as the vendor does; the final norm and the norms of vision blocks are not listed.
    """
    entries: dict[str, None] = {}
    for tensor in unquantized:
        module = re.sub(r"\.(weight|bias)$", "", tensor.name)
        if tensor.key == "final_norm" or re.search(r"\.norm[12]$", module):
            continue
        if tensor.role is Role.EMBEDDING:
            module = f"{FLAT}embed_tokens"
        if tensor.role is Role.ROUTED_EXPERTS:
            module = re.sub(r"\.experts\..*", ".experts", module)
        entries[module] = None
        if module.endswith(".in_proj_a"):
            entries[re.sub(r"_a$", "_ba", module)] = None
    return list(entries)


def _attention(spec: ModelSpec, place: Place) -> Iterator[TensorSpec]:
    numbers, hidden, role = spec.attention, spec.hidden_size, Role.ATTENTION
    query, key_value = numbers.num_heads * numbers.head_dim, numbers.num_kv_heads * numbers.head_dim
    query_rows = 2 * query if numbers.gated else query
    yield place.tensor("query", "q_proj.weight", (query_rows, hidden), role, "qkv")
    yield place.tensor("key", "k_proj.weight", (key_value, hidden), role, "qkv")
    yield place.tensor("value", "v_proj.weight", (key_value, hidden), role, "qkv")
    yield place.tensor("output", "o_proj.weight", (hidden, query), role)
    yield place.tensor("query_norm", "q_norm.weight", (numbers.head_dim,), Role.NORM)
    yield place.tensor("key_norm", "k_norm.weight", (numbers.head_dim,), Role.NORM)


def _gated_delta(spec: ModelSpec, place: Place) -> Iterator[TensorSpec]:
    numbers, hidden, role = spec.gated_delta, spec.hidden_size, Role.LINEAR_ATTENTION
    assert numbers is not None
    conv, value, heads = numbers.conv_dim, numbers.value_dim, numbers.num_value_heads
    if numbers.grouped:
        yield place.tensor("qkvz", "in_proj_qkvz.weight", (conv + value, hidden), role)
        yield place.tensor("ba", "in_proj_ba.weight", (2 * heads, hidden), Role.GATE)
    else:
        yield place.tensor("qkv", "in_proj_qkv.weight", (conv, hidden), role, "qkvz")
        yield place.tensor("z", "in_proj_z.weight", (value, hidden), role, "qkvz")
        yield place.tensor("b", "in_proj_b.weight", (heads, hidden), Role.GATE, "ba")
        yield place.tensor("a", "in_proj_a.weight", (heads, hidden), Role.GATE, "ba")
    yield place.tensor("output", "out_proj.weight", (hidden, value), role)
    yield place.tensor("conv", "conv1d.weight", (conv, 1, numbers.conv_kernel), Role.CONVOLUTION)
    yield place.tensor("a_log", "A_log", (heads,), Role.DECAY)
    yield place.tensor("dt_bias", "dt_bias", (heads,), Role.DECAY)
    yield place.tensor("norm", "norm.weight", (numbers.value_head_dim,), Role.NORM)


def _swiglu(spec: ModelSpec, place: Place, size: int, role: Role) -> Iterator[TensorSpec]:
    hidden = spec.hidden_size
    yield place.tensor("gate", "gate_proj.weight", (size, hidden), role, "gate_up")
    yield place.tensor("up", "up_proj.weight", (size, hidden), role, "gate_up")
    yield place.tensor("down", "down_proj.weight", (hidden, size), role)


def _moe(spec: ModelSpec, place: Place) -> Iterator[TensorSpec]:
    moe, hidden = spec.moe, spec.hidden_size
    place = place.child("moe", "mlp")
    for expert in range(moe.num_experts):
        yield from _expert(spec, place, expert)
    yield place.tensor("router", "gate.weight", (moe.num_experts, hidden), Role.ROUTER)
    if moe.shared_intermediate_size:
        shared = place.child("shared", "shared_expert")
        yield from _swiglu(spec, shared, moe.shared_intermediate_size, Role.SHARED_EXPERT)
        yield place.tensor("shared_gate", "shared_expert_gate.weight", (1, hidden), Role.GATE)


def _expert(spec: ModelSpec, place: Place, expert: int) -> Iterator[TensorSpec]:
    """gate, up, down of one expert: stacked over the experts with gate above up, or a tensor each."""
    moe, hidden = spec.moe, spec.hidden_size
    size = moe.intermediate_size
    stacked_up = (moe.num_experts, 2 * size, hidden)
    stacked_down = (moe.num_experts, hidden, size)
    stacks = {
        "gate": Piece(f"{place.source}experts.gate_up_proj", stacked_up, expert, (0, size)),
        "up": Piece(f"{place.source}experts.gate_up_proj", stacked_up, expert, (size, 2 * size)),
        "down": Piece(f"{place.source}experts.down_proj", stacked_down, expert),
    }
    for tensor in _swiglu(spec, place.child(f"experts.{expert}", f"experts.{expert}"), size, Role.ROUTED_EXPERTS):
        stack = stacks[tensor.key.rpartition(".")[2]]
        fusion = f"{place.key}experts"  # a stack of experts is quantised as a whole
        yield replace(tensor, pieces=(stack, *tensor.pieces), expert=expert, fusion=fusion)
