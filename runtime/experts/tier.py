"""Experts on a device beside the others: those that are used often lie there in slots, the host computes the rest.

Who computes what is `Promotion`'s to decide, and `Uploads` moves the bytes. Outputs stay apart for each expert of a
token until all are there, and are added up in routing order: so no bit depends on where an expert was. Prompts that use
every expert for many tokens have those that are missing streamed past the device's kernels instead (`streaming`).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.runtime.device import Device
from mosaic.runtime.experts.placement import MIN_HITS, WINDOW, Placement, PlacementPolicy
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.promotion import RING, Copy, Promotion
from mosaic.runtime.experts.slots import SlotPolicy
from mosaic.runtime.experts.store import LayerExperts, Loan
from mosaic.runtime.experts.streaming import Streaming
from mosaic.runtime.experts.tracker import Tracker
from mosaic.runtime.experts.traffic import Traffic
from mosaic.runtime.experts.uploads import Upload, Uploads
from mosaic.runtime.ops import Routing
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.ops.cuda.slots import ExpertSlots
from mosaic.runtime.resident import TORCH

NOWHERE = -1  # in place of a slot, or of a place in a group


@dataclass(frozen=True)
class Costs:
    """Nanoseconds: to copy one expert to the device, and what is saved each time it is computed there."""

    copy: int
    saving: int


@dataclass(frozen=True)
class TierSizes:
    """`slots`: experts on the device at a time. `stream`: experts in the streaming buffer, 0 for none; prompts of
    `stream_tokens` and more go through it. `min_hits`: see PlacementPolicy.
    """

    slots: int
    stream: int
    stream_tokens: int
    min_hits: int = MIN_HITS


class Call(NamedTuple):
    """The experts of a layer for T tokens: `chosen` [.., R] as the router has it, `slots` int32 [.., R] on the device.

    `cold`: numbers of those that the host computes, or that are streamed.
    """

    chosen: NDArray[np.int64]
    slots: NDArray[np.int32]
    placement: Placement
    cold: list[int]

    @property
    def tokens(self) -> int:
        """Of each sequence."""
        return self.chosen.shape[-2]


class Tier:
    """`from_device` and `from_host` are `Mixing`: of layers whose other parts are there, or here."""

    def __init__(
        self, device: Device, host: CpuOps, places: ExpertPlaces, held: ExpertSlots, sizes: TierSizes, costs: Costs,
        buffer: ExpertSlots | None = None,
    ) -> None:  # fmt: skip
        self._device, self._host = device, host
        self._places, self._sizes, self._costs = places, sizes, costs
        self._held = held
        self._buffer = buffer
        self._hits, self._nbytes = 0, 0  # experts computed on the device, and bytes copied there
        self._sound = True  # False while slots and promotion may disagree
        self._begin_anew()

    def _begin_anew(self) -> None:
        places = self._places
        slots = SlotPolicy(self._sizes.slots, places.layers, places.num_experts, places.top_k)
        self._tracker = Tracker(WINDOW)
        policy = PlacementPolicy(self._tracker, self._costs.copy, self._costs.saving, self._sizes.min_hits)
        self._promotion = Promotion(slots, policy, min(RING, places.top_k))
        self._uploads = Uploads(self._device, self._held.slot_nbytes)
        self._sent: dict[Copy, tuple[Upload, Loan]] = {}
        self._streaming = self._buffer and Streaming(self._device, self._uploads, self._buffer)

    def traffic(self, store: Traffic) -> Traffic:
        """What happened so far, and what the store of the others counted."""
        streamed = self._streaming.nbytes if self._streaming else 0
        return replace(store, device_hits=self._hits, device_bytes=self._nbytes + streamed)

    def close(self) -> None:
        """Nothing is written to the device from here on."""
        self._uploads.close()

    def from_device(self, x: Tensor, routing: Routing, shared: Tensor | None, source: LayerExperts) -> Tensor:
        """See Mixing. X and the result are on the device."""
        chosen, here = self._device.fetch(routing.experts, x)
        call = self._enter(chosen.numpy(), source)
        outputs = self._apply(x, call)
        cold = call.cold
        if self._streaming and call.tokens >= self._sizes.stream_tokens:
            streamed = [number for number in cold if self._fits(source.layer, number)]
            cold = [number for number in cold if number not in streamed]
            self._streaming.apply(x, call.chosen, streamed, source, outputs)
        if cold:
            parts = self._compute(here, call, cold, source)
            outputs = torch.where(*(self._device.bring(part) for part in parts), outputs)
        if shared is not None:
            outputs[..., -1, :] = shared
        result = self._device.ops.add_outputs(outputs, routing.weights)
        self._leave(call, source)
        return result

    def from_host(self, x: Tensor, routing: Routing, shared: Tensor | None, source: LayerExperts) -> Tensor:
        """See Mixing. X and the result are on the host."""
        call = self._enter(routing.experts.numpy(), source)
        hot = self._apply(self._device.bring(x), call) if call.placement.gpu else None
        is_cold, outputs = self._compute(x, call, call.cold, source)
        if hot is not None:
            outputs = torch.where(is_cold, outputs, self._device.fetch(hot)[0])
        if shared is not None:
            outputs[..., -1, :] = shared
        result = self._host.add_outputs(outputs, routing.weights)
        self._leave(call, source)
        return result

    def _apply(self, x: Tensor, call: Call) -> Tensor:
        """Outputs [.., R, H] of the experts in slots, by the device; anything for the others."""
        outputs = torch.empty(*call.chosen.shape, x.shape[-1], device=self._device.place)
        if call.placement.gpu:
            self._device.ops.apply(x, self._device.bring(torch.from_numpy(call.slots)), self._held, outputs)
        return outputs

    def _compute(self, x: Tensor, call: Call, cold: list[int], source: LayerExperts) -> tuple[Tensor, Tensor]:
        """Which [.., R, 1] of the chosen are cold, and their outputs [.., R, H], by the host as they arrive."""
        outputs = torch.empty(*call.chosen.shape, x.shape[-1])
        order = np.full(self._places.num_experts + 1, NOWHERE, np.int32)
        for group in source.arriving(cold, call.tokens) if cold else ():
            if group:
                order[list(group)] = np.arange(len(group))
                self._host.apply_experts(x, order[call.chosen], list(group.values()), outputs)
                order.fill(NOWHERE)
        return torch.from_numpy(np.isin(call.chosen, cold))[..., None], outputs

    def _enter(self, chosen: NDArray[np.int64], source: LayerExperts) -> Call:
        """Decide. What an interruption (Ctrl-C) left half done is forgotten with everything else: it starts cold."""
        if not self._sound:
            self._reset()
        self._sound = False
        source.observe(chosen)
        if source.layer == self._places.layers[0]:
            self._tracker.tick()
            self._promotion.tick()
        self._land()
        routed, first = chosen[..., : self._places.top_k], source.layer * self._places.num_experts
        recent = (routed[..., -WINDOW:, :].ravel() + first).tolist()  # of a prompt: it would outweigh every answer
        self._tracker.observe(recent)
        all_keys = recent if routed.shape[-2] <= WINDOW else [*recent, *set((routed + first).ravel().tolist())]
        placement = self._promotion.place(all_keys)
        slot_of = np.full(self._places.num_experts + 1, NOWHERE, np.int32)
        for key in placement.gpu:
            slot_of[key - first] = self._promotion.slot(key)
        self._hits += len(placement.gpu)
        return Call(chosen, slot_of[chosen], placement, [key - first for key in placement.cpu])

    def _leave(self, call: Call, source: LayerExperts) -> None:
        """Begin copies of what is worth it; of prompts nothing, since they are no measure of what comes after them."""
        if call.tokens == 1:
            self._promote(call.placement, source)
        self._sound = True

    def _promote(self, placement: Placement, source: LayerExperts) -> None:
        placement.promote[:] = [key for key in placement.promote if self._fits(*divmod(key, self._places.num_experts))]
        for copy in self._promotion.begin(placement):
            loan = source.store.lend(*divmod(copy.key, self._places.num_experts))
            if loan is None:
                self._promotion.drop(copy)
                continue
            target = self._held.codes[copy.slot], self._held.scales[copy.slot]
            upload = self._uploads.send((loan.span, loan.scales), target, self._device.fence())
            self._sent[copy] = upload, loan

    def _fits(self, layer: int, expert: int) -> bool:
        """Whether an expert is of the kind that slots are for."""
        code_dtype, scale_dtype = self._places[layer, expert].kind
        return code_dtype == "F8_E4M3" and TORCH[scale_dtype] == self._held.scales.dtype

    def _land(self) -> None:
        """Give back what was read, and let land what has arrived."""
        for copy, (upload, loan) in list(self._sent.items()):
            if self._uploads.staged(upload):
                loan.give_back()
            if self._uploads.landed(upload):
                del self._sent[copy]
                if loan.sound:
                    self._promotion.land(copy)
                    self._nbytes += sum(part.nbytes for part in (loan.span, loan.scales))
                else:  # the store was reset while its bytes were read: they may be another expert's
                    self._promotion.drop(copy)

    def _reset(self) -> None:
        self._uploads.close()
        self._nbytes += self._streaming.nbytes if self._streaming else 0
        for _, loan in self._sent.values():
            loan.give_back()
        self._begin_anew()
