"""What each part of a model takes of a device's memory. Which parts lie there is decided in `plan_vram`.

Pure arithmetic over headers, in bytes. What is named after tensors that stay on the device is exact; the other items
are upper bounds.
"""

from collections import Counter

from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.footprint import (
    FLOAT,
    INT32,
    attention_layers,
    device_scratch_nbytes,
    held_pages,
    row_width,
    state_nbytes,
)
from mosaic.runtime.kv import PAGE_TOKENS, KVPool, pages_of
from mosaic.runtime.prompt_scores import BLOCK_LOGITS
from mosaic.runtime.weights import Weights
from mosaic.runtime.wishes import Wishes

SLACK = 256 << 20  # what no item names: kernels, what an allocator rounds up or has in pieces; assumed, not measured
GRAPH = 2 << 20  # of a layer's operations, recorded for decoding; assumed, not measured
STREAM_SLOTS = 16  # of either half of the streaming buffer

Kind = tuple[str, str]  # dtypes of an expert's codes and scales


class VramItems:
    """Of a model, for sequences of a context that `wishes` must say.

    `kind`: of the experts that can lie in slots, which all have the same layout; the most frequent one that is E4M3,
    None if none is. `slot`: bytes of one of them. `least` and `most`: numbers of slots that are of use, beside none.
    `stream`: slots of the streaming buffer, both halves.
    """

    def __init__(self, weights: Weights, places: ExpertPlaces, wishes: Wishes) -> None:
        assert wishes.context is not None
        self.spec = weights.spec
        self.context, self.sequences = wishes.context, wishes.parallel
        attention = self.spec.attention
        self._token = KVPool(attention.num_kv_heads, attention.head_dim, wishes.kv).token_nbytes
        self._dense = weights.dense_nbytes()
        found = [place for key in places if (place := places[key]).code_dtype == "F8_E4M3"]
        kinds = Counter(place.kind for place in found).most_common(1)
        self.kind: Kind | None = kinds[0][0] if kinds else None
        self.slot = next((place.nbytes for place in found if place.kind == self.kind), 0)
        self.least = 2 * places.top_k if kinds else 0
        self.most = max(kinds[0][1], self.least) if kinds else 0
        self.stream = 2 * min(STREAM_SLOTS, places.num_experts) if kinds else 0

    def of(self, slots: int, layers: int, head: bool, piece: int) -> dict[str, int]:
        """Of so many expert slots, so many first layers without their experts, perhaps the head, pieces of a prompt."""
        placed, pages = self.spec.layers[:layers], pages_of(self.context)
        caches = attention_layers(placed)
        return {
            "kernels, fragmentation, others": SLACK,
            "expert slots": slots * self.slot,
            "streaming buffer": self.stream * self.slot if layers else 0,
            "dense weights": sum(self._dense[layer] for layer in range(layers)),
            "head": self._dense[None] if head else 0,
            "keys and values": caches * held_pages(self.context, self.sequences) * PAGE_TOKENS * self._token,
            "page tables": caches * self.sequences * INT32 * (row_width(pages) + row_width(1)),
            "recurrent states": self.sequences * state_nbytes(self.spec, placed),
            "prompt in work": self.scratch(layers, piece) + (self._logits() if head else 0),
            "graphs": layers * GRAPH,
        }

    def scratch(self, layers: int, piece: int) -> int:
        """Of a piece of a prompt, at most; or of a step, if that has more tokens."""
        tokens = max(min(piece, self.context), self.sequences)
        return device_scratch_nbytes(self.spec, self.spec.layers[:layers], tokens)

    def _logits(self) -> int:
        """Of a step, or of a block of a prompt that is scored."""
        vocabulary = self.spec.vocab_size
        return FLOAT * max(BLOCK_LOGITS + vocabulary, self.sequences * vocabulary)
