"""States without a model: everything a sequence remembers, filled with numbers that follow from its tokens."""

from collections.abc import Sequence

import torch

from mosaic.format.spec import AttentionSpec, FeedForward, GatedDeltaSpec, LayerSpec, Mixer, ModelSpec, MoeSpec
from mosaic.runtime.kv import KVCache, KVFormat, KVPool
from mosaic.runtime.state import SequenceState, new_layer_state

HEADS, DIM = 2, 16


def spec_of(*mixers: Mixer) -> ModelSpec:
    return ModelSpec(
        model_type="none",
        hidden_size=32,
        vocab_size=1000,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        norm_offset=0.0,
        tie_embeddings=True,
        layers=tuple(LayerSpec(mixer, FeedForward.DENSE) for mixer in mixers),
        attention=AttentionSpec(4, HEADS, DIM, 8, 1e4, False),
        gated_delta=GatedDeltaSpec(2, 3, 4, 5, 4, False) if Mixer.LINEAR_ATTENTION in mixers else None,
        moe=MoeSpec(0, 0, 0, 0, False),
        dense_intermediate_size=32,
    )


HYBRID = spec_of(Mixer.LINEAR_ATTENTION, Mixer.FULL_ATTENTION, Mixer.LINEAR_ATTENTION, Mixer.FULL_ATTENTION)
ATTENTION = spec_of(Mixer.FULL_ATTENTION, Mixer.FULL_ATTENTION)


class Memory:
    """Stands for a HybridModel wherever only its states matter."""

    def __init__(self, spec: ModelSpec = HYBRID, kv: KVFormat = KVFormat.BF16) -> None:
        self.spec = spec
        self.pool = KVPool(HEADS, DIM, kv)

    def new_sequence(self) -> SequenceState:
        return SequenceState([new_layer_state(self.spec, number, self.pool) for number in range(len(self.spec.layers))])

    def advance(self, state: SequenceState, tokens: Sequence[int]) -> None:
        """Remember further tokens, as operations do: pages are appended to, recurrent states changed in place."""
        for number, layer in enumerate(state.layers):
            for place, token in enumerate(tokens, state.length):
                rows = rows_of(number, place, token)
                if isinstance(layer, KVCache):
                    append(layer, rows[0], rows[1])
                else:
                    layer.conv.mul_(0.5).add_(rows[0, 0, 0, 0])
                    layer.recurrent.mul_(0.5).add_(rows[1, 0, 0, 0])
                    layer.position += 1
        state.length += len(tokens)

    def after(self, tokens: Sequence[int]) -> SequenceState:
        state = self.new_sequence()
        self.advance(state, tokens)
        return state


def append(cache: KVCache, key: torch.Tensor, value: torch.Tensor) -> None:
    """Further tokens."""
    cache.reserve(len(key))
    cache.write(key, value)


def rows_of(layer: int, place: int, token: int) -> torch.Tensor:
    """Key and value [2, 1, kv heads, d] of one token; tokens and heads differ widely in size."""
    generator = torch.Generator().manual_seed(layer + 10 * place + 100_000 * token)
    sizes = torch.exp2(torch.randint(-12, 13, (2, 1, HEADS, 1), generator=generator).float())
    return torch.randn(2, 1, HEADS, DIM, generator=generator) * sizes


def held(state: SequenceState) -> list[torch.Tensor]:
    """Everything it remembers, copied."""
    parts: list[torch.Tensor] = []
    for layer in state.layers:
        if isinstance(layer, KVCache):
            parts += layer.read() if layer.length else ()
        else:
            parts += (layer.conv.clone(), layer.recurrent.clone())
    return parts


def expected(spec: ModelSpec, kv: KVFormat, tokens: Sequence[int]) -> list[torch.Tensor]:
    """What `held` has to find, of whole tensors: no pages, no copies, no history."""
    parts: list[torch.Tensor] = []
    for number, layer in enumerate(spec.layers):
        rows = [rows_of(number, place, token) for place, token in enumerate(tokens)]
        if layer.mixer is Mixer.FULL_ATTENTION:
            parts += rounded(torch.cat(rows, dim=1), kv) if rows else ()
        else:
            conv, recurrent = torch.zeros(()), torch.zeros(())
            for row in rows:
                conv, recurrent = conv * 0.5 + row[0, 0, 0, 0], recurrent * 0.5 + row[1, 0, 0, 0]
            parts += conv.expand(3, 2 * 2 * 4 + 3 * 5), recurrent.expand(3, 4, 5)
    return parts


def rounded(rows: torch.Tensor, kv: KVFormat) -> torch.Tensor:
    if kv is KVFormat.E4M3:
        scales = rows.abs().amax(-1, keepdim=True) / 448
        return (rows / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
    return rows if kv is KVFormat.F32 else rows.bfloat16().float()


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """To the bit."""
    return len(one) == len(other) and all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
