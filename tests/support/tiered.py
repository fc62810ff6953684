"""Engines with a part of their model on a device, and a device that is watched."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mosaic.runtime.device.choice import HOST_ONLY, DeviceChoice
from mosaic.runtime.device.host import HostDevice, HostOps
from mosaic.runtime.device.memory import Memory
from mosaic.runtime.device.part import Tuning
from mosaic.runtime.device.states import DeviceCache, DeviceDelta
from mosaic.runtime.engine import Engine
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.loading import Loading, LoadOptions
from mosaic.runtime.ops.cpu import Activations, CpuOps
from mosaic.runtime.request import Request
from mosaic.runtime.sampler import Chosen
from mosaic.runtime.sampling import Sampling
from mosaic.runtime.tokenizer import Tokenizer
from mosaic.runtime.wishes import VramWishes

SAMPLING = Sampling(temperature=1.0)
EAGER = Tuning(min_hits=1, stream_tokens=16)  # many copies, and every prompt but the shortest streamed


class Mapped(Memory):
    """Knows where its items are."""

    def __init__(self, place: torch.device) -> None:
        super().__init__(place)
        self.tensors: list[tuple[str, torch.Tensor]] = []

    def empty(self, item: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = super().empty(item, shape, dtype)
        self.tensors.append((item, tensor))
        return tensor

    def item(self, tensor: torch.Tensor) -> str | None:
        """What memory a tensor lies in, None if in none of it."""
        first = tensor.data_ptr()
        for item, other in self.tensors:
            if other.data_ptr() <= first < other.data_ptr() + other.nbytes:
                return item
        return None


class WatchedOps(HostOps):
    """Looks after what only a real device reads, and what has to lie there."""

    def __init__(self, memory: Mapped) -> None:
        super().__init__(Activations.F32)
        self.memory = memory

    def attention(self, query, key, value, cache):
        assert isinstance(cache, DeviceCache)
        assert cache.count.tolist() == [cache.length - len(query)]
        assert cache.table[: len(cache.pages)].tolist() == [page.number for page in cache.pages]
        assert self.memory.item(cache.table) == self.memory.item(cache.count) == "page tables"
        assert {self.memory.item(page.values) for page in cache.pages} == {"keys and values"}
        return super().attention(query, key, value, cache)

    def gated_delta(self, inputs, weights, state):
        assert isinstance(state, DeviceDelta)
        assert self.memory.item(state.conv) == self.memory.item(state.recurrent) == "recurrent states"
        return super().gated_delta(inputs, weights, state)


class WatchedDevice(HostDevice):
    """Counts copies by what they are for."""

    def __init__(self, room: int = 4 << 30) -> None:
        super().__init__(room=room)
        self.memory = Mapped(self.place)
        self.ops = WatchedOps(self.memory)
        self.targets: list[tuple[str | None, int]] = []  # item and address of each copy

    def upload(self, source, target, after):
        self.targets.append((self.memory.item(target), target.data_ptr()))
        return super().upload(source, target, after)

    def copies(self, item: str) -> int:
        """How many there were into memory of an item: two of an expert, codes and scales."""
        return sum(found == item for found, _ in self.targets)

    def overwritten(self, item: str) -> int:
        """How many of them replaced another."""
        return sum(count - 1 for (found, _), count in Counter(self.targets).items() if found == item)


def load(
    folder: Path,
    device: HostDevice | None = None,
    *,
    slots: int = 0,
    layers: int = 0,
    head: bool = True,
    ram_slots: int | None = None,
    kv: str = "bf16",
    context: int = 512,
    parallel: int = 3,
    **options: Any,
) -> Engine:
    """An engine without stop tokens; `slots` for experts on the device, `ram_slots` here if not all are mapped."""
    chosen = DeviceChoice(device, needed=True) if device else HOST_ONLY
    vram = VramWishes(None if slots else 0, layers)
    loading = Loading(folder, KVFormat(kv), context=context, parallel=parallel, chosen=chosen, vram=vram)
    here, there = loading.plans
    loading.plans = replace(here, slots=ram_slots), there and replace(there, slots=slots, head=there.head and head)
    options = LoadOptions(tuning=EAGER, **options)
    engine = Engine(folder, Tokenizer(folder), loading, loading.load(CpuOps(), options))
    engine.scheduler.stop = frozenset()
    return engine


def answer(engine: Engine, prompt: Sequence[int], count: int, seed: int = 0) -> list[Chosen]:
    """So many tokens that follow, with log-probabilities, drawn by a seed."""
    return list(engine.scheduler.run(Request(prompt, SAMPLING, seed=seed, max_tokens=count, logprobs=2)))


def answers(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[list[Chosen]]:
    """The same of several prompts in company."""
    requests = [Request(prompt, SAMPLING, seed=7, max_tokens=count, logprobs=2) for prompt in prompts]
    generations = [engine.scheduler.submit(request) for request in requests]
    return [list(engine.scheduler.tokens(generation)) for generation in generations]
