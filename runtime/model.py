"""The decoder: embedding, hybrid layers, head, built from a ModelSpec. Knows no family by name."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.format.spec import FeedForward, Mixer
from mosaic.runtime.cuts import Likeliest
from mosaic.runtime.experts.mapped import MappedExperts
from mosaic.runtime.experts.store import ExpertStore
from mosaic.runtime.home import Home, Mixing, host
from mosaic.runtime.kv import KVCache, KVFormat, KVPool, pages_of
from mosaic.runtime.layers.attention import Attention
from mosaic.runtime.layers.feed_forward import Dense, MixtureOfExperts
from mosaic.runtime.layers.gated_delta import GatedDeltaNet
from mosaic.runtime.layers.linear import Linear
from mosaic.runtime.layers.norm import RmsNorm
from mosaic.runtime.ops import Ops
from mosaic.runtime.state import DeltaState, LayerState, SequenceState
from mosaic.runtime.weights import ModelWeights, Weights

SPARE = 8  # likeliest tokens beyond what is needed, that ties may be told apart
Row = NDArray[np.floating] | Likeliest


class DecoderLayer:
    """x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, home: Home, experts: ExpertStore, number: int) -> None:
        ops, weights, spec = home.ops, home.weights, home.weights.spec
        kinds, key = spec.layers[number], f"layers.{number}"
        self.home = home
        self.following: DecoderLayer | None = None  # whose choices are to be foretold

        def norm(name: str) -> RmsNorm:
            return RmsNorm(ops, weights.tensor(f"{key}.{name}"), spec.rms_norm_eps, spec.norm_offset)

        self._input_norm, self._post_norm = norm("input_norm"), norm("post_norm")
        self._mixer: Attention | GatedDeltaNet
        if kinds.mixer is Mixer.FULL_ATTENTION:
            self._mixer = Attention(ops, spec, weights, f"{key}.attention")
        else:
            self._mixer = GatedDeltaNet(ops, spec, weights, f"{key}.delta")
        self._feed_forward: Dense | MixtureOfExperts
        if kinds.feed_forward is FeedForward.MOE:
            self._feed_forward = MixtureOfExperts(home, experts, number, f"{key}.moe")
        else:
            self._feed_forward = Dense(ops, weights, f"{key}.mlp")

    @property
    def nbytes(self) -> int:
        """Weight bytes read for one token."""
        return self._mixer.nbytes + self._feed_forward.nbytes

    def __call__(self, x: Tensor, addend: Tensor | None, states: Sequence[LayerState]) -> tuple[Tensor, Tensor]:
        """X [T, H] of one sequence or [B, T, H] of B, as a sum that is not added up yet, in and out.

        Advances what the layer remembers of each sequence by T tokens.
        """
        for state in states:
            state.reserve(x.shape[-2])
        x, *begun = self.home.run(self._until_experts, x, addend, states)
        if self.following and x.shape[-2] == 1:
            self.following.foretell(x)
        return x, self._feed_forward.finish(*begun)

    def _until_experts(self, x: Tensor, addend: Tensor | None, states: Sequence[LayerState]) -> tuple[Tensor, ...]:
        """The new x, and what the feed-forward part begins with: all that needs no answer from the host."""
        x, normed = (x, self._input_norm(x)) if addend is None else self._input_norm.added(x, addend)
        if isinstance(self._mixer, Attention):
            mixed = self._mixer(normed, cast(Sequence[KVCache], states))
        else:
            mixed = self._mixer(normed, cast(Sequence[DeltaState], states))
        x, normed = self._post_norm.added(x, mixed)
        return x, *self._feed_forward.begin(normed)

    def foretell(self, x: Tensor) -> None:
        """Tell which experts would be chosen if x [.., 1, H], from the layer before, went into the router here."""
        if isinstance(self._feed_forward, MixtureOfExperts):
            self._feed_forward.foretell(self._post_norm(x))


@dataclass(frozen=True)
class Elsewhere:
    """The first `layers` of a model, and the head or not, have another home than the rest."""

    home: Home
    layers: int
    head: bool


class HybridModel:
    """A whole model. Routed experts come from `experts`, or from where the weights are mapped.

    `foretell`: in decoding, tell the store what each layer's router would choose a layer too early. Changes no result.
    `mixing`: see Home; of the layers that are not `elsewhere`.
    """

    def __init__(
        self,
        weights: ModelWeights,
        ops: Ops,
        kv: KVFormat = KVFormat.BF16,
        experts: ExpertStore | None = None,
        *,
        foretell: bool = False,
        mixing: Mixing | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        spec = self.spec = weights.spec
        if experts is None:
            assert isinstance(weights, Weights)
            experts = MappedExperts(weights)
        here = host(ops, weights, KVPool(spec.attention.num_kv_heads, spec.attention.head_dim, kv), mixing)
        away, count = (elsewhere.home, elsewhere.layers) if elsewhere else (here, 0)
        self.kv = kv
        self._here, self._homes = here, dict.fromkeys((here, away))
        self._ops = ops
        self._rows = weights.rows("embedding")
        self._layers = [
            DecoderLayer(away if number < count else here, experts, number) for number in range(len(spec.layers))
        ]
        if foretell:
            for layer, following in itertools.pairwise(self._layers):
                if layer.home is following.home:
                    layer.following = following
        last = self._head_home = away if elsewhere and elsewhere.head else here
        self._norm = RmsNorm(last.ops, last.weights.tensor("final_norm"), spec.rms_norm_eps, spec.norm_offset)
        self._head = Linear(last.ops, last.weights.matrix("embedding" if spec.tie_embeddings else "head"))
        #: Told, after every layer, how many layers are done, of all.
        self.after_layer: Callable[[int, int], None] = lambda done, layers: None

    @property
    def nbytes_per_token(self) -> int:
        """Weight bytes read to decode one token."""
        return sum(layer.nbytes for layer in self._layers) + self._head.nbytes

    def pages(self, tokens: int) -> int:
        """Pages for the keys and values of a sequence of so many tokens."""
        return pages_of(tokens) * sum(layer.mixer is Mixer.FULL_ATTENTION for layer in self.spec.layers)

    @property
    def pages_in_use(self) -> int:
        """Pages that sequences and snapshots hold."""
        return sum(home.pool.pages_in_use for home in self._homes)

    def new_sequence(self) -> SequenceState:
        """An empty sequence."""
        return SequenceState([self.new_layer_state(number) for number in range(len(self._layers))])

    def new_layer_state(self, number: int) -> LayerState:
        """What one layer remembers of an empty sequence."""
        return self._layers[number].home.new_state(number)

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> Tensor:
        """What the first layer is given: [T, H]."""
        for home in self._homes:
            home.enter()
        return self._ops.embed(self._rows(ids))

    @torch.inference_mode()
    def advance(self, number: int, x: Tensor, state: LayerState) -> Tensor:
        """One layer alone: what it makes of x [T, H]; the same bits as in `hidden`."""
        layer = self._layers[number]
        x, addend = layer(layer.home.bring(x), None, [state])
        return x + addend

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int], state: SequenceState) -> Tensor:
        """Final hidden states [T, H] of T further tokens; advances the sequence."""
        return self._advance(self.embed(ids), [state])

    @torch.inference_mode()
    def step(self, ids: Sequence[int], states: Sequence[SequenceState]) -> Tensor:
        """Final hidden states [B, H] of one further token of each of B sequences; advances them.

        Each row is what `hidden` gives for that sequence alone, but weights are read once for all. For the logits that
        the sequences would have alone, give `logits` the rows as [B, 1, H].
        """
        if len(states) == 1:
            return self.hidden(ids, states[0])
        return self._advance(self.embed(ids)[:, None], states)[:, 0]

    def _advance(self, x: Tensor, states: Sequence[SequenceState]) -> Tensor:
        """All layers: x [T, H] of one sequence or [B, T, H] of B."""
        addend, tokens = None, x.shape[-2]
        parts = zip(self._layers, *(state.layers for state in states), strict=True)
        for number, (layer, *layer_states) in enumerate(parts, 1):
            x, addend = layer.home.bring(x), None if addend is None else layer.home.bring(addend)
            x, addend = layer(x, addend, layer_states)
            self.after_layer(number, len(self._layers))
        for state in states:
            state.length += tokens
        return x if addend is None else x + addend

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [T, V] of hidden states [T, H] of one sequence, or [B, T, V] of [B, T, H]; on the host."""
        return self._head(self._norm(self._head_home.bring(hidden))).cpu()

    @torch.inference_mode()
    def candidates(self, hidden: Tensor, needed: Sequence[int], num_tokens: int) -> list[Row]:
        """What to choose tokens by, after hidden states [B, H] of B sequences: logits [V], or the likeliest tokens.

        Where logits are on a device, few of them have to come here: `needed` of each sequence, below `num_tokens`; 0
        is for all.
        """
        logits = self._head(self._norm(self._head_home.bring(hidden[:, None])))[:, 0]
        most = max(needed)
        if self._head_home is self._here or not min(needed) or not 0 < most <= num_tokens - SPARE:
            return list(logits.cpu().numpy())
        scores, ids = (part.cpu().numpy() for part in logits[:, :num_tokens].topk(most + SPARE))
        if (scores[:, most - 1] == scores[:, -1]).any():  # more ties than were fetched: the lowest ids may be missing
            return list(logits.cpu().numpy())
        order = np.lexsort((ids, -scores))
        return [Likeliest(row[place], score[place]) for row, score, place in zip(ids, scores, order, strict=True)]
