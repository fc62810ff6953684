"""What each part of a model takes of this process's memory. Which parts are there is decided in `plan`.

Pure arithmetic over headers, in bytes, but for what the process takes already.
"""

from mosaic.runtime.experts.arena import slot_nbytes
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.promotion import RING
from mosaic.runtime.footprint import FLOAT, host_scratch_nbytes, kv_nbytes, state_nbytes
from mosaic.runtime.machine import resident_memory
from mosaic.runtime.plan_vram import VramPlan
from mosaic.runtime.prefill import PREFILL_CHUNK
from mosaic.runtime.resident import resident_nbytes
from mosaic.runtime.weights import Weights
from mosaic.runtime.wishes import Wishes

GRAIN = 24 << 20  # what a process takes differs from start to start; so plans do not
GROWTH = 32 << 20  # what the program takes once it computes: code that is touched, small weights in float32, stacks


class RamItems:
    """Of a model, for sequences of a context that `wishes` must say, without what `vram` says to be on a device.

    `experts`: how many there are. `least`: the smallest number of slots that is of use. `are_converted`: kernels
    convert some experts, once for each place in memory.
    """

    def __init__(self, weights: Weights, places: ExpertPlaces, wishes: Wishes, vram: VramPlan | None) -> None:
        assert wishes.context is not None
        self.context = wishes.context
        self.experts, self.least = len(places), 2 * places.top_k
        self.are_converted = any(places[key].code_dtype == "F16" for key in places)
        self._spec, self._places, self._wishes, self._vram = weights.spec, places, wishes, vram
        first, head, piece = (vram.layers, not vram.head, vram.piece) if vram else (0, True, PREFILL_CHUNK)
        self._here, self._tokens = self._spec.layers[first:], min(piece, self.context)
        dense, of_all = weights.dense(first, head=head), weights.dense()
        self._mapped = weights.nbytes - sum(info.nbytes for name, info in of_all.items() if name not in dense)
        self._dense = resident_nbytes(dense)
        self._slot = slot_nbytes(places)
        self._scales = sum(places[key].scale_nbytes for key in places)
        self._process = -(-resident_memory() // GRAIN) * GRAIN + GROWTH

    def kept(self, states: int) -> int:
        """Of so many recurrent states for each sequence, kept for later prompts; or what was wished."""
        one = state_nbytes(self._spec, self._spec.layers)
        return states * self._wishes.parallel * one if self._wishes.kept is None else self._wishes.kept

    @property
    def remembered(self) -> tuple[int, int]:
        """Tokens of all sequences, and the bytes of their keys and values."""
        tokens = self._wishes.parallel * self.context
        return tokens, tokens * kv_nbytes(self._spec, self._here, self._wishes.kv)

    def of(self, slots: int | None, kept: int) -> dict[str, int]:
        """Of so many expert slots, or of all weights mapped (None); and `kept` bytes of states for later prompts."""
        if slots is None:
            return {"weights": self._mapped, **self._beside_weights(kept, 1.0)}
        return {
            "expert slots": slots * self._slot,
            "scales of all experts": self._scales,
            "dense weights": self._dense,
            **self._beside_weights(kept, min(1.0, slots / self._places.num_experts)),
        }

    def _beside_weights(self, kept: int, share: float) -> dict[str, int]:
        """`share` of a layer's experts can be there at once."""
        spec, sequences = self._spec, self._wishes.parallel
        of_all = f"{sequences} x " if sequences > 1 else ""
        items = {
            "Python, torch, tokenizer": self._process,
            f"keys and values of {of_all}{self.context:,} tokens": self.remembered[1],
            "recurrent states": sequences * state_nbytes(spec, self._here),
            "states kept for later prompts": kept,
            "logits": FLOAT * sequences * spec.vocab_size,
            "prompt in work": host_scratch_nbytes(spec, self._here, self._tokens, share),
        }
        if self._vram:
            items["staging for the device"] = self._staging(self._vram)
        return items

    def _staging(self, vram: VramPlan) -> int:
        """Buffers of experts on their way, what layers hand over, what experts here make of a step.

        And the recurrent states of a sequence that has not moved there yet.
        """
        spec, places = self._spec, self._places
        expert = max((places[key].nbytes for key in places if places[key].kind == vram.kind), default=0)
        handed = 2 * self._tokens + self._wishes.parallel * (spec.moe.top_k + 1)  # there and back
        moving = state_nbytes(spec, spec.layers[: vram.layers])
        return RING * expert + FLOAT * handed * spec.hidden_size + moving
