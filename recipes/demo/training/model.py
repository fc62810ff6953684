"""The model as it is trained: the qwen3_5_moe text model in plain PyTorch, quick enough for one CPU core.

Parameters are float32; matrix products run in bfloat16, norms, gates, the router and the recurrence in float32.
Parameter names are those of transformers' Qwen3_5MoeForCausalLM, so `state_dict()` is what the published checkpoints
hold and export.py only casts and prefixes. This is a training model: no cache, no generation, no padding, and the
sequence must be a whole number of chunks. It knows neither the optimiser nor the data.

Shapes: B sequences, T tokens, N = T / chunk chunks of c = chunk tokens, H value heads.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BF16 = torch.bfloat16
L2_EPS = 1e-6
INITIAL_STD = 0.02
TIME_STEP_RANGE = (0.001, 0.1)  # the recurrence's initial time steps, log-uniform
DECAY_RANGE = (1.0, 16.0)  # and its initial decay rates, uniform

# Read by initialise(): projections out of a block start small, projections into a block start large.
OUTPUT_PROJECTIONS = ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")
INPUT_PROJECTIONS = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "in_proj_qkv.weight",
    "in_proj_z.weight",
    "experts.gate_up_proj",
    "shared_expert.gate_proj.weight",
    "shared_expert.up_proj.weight",
)


@dataclass(frozen=True)
class Shape:
    """The sizes of the model. The defaults are the demo's."""

    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 8
    full_attention_interval: int = 4  # every fourth layer attends, the others recur

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    rope_theta: float = 1e7

    linear_key_heads: int = 4
    linear_value_heads: int = 8
    linear_key_dim: int = 32
    linear_value_dim: int = 32
    conv: int = 4

    experts: int = 16
    experts_per_token: int = 4
    expert_width: int = 128
    shared_width: int = 128

    eps: float = 1e-6
    chunk: int = 32  # tokens the recurrence takes at once; a matter of speed only

    def is_full_attention(self, layer: int) -> bool:
        """Whether layer number `layer` attends to all earlier tokens."""
        return (layer + 1) % self.full_attention_interval == 0

    @property
    def linear_keys(self) -> int:
        """Channels of all recurrence keys together."""
        return self.linear_key_heads * self.linear_key_dim

    @property
    def linear_values(self) -> int:
        """Channels of all recurrence values together."""
        return self.linear_value_heads * self.linear_value_dim


@dataclass(frozen=True)
class Routing:
    """What one layer's router did with a batch."""

    balance_loss: Tensor  # []: 1 when load and probability are uniform, larger the more they agree on a few experts
    z_loss: Tensor  # []: mean squared log of the router's normaliser
    load: Tensor  # [experts] int64: tokens sent to each expert


# Mathematics. Functions of tensors, compiled on first call (torch.compiler.set_stance("force_eager") turns that off).


@torch.compile(dynamic=False)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., D] -> [..., D] float32. The weight is zero-centred: 0 means scale 1."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight)


@torch.compile(dynamic=True)
def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 D], gate half first -> [..., D] bfloat16."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.float()).mul(up.float()).to(BF16)


@torch.compile(dynamic=True)
def combine_experts(outputs: Tensor, weights: Tensor) -> Tensor:
    """[tokens, K, hidden], [tokens, K] -> [tokens, hidden] float32: the weighted sum."""
    return (outputs.float() * weights.unsqueeze(-1)).sum(1)


def l2_norm(x: Tensor) -> Tensor:
    """[..., D] -> [..., D] of length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


@torch.compile(dynamic=False)
def delta_rule_chunks(
    qkv: Tensor, conv_weight: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, shape: Shape
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All of the gated delta rule that does not depend on the carried state, chunk by chunk.

    Takes qkv [B, T, 2 keys + values], conv_weight [channels, 1, conv], a and b [B, T, H], a_log and dt_bias [H].
    Returns, with key width k and value width v:
        queries [B, H, N, c, k]     decayed from the chunk's start
        keys [B, H, N, c, k]        decayed to the chunk's end
        attention [B, H, N, c, c]   of the chunk's tokens among themselves
        values [B, H, N, c, v]      corrected for each other, as if the chunk began with an empty state
        erase [B, H, N, c, k]       what those corrections need from the state
        decay [B, H, N, 1, 1]       over the whole chunk
    """
    batch, tokens, _ = qkv.shape
    padded = F.pad(qkv.float(), (0, 0, shape.conv - 1, 0))
    taps = conv_weight[:, 0]  # [channels, conv]
    mixed = F.silu(sum(padded[:, i : i + tokens] * taps[:, i] for i in range(shape.conv)))

    query, key, value = mixed.split((shape.linear_keys, shape.linear_keys, shape.linear_values), -1)
    key_shape = (batch, tokens, shape.linear_key_heads, shape.linear_key_dim)
    query = l2_norm(query.reshape(key_shape)) * (shape.linear_key_dim**-0.5)
    key = l2_norm(key.reshape(key_shape))
    value = value.reshape(batch, tokens, shape.linear_value_heads, shape.linear_value_dim)
    repeat = shape.linear_value_heads // shape.linear_key_heads
    query, key = query.repeat_interleave(repeat, 2), key.repeat_interleave(repeat, 2)
    beta = b.float().sigmoid()
    log_decay = -a_log.exp() * F.softplus(a.float() + dt_bias)

    def chunked(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [B, H, N, c, D]
        chunks = tokens // shape.chunk
        return x.transpose(1, 2).reshape(batch, shape.linear_value_heads, chunks, shape.chunk, -1)

    query, key, value, beta = chunked(query), chunked(key), chunked(value), chunked(beta)
    log_decay = chunked(log_decay).squeeze(-1).cumsum(-1)  # [B, H, N, c]
    future = torch.ones(shape.chunk, shape.chunk, dtype=torch.bool).triu(1)
    pair_decay = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()
    from_start = log_decay.exp().unsqueeze(-1)
    to_end = (log_decay[..., -1:] - log_decay).exp().unsqueeze(-1)

    beta_key = key * beta
    overlap = ((beta_key @ key.transpose(-1, -2)) * pair_decay).tril(-1)
    attention = (query @ key.transpose(-1, -2)) * pair_decay
    inverse = inverse_of_unit_lower(overlap, shape.chunk)
    return (
        query * from_start,
        key * to_end,
        attention,
        inverse @ (value * beta),
        inverse @ (beta_key * from_start),
        log_decay[..., -1].exp()[..., None, None],
    )


def inverse_of_unit_lower(strictly_lower: Tensor, size: int) -> Tensor:
    """(I + L)^-1 of [..., c, c] as a product of (I + P^(2^i)) with P = -L; P is nilpotent, so log2(c) factors do.

    Quick, and good enough to train with, but not to copy: where keys resemble each other the powers of P grow large and
    cancel. In float32 throughout, the trained model's layer 1 then differs from forward substitution by 1e-3, its loss
    by 7e-5 nats; with a triangular solve it agrees with transformers to 1e-6.
    """
    power = -strictly_lower
    inverse = torch.eye(size) + power
    reached = 2
    while reached < size:
        power = power @ power
        inverse = inverse + inverse @ power
        reached *= 2
    return inverse


@torch.compile(dynamic=False)
def delta_rule_scan(
    query: Tensor, key: Tensor, attention: Tensor, value: Tensor, erase: Tensor, decay: Tensor
) -> Tensor:
    """Carries the state over the chunks that delta_rule_chunks() returned: -> [B, H, N, c, v]."""
    new_value = value[:, :, 0]
    outputs = [attention[:, :, 0] @ new_value]
    state = key[:, :, 0].transpose(-1, -2) @ new_value  # [B, H, k, v]
    for i in range(1, query.shape[2]):
        new_value = value[:, :, i] - erase[:, :, i] @ state
        outputs.append(query[:, :, i] @ state + attention[:, :, i] @ new_value)
        state = state * decay[:, :, i] + key[:, :, i].transpose(-1, -2) @ new_value
    return torch.stack(outputs, 2)


@torch.compile(dynamic=False)
def gated_output_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[B, H, N, c, v] and z [B, T, H v] -> [B, T, H v] bfloat16. This weight is not zero-centred."""
    batch, heads, chunks, chunk, width = x.shape
    tokens = chunks * chunk
    x = x.reshape(batch, heads, tokens, width).transpose(1, 2)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    return (x * F.silu(z.float().reshape(batch, tokens, heads, width))).reshape(batch, tokens, heads * width).to(BF16)


def rotary_table(tokens: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine, each [T, rotary_dim]; the two halves of a head rotate against each other."""
    frequency = 1.0 / (shape.rope_theta ** (torch.arange(0, shape.rotary_dim, 2).float() / shape.rotary_dim))
    half = torch.outer(torch.arange(tokens).float(), frequency)
    angle = torch.cat((half, half), -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """[B, heads, T, head_dim] -> the same, its first rotary_dim channels rotated, bfloat16."""
    rotary_dim = cosine.shape[-1]
    turned, kept = x[..., :rotary_dim], x[..., rotary_dim:]
    low, high = turned.chunk(2, -1)
    return torch.cat((turned * cosine + torch.cat((-high, low), -1) * sine, kept), -1).to(BF16)


@torch.compile(dynamic=False)
def gated_attention(
    query_gate: Tensor,
    key: Tensor,
    value: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    cosine: Tensor,
    sine: Tensor,
    shape: Shape,
) -> Tensor:
    """query_gate [B, T, heads 2 head_dim], key and value [B, T, kv_heads head_dim] -> [B, T, heads head_dim]."""
    batch, tokens, _ = query_gate.shape
    query, gate = query_gate.view(batch, tokens, shape.heads, 2 * shape.head_dim).chunk(2, -1)
    key = key.view(batch, tokens, shape.kv_heads, shape.head_dim)
    value = value.view(batch, tokens, shape.kv_heads, shape.head_dim).transpose(1, 2)
    query = rotate(rms_norm(query, query_norm, shape.eps).transpose(1, 2), cosine, sine)
    key = rotate(rms_norm(key, key_norm, shape.eps).transpose(1, 2), cosine, sine)
    repeat = shape.heads // shape.kv_heads
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    output = output.transpose(1, 2).reshape(batch, tokens, -1).float()
    return (output * gate.reshape(batch, tokens, -1).float().sigmoid()).to(BF16)


class GroupedLinear(torch.autograd.Function):
    """x [rows, in], weights [G, out, in] -> [rows, out], where rows ends[g-1] to ends[g] belong to group g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ends: list[int]) -> Tensor:
        """One product per group that has rows."""
        y = x.new_empty(x.shape[0], weights.shape[1])
        for weight, start, end in zip(weights, [0, *ends], ends, strict=False):
            if end > start:
                torch.mm(x[start:end], weight.t(), out=y[start:end])
        ctx.save_for_backward(x, weights)
        ctx.ends = ends
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """A group without rows has gradient zero."""
        x, weights = ctx.saved_tensors
        dy = dy.contiguous()
        dx, dweights = torch.empty_like(x), torch.empty_like(weights)
        start = 0
        for group, end in enumerate(ctx.ends):
            if end > start:
                torch.mm(dy[start:end], weights[group], out=dx[start:end])
                torch.mm(dy[start:end].t(), x[start:end], out=dweights[group])
            else:
                dweights[group].zero_()
            start = end
        return dx, dweights, None


# Modules: they own the parameters and call the mathematics.


class Linear(nn.Linear):
    """A product in bfloat16 with a float32 master weight [out, in]; no bias anywhere in this model."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out] bfloat16."""
        return F.linear(x.to(BF16), self.weight.to(BF16))


class Weight(nn.Module):
    """A lone parameter called `weight`, so that the names come out right."""

    def __init__(self, initial: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial)


class GatedDeltaNet(nn.Module):
    """The recurrent layer: short convolution, gated delta rule, gated norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        channels = 2 * shape.linear_keys + shape.linear_values
        heads = shape.linear_value_heads
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.01, 16).log())
        self.conv1d = nn.Conv1d(channels, channels, shape.conv, groups=channels, bias=False)
        self.norm = Weight(torch.ones(shape.linear_value_dim))
        self.out_proj = Linear(shape.linear_values, shape.hidden)
        self.in_proj_qkv = Linear(shape.hidden, channels)
        self.in_proj_z = Linear(shape.hidden, shape.linear_values)
        self.in_proj_b = Linear(shape.hidden, heads)
        self.in_proj_a = Linear(shape.hidden, heads)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden] bfloat16."""
        chunks = delta_rule_chunks(
            self.in_proj_qkv(x),
            self.conv1d.weight,
            self.in_proj_a(x),
            self.in_proj_b(x),
            self.A_log,
            self.dt_bias,
            self.shape,
        )
        output = delta_rule_scan(*chunks)
        return self.out_proj(gated_output_norm(output, self.in_proj_z(x), self.norm.weight, self.shape.eps))


class Attention(nn.Module):
    """The full-attention layer: grouped queries, norms on queries and keys, partial rotary, an output gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = Linear(shape.hidden, shape.heads * shape.head_dim * 2)  # per head: query, then gate
        self.k_proj = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v_proj = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.heads * shape.head_dim, shape.hidden)
        self.q_norm = Weight(torch.zeros(shape.head_dim))
        self.k_norm = Weight(torch.zeros(shape.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden] bfloat16."""
        cosine, sine = rotary_table(x.shape[1], self.shape)
        query_gate, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        output = gated_attention(
            query_gate, key, value, self.q_norm.weight, self.k_norm.weight, cosine, sine, self.shape
        )
        return self.o_proj(output)


class Experts(nn.Module):
    """The routed experts' weights, fused: [experts, out, in]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts, 2 * shape.expert_width, shape.hidden))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.expert_width))

    def forward(self, x: Tensor, ends: list[int]) -> Tensor:
        """[rows sorted by expert, hidden] -> the same shape, bfloat16."""
        h = swiglu(GroupedLinear.apply(x, self.gate_up_proj.to(BF16), ends))
        return GroupedLinear.apply(h, self.down_proj.to(BF16), ends)


class SharedExpert(nn.Module):
    """The expert that sees every token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.shared_width)
        self.up_proj = Linear(shape.hidden, shape.shared_width)
        self.down_proj = Linear(shape.shared_width, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden] bfloat16."""
        return self.down_proj(swiglu(torch.cat((self.gate_proj(x), self.up_proj(x)), -1)))


class MixtureOfExperts(nn.Module):
    """Top-k routing with renormalised softmax weights, plus the shared expert behind a sigmoid gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = Weight(torch.zeros(shape.experts, shape.hidden))
        self.experts = Experts(shape)
        self.shared_expert = SharedExpert(shape)
        self.shared_expert_gate = Linear(shape.hidden, 1)  # applied in float32, as the router is

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """[B, T, hidden] float32 -> the same shape, and what the router did."""
        top_k = self.shape.experts_per_token
        flat = x.reshape(-1, self.shape.hidden)
        flat_bf16 = flat.to(BF16)

        logits = F.linear(flat, self.gate.weight)  # [tokens, experts]
        probabilities = logits.softmax(-1)
        weights, chosen = probabilities.topk(top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)

        chosen = chosen.reshape(-1)
        order = chosen.argsort(stable=True)
        position = torch.empty_like(order)
        position[order] = torch.arange(order.numel())
        load = torch.bincount(chosen, minlength=self.shape.experts)
        rows = self.experts(flat_bf16.index_select(0, order // top_k), load.cumsum(0).tolist())
        routed = combine_experts(rows.index_select(0, position).view(-1, top_k, self.shape.hidden), weights)

        shared_gate = F.linear(flat, self.shared_expert_gate.weight).sigmoid()
        output = routed + self.shared_expert(flat_bf16).float() * shared_gate
        routing = Routing(
            balance_loss=self.shape.experts * (load.float() / chosen.numel() * probabilities.mean(0)).sum(),
            z_loss=logits.logsumexp(-1).pow(2).mean(),
            load=load,
        )
        return output.view(x.shape), routing


class Layer(nn.Module):
    """Token mixer and experts, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        self.eps = shape.eps
        if shape.is_full_attention(index):
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)
        self.mixer_name = "self_attn" if shape.is_full_attention(index) else "linear_attn"
        self.mlp = MixtureOfExperts(shape)
        self.input_layernorm = Weight(torch.zeros(shape.hidden))
        self.post_attention_layernorm = Weight(torch.zeros(shape.hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """[B, T, hidden] float32 -> the same shape, and what the router did."""
        mixer = self.get_submodule(self.mixer_name)
        x = x + mixer(rms_norm(x, self.input_layernorm.weight, self.eps))
        output, routing = self.mlp(rms_norm(x, self.post_attention_layernorm.weight, self.eps))
        return x + output, routing


class Backbone(nn.Module):
    """Everything but the output matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eps = shape.eps
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.layers))
        self.norm = Weight(torch.zeros(shape.hidden))

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Routing]]:
        """[B, T] int64 -> [B, T, hidden] float32, and one routing per layer."""
        x = self.embed_tokens(tokens)
        routings = []
        for layer in self.layers:
            x, routing = layer(x)
            routings.append(routing)
        return rms_norm(x, self.norm.weight, self.eps), routings


class LanguageModel(nn.Module):
    """The whole model; its initial weights depend on torch's random state alone."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        self.lm_head = Linear(shape.hidden, shape.vocabulary)
        initialise(self)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Routing]]:
        """[B, T] int64 -> logits [B, T, vocabulary] bfloat16, and one routing per layer."""
        if tokens.shape[1] % self.shape.chunk:
            raise ValueError(f"{tokens.shape[1]} tokens given: the length must be a multiple of {self.shape.chunk}")
        x, routings = self.model(tokens)
        return self.lm_head(x), routings


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """[B, T, vocabulary], [B, T] -> []: mean nats per token, in float32."""
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))


@torch.no_grad()
def initialise(model: LanguageModel) -> None:
    """Normal matrices, scaled by where they stand; time steps and decays as in Mamba 2 and flash-linear-attention."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "conv1d" not in name:
            nn.init.normal_(parameter, 0.0, INITIAL_STD)
        if name.endswith(OUTPUT_PROJECTIONS):
            parameter.mul_(2.0 / math.sqrt(2 * model.shape.layers))
        elif name.endswith(INPUT_PROJECTIONS):
            parameter.mul_(2.0)
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            low, high = map(math.log, TIME_STEP_RANGE)
            time_step = torch.exp(torch.rand(module.shape.linear_value_heads) * (high - low) + low)
            module.dt_bias.copy_(time_step + torch.log(-torch.expm1(-time_step)))  # softplus(dt_bias) == time_step
            module.A_log.copy_(torch.empty(module.shape.linear_value_heads).uniform_(*DECAY_RANGE).log())
