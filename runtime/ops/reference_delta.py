"""Gated DeltaNet as the specification has it, part by part: torch, float64. Maths: docs/MODELS.md, section 3."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from mosaic.runtime.ops import DeltaInputs, DeltaWeights
from mosaic.runtime.state import DeltaState

EXACT = torch.float64
L2_EPS = 1e-6  # of the query and key normalisation; a constant, not the model's rms_norm_eps
CHUNK = 64  # tokens of one chunk; chunks begin at multiples of it, so their cuts depend on position alone


@dataclass(frozen=True)
class RuleInputs:
    """Inputs of the gated delta rule, one row per token.

    query, key [T, key heads, d_k] as the convolution gives them; value [T, value heads, d_v]; `log_decay` (<= 0) and
    `beta` (0..1) [T, value heads].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor

    def __getitem__(self, tokens: slice) -> "RuleInputs":
        """The rows of some tokens."""
        return RuleInputs(*(part[tokens] for part in (self.query, self.key, self.value, self.log_decay, self.beta)))


def rms(x: Tensor, eps: float) -> Tensor:
    """Its direction, with a mean square of 1 over the last axis."""
    exact = x.to(EXACT)
    return exact / (exact.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def gated_delta(inputs: DeltaInputs, weights: DeltaWeights, state: DeltaState) -> Tensor:
    """See Ops. A single token takes the step form of the delta rule, more take the chunked form."""
    tokens, (heads, key_dim, value_dim) = inputs.z.shape[0], state.recurrent.shape
    mixed, state.conv = causal_conv(inputs.qkv, state.conv, weights.conv)
    width = (mixed.shape[1] - heads * value_dim) // 2
    query, key, value = torch.split(mixed, [width, width, heads * value_dim], dim=-1)
    rule = RuleInputs(
        query.view(tokens, -1, key_dim),
        key.view(tokens, -1, key_dim),
        value.view(tokens, heads, value_dim),
        *delta_gates(inputs.a, inputs.b, weights.a_log, weights.dt_bias),
    )
    parts, first, start = [], 0, state.position - tokens
    while first < tokens:
        last = min(first + CHUNK - (start + first) % CHUNK, tokens)
        form = delta_step if tokens == 1 else delta_chunk
        read, state.recurrent = form(rule[first:last], state.recurrent)
        parts.append(read)
        first = last
    read = torch.cat(parts)
    return gated_rms_norm(read, weights.norm, inputs.z.view(read.shape), weights.eps).flatten(1)


def causal_conv(x: Tensor, history: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Silu of a depthwise causal convolution: x [T, C], history [taps - 1, C], weight [C, taps].

    Returns the output [T, C] and the new history. The last tap multiplies the current token.
    """
    tokens, taps = x.shape[0], weight.shape[-1]
    padded = torch.cat((history, x))
    total = sum(padded[tap : tap + tokens].to(EXACT) * weight[:, tap].to(EXACT) for tap in range(taps))
    assert isinstance(total, Tensor)
    return silu(total), padded[-(taps - 1) :].clone()


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """X / rms(x) * weight * silu(gate) over the last axis."""
    return rms(x, eps) * weight.to(EXACT) * silu(gate.to(EXACT))


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(log_decay, beta) [T, value heads] of projections a and b."""
    rate = softplus(a.to(EXACT) + dt_bias.to(EXACT))
    return -a_log.to(EXACT).exp() * rate, b.to(EXACT).sigmoid()


def delta_step(inputs: RuleInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gated delta rule for one token, state [value heads, d_k, d_v]: output [1, value heads, d_v], new state.

    The output is read after the write.
    """
    query, key, value, log_decay, beta = (part[:, 0] for part in _per_head(inputs))
    state = state.to(EXACT) * log_decay.exp()[:, None, None]
    predicted = torch.einsum("hkv,hk->hv", state, key)
    state = state + key[:, :, None] * (beta[:, None] * (value - predicted))[:, None, :]
    return torch.einsum("hkv,hk->hv", state, query)[None], state


def delta_chunk(inputs: RuleInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same for several tokens at once; equal to stepping through them up to rounding.

    The WY form of the delta rule: one triangular solve instead of a walk over the tokens. Only differences of
    cumulated log-decays with non-positive value are exponentiated, so nothing overflows.
    """
    query, key, value, log_decay, beta = _per_head(inputs)
    start = state.to(EXACT)
    total = log_decay.cumsum(dim=-1)  # [h, T]
    past = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool).tril()
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(~past, -torch.inf).exp()  # [h, T, T]
    scaled_key = beta[..., None] * key
    system = (scaled_key @ key.mT * decay).tril(-1)  # unit diagonal implied below
    sides = torch.cat((beta[..., None] * value, total.exp()[..., None] * scaled_key), dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    writes = solved[..., : value.shape[-1]] - solved[..., value.shape[-1] :] @ start
    output = (total.exp()[..., None] * query) @ start + (query @ key.mT * decay) @ writes
    end = total[:, -1:, None].exp() * start + ((total[:, -1:] - total).exp()[..., None] * key).mT @ writes
    return output.transpose(0, 1), end


def _per_head(inputs: RuleInputs) -> tuple[Tensor, ...]:
    """Query (scaled), key, value [value heads, T, d], log_decay, beta [value heads, T], in float64.

    Query and key are normalised, and value head h reads key head h // (value heads / key heads).
    """
    repeat = inputs.value.shape[1] // inputs.key.shape[1]

    def normalised(x: Tensor) -> Tensor:
        exact = x.to(EXACT)
        unit = exact / (exact.square().sum(dim=-1, keepdim=True) + L2_EPS).sqrt()
        return unit.repeat_interleave(repeat, dim=1).transpose(0, 1)

    query = normalised(inputs.query) * inputs.query.shape[-1] ** -0.5
    value = inputs.value.to(EXACT).transpose(0, 1)
    return query, normalised(inputs.key), value, inputs.log_decay.to(EXACT).T, inputs.beta.to(EXACT).T
