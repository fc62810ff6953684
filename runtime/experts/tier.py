"""Experts on a device beside the others: it computes those that lie there, the host the rest, at the same time.

Outputs stay apart for each expert of a token until all are there, and are added up in routing order: so no bit depends
on where an expert was. Prompts that use every expert for many tokens have those that are missing streamed past the
device's kernels instead.

On a GPU bits differ all the same: it rounds otherwise than the host, and when a copy lands is a matter of time.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.runtime.device import Device
from mosaic.runtime.experts.expert_slots import ExpertSlots
from mosaic.runtime.experts.hot import NOWHERE, Costs, HotExperts
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.experts.store import ExpertStore, LayerExperts
from mosaic.runtime.experts.streaming import Streaming
from mosaic.runtime.experts.traffic import Traffic
from mosaic.runtime.experts.uploads import Uploads
from mosaic.runtime.ops import Routing
from mosaic.runtime.ops.cpu import CpuOps

STREAM_TOKENS = 512  # of a piece of a prompt; with fewer the host may be as fast as the bus


@dataclass(frozen=True)
class TierMemory:
    """On the device: `held` for the experts that stay, `buffer` for those of prompts; each only if there is any."""

    held: ExpertSlots | None
    buffer: ExpertSlots | None


class Call(NamedTuple):
    """The experts of a layer for T tokens: `chosen` [.., T, R] as the router has it.

    `slots`: of those that are on the device, by their numbers. `cold`: numbers of the others.
    """

    chosen: NDArray[np.int64]
    slots: dict[int, int]
    cold: list[int]

    @property
    def tokens(self) -> int:
        """Of each sequence."""
        return int(self.chosen.shape[-2])


class Tier:
    """`from_device` and `from_host` are `Mixing`: of layers whose other parts are there, or here.

    `stream_tokens`: a piece of a prompt of so many is streamed past.
    """

    def __init__(
        self, device: Device, host: CpuOps, places: ExpertPlaces, memory: TierMemory, costs: Costs,
        stream_tokens: int = STREAM_TOKENS,
    ) -> None:  # fmt: skip
        self._device, self._host, self._places = device, host, places
        self._memory, self._costs, self._stream_tokens = memory, costs, stream_tokens
        self._hits, self._nbytes = 0, 0  # experts computed on the device; bytes copied there before it began anew
        self._begin_anew()
        self._sound = True  # False while slots and what they should hold may disagree

    def _begin_anew(self) -> None:
        held, buffer = self._memory.held, self._memory.buffer
        self._hot: HotExperts | None = None
        self._streaming: Streaming | None = None
        self._last: tuple[int, NDArray[np.int64], ExpertStore] | None = None  # a call that is to be noted
        self._uploads: Uploads | None = None
        if slots := held or buffer:
            uploads = self._uploads = Uploads(self._device, slots.slot_nbytes)
            if held:
                self._hot = HotExperts(self._device, uploads, self._places, held, self._costs)
            if buffer:
                self._streaming = Streaming(self._device, uploads, buffer)

    def traffic(self, store: Traffic) -> Traffic:
        """What happened so far, beside what the store of all experts counted."""
        return replace(store, device_hits=self._hits, device_bytes=self._nbytes + self._copied)

    def retune(self, min_hits: int, stream_tokens: int) -> None:
        """Go on with other thresholds, and with empty slots, as after a start."""
        self._costs, self._stream_tokens = replace(self._costs, min_hits=min_hits), stream_tokens
        self._reset()

    def close(self) -> None:
        """No thread of it runs from here on, and nothing is lent to it. It is not to be used again."""
        self._last = None
        if self._uploads:
            self._uploads.close()
        if self._hot:
            self._hot.give_back()

    def from_device(self, x: Tensor, routing: Routing, shared: Tensor | None, source: LayerExperts) -> Tensor:
        """See Mixing. X and the result are on the device."""
        self._catch_up()
        chosen, here = self._device.fetch(routing.experts, x)
        call = self._enter(chosen.numpy(), source)
        outputs, cold = self._apply(x, call), call.cold
        if self._streaming and call.tokens >= self._stream_tokens:
            streamed = [number for number in cold if self._streaming.fits(self._places[source.layer, number])]
            cold = [number for number in cold if number not in streamed]
            self._streaming.apply(x, call.chosen, streamed, source, outputs)
        if cold:
            is_cold, computed = map(self._device.bring, self._compute(here, call, cold, source))
            torch.where(is_cold, computed, outputs, out=outputs)
        if shared is not None:
            outputs[..., -1, :] = shared
        result = self._device.ops.add_outputs(outputs, routing.weights)
        self._leave(call, source)
        return result

    def from_host(self, x: Tensor, routing: Routing, shared: Tensor | None, source: LayerExperts) -> Tensor:
        """See Mixing. X and the result are on the host."""
        self._catch_up()
        call = self._enter(routing.experts.numpy(), source)
        hot = self._apply(self._device.bring(x), call) if call.slots else None
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
        if self._hot and call.slots:
            slots = np.full(self._places.num_experts + 1, NOWHERE, np.int32)  # the shared expert has none
            slots[list(call.slots)] = list(call.slots.values())
            chosen = self._device.bring(torch.from_numpy(slots[call.chosen]))
            self._device.ops.apply(x, chosen, self._hot.held, outputs)
        return outputs

    def _compute(self, x: Tensor, call: Call, cold: list[int], source: LayerExperts) -> tuple[Tensor, Tensor]:
        """Which of the chosen are cold [.., R, 1], and their outputs [.., R, H], by the host as they arrive."""
        outputs = torch.empty(*call.chosen.shape, x.shape[-1])
        order = np.full(self._places.num_experts + 1, NOWHERE, np.int32)  # by number, its place in the group
        is_cold = np.zeros(len(order), np.bool_)
        is_cold[cold] = True
        for group in source.arriving(cold, call.tokens) if cold else ():
            if group:
                order[list(group)] = np.arange(len(group))
                self._host.apply_experts(x, order[call.chosen], list(group.values()), outputs)
                order.fill(NOWHERE)
        return torch.from_numpy(is_cold[call.chosen])[..., None], outputs

    def _catch_up(self) -> None:
        """Note the last call: only where its experts lie was urgent. A device that has mixers computes one now.

        What an interruption (Ctrl-C) left half done is forgotten with everything else: it starts cold.
        """
        if not self._sound:
            self._reset()
        if self._hot and self._last:
            self._sound = False
            self._hot.note(*self._last)
        self._last = None
        self._sound = True

    def _enter(self, chosen: NDArray[np.int64], source: LayerExperts) -> Call:
        """Decide. From here on, until `_leave`, not all is as it should be."""
        self._sound = False
        numbers = list(dict.fromkeys(chosen[..., : self._places.top_k].ravel().tolist()))
        if not self._hot:
            source.observe(chosen)
            return Call(chosen, {}, numbers)
        slots = self._hot.slots(source.layer, numbers)
        source.observe(chosen, self._hot.there(source.layer))
        self._hits += len(slots)
        return Call(chosen, slots, [number for number in numbers if number not in slots])

    def _leave(self, call: Call, source: LayerExperts) -> None:
        """The call is under way, and is to be noted before the next."""
        self._last = source.layer, call.chosen[..., : self._places.top_k], source.store
        self._sound = True

    def _reset(self) -> None:
        self.close()
        self._nbytes += self._copied
        self._begin_anew()

    @property
    def _copied(self) -> int:
        return sum(part.nbytes for part in (self._hot, self._streaming) if part)
