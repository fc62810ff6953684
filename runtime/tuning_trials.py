"""Trials of settings on a model: what a token takes with them, of a text that the model wrote itself, and of a prompt.

Settings change the speed and no bit. On the CPU's kernels, whoever's memory they work on, that is checked with every
token; a GPU rounds otherwise than they do, so there the text is the same only because it is given.
"""

import math
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import mean, median

from torch import Tensor

from mosaic.format.errors import InputError
from mosaic.runtime.bench import prefill_seconds
from mosaic.runtime.device.choice import DeviceChoice
from mosaic.runtime.loading import Loaded, Loading, LoadOptions
from mosaic.runtime.machine import cores
from mosaic.runtime.ops.cpu import CpuOps, set_threads, threads
from mosaic.runtime.plan_vram import PIECES
from mosaic.runtime.progress import Progress, silent
from mosaic.runtime.state import SequenceState, Snapshot
from mosaic.runtime.tuning import MIN_HITS, SHORTEST_STREAMED, Knob, Settings, stream_values, thread_values
from mosaic.runtime.wishes import VramWishes

PROMPT_TOKENS = 32  # before the text that the model writes
MOST_TOKENS = 64  # of that text
WRITING_SECONDS = 3.0  # for it, or for one token
TRIAL_SECONDS = 1.0  # for reading it again, or one token
LONGEST_PROMPT = PIECES[0]
SHARES = 4  # so many parts of the layers are weighed against slots
TAKING = 1e9  # bytes per second at which a part of a model comes to a device; assumed, until one came


class Rig:
    """A model, loaded as a run would have it and then changed as settings say (those of `Tuned`, by their names).

    `vram`: what was wished of the device when `loading` was planned, of which nobody else may hold it. `find`: the same
    device anew. `make`: the host's operations. `tokens`: a text, at least LONGEST_PROMPT of them.
    """

    def __init__(
        self, loading: Loading, vram: VramWishes, make: Callable[[], CpuOps], find: Callable[[], DeviceChoice],
        tokens: Sequence[int], progress: Progress = silent,
    ) -> None:  # fmt: skip
        self.loading, self._vram, self._make, self._find, self._tokens = loading, vram, make, find, tokens
        self._loaded: Loaded | None = loading.load(make(), LoadOptions(), progress)
        self._experts = self._loaded.experts
        self._exact = loading.device is None or loading.device.place.type == "cpu"
        self._prompt = tokens[: max(min(PROMPT_TOKENS, loading.plan.context // 2), 1)]
        self._snapshot: Snapshot | None = None
        self.settings = {"threads": threads()}
        if plan := loading.plans[1]:
            self.settings["vram"] = self._slots = plan.items["expert slots"]
            self.settings["min_hits"] = loading.tuning.min_hits
            self.settings["stream_tokens"] = loading.tuning.stream_tokens
            self.settings["piece"] = plan.piece
        self._first = self._read_prompt()
        self._step(self._begun(), self._prompt[0])  # what is done for the first time takes longer
        self._done: set[tuple[int, int, bool]] = set()  # prompts that were read before

    def write(self, num_tokens: int) -> float:
        """Have the model write the text, of token ids below `num_tokens`; seconds that a token takes."""
        state, logits = self._begun(), self._first
        self._text: list[int] = []
        self._sums: list[int] = []
        seconds: list[float] = []
        most = min(MOST_TOKENS, self.loading.plan.context - len(self._prompt))
        while len(seconds) < most and sum(seconds) < WRITING_SECONDS:
            self._text.append(int(logits[:num_tokens].argmax()))
            took, logits = self._step(state, self._text[-1])
            seconds.append(took)
            self._sums.append(_sum(logits))
        pace = median(seconds[len(seconds) // 2 :])
        self._count = min(max(int(TRIAL_SECONDS / pace), 1), len(seconds))
        self._trial_seconds = self._count * pace
        return pace

    def knobs(self, held: Collection[str]) -> list[Knob]:
        """What can be tuned of this model here, but for what is held. After `write`."""
        plan, context, usual = self.loading.plans[1], self.loading.plan.context, self._trial_seconds
        knobs = [self._knob("threads", thread_values(cores()), self.decode, usual)]
        if plan:
            knobs.append(self._knob("vram", self._slot_values(), self.decode, usual + plan.total / TAKING))
        if plan and plan.slots:
            knobs.append(self._knob("min_hits", MIN_HITS, self.decode, usual))
        longest = min(plan.piece, context) if plan and plan.layers else 0
        prompt = self._prompt_pace() if longest else 0.0
        if plan and plan.stream and longest >= SHORTEST_STREAMED:
            values = stream_values(longest)
            self.settings["stream_tokens"] = present = min(self.settings["stream_tokens"], values[-1])
            knobs.append(self._knob("stream_tokens", values, self.read, present * prompt))
        if plan and longest == plan.piece:  # else every prompt is one
            pieces = [piece for piece in PIECES if piece <= context]
            knobs.append(self._knob("piece", pieces, self.read_in_pieces, 2 * longest * prompt))
        return [knob for knob in knobs if knob.name not in held and len(knob.values) > 1]

    def _knob(self, name: str, values: Iterable[int], cost: Callable[[Settings, int], float], expected: float) -> Knob:
        return Knob(name, sorted({*values, self.settings[name]}), cost, expected)

    def _slot_values(self) -> set[int]:
        """Bytes of slots that go with so many layers, by quarters, and with pieces as they are."""
        layers = len(self.loading.weights.spec.layers)
        wishes = (VramWishes(None, layers * share // SHARES, self.settings["piece"]) for share in range(SHARES + 1))
        return {plan.items["expert slots"] for each in wishes if (plan := self.loading.vram_plan(each))}

    def decode(self, settings: Settings, smaller: int) -> float:
        """Seconds for a token of the text; on a device, of its second half: the first brings experts to their slots."""
        if not self._set(settings):
            return math.inf
        assert self._loaded
        state, seconds = self._begun(), []
        for token, expected in zip(self._text[: self._count], self._sums, strict=False):
            took, logits = self._step(state, token)
            seconds.append(took)
            if self._exact and _sum(logits) != expected:
                raise RuntimeError(f"other bits with {dict(settings)}")
        return mean(seconds[self._count // 2 if self._loaded.tier else 0 :])

    def read(self, settings: Settings, tokens: int) -> float:
        """Seconds for a token of a prompt of so many."""
        if not self._set(settings):
            return math.inf
        assert self._loaded
        model, piece, text = self._loaded.model, settings["piece"], self._tokens[:tokens]
        kind = tokens, piece, tokens >= settings["stream_tokens"]
        if kind not in self._done:
            self._done.add(kind)
            prefill_seconds(model, text, piece)
        return prefill_seconds(model, text, piece) / tokens

    def read_in_pieces(self, settings: Settings, smaller: int) -> float:
        """The same of a prompt as long as the larger of two pieces, of which one is half of the other."""
        now = self.loading.plans[1]
        assert now
        plan = self.loading.vram_plan(VramWishes(settings["vram"], now.layers, settings["piece"]))
        if plan is None or plan.head != now.head:  # longer ones would take the memory of something else
            return math.inf
        return self.read(settings, 2 * smaller)

    def _set(self, settings: Settings) -> bool:
        """Slots are empty then, as after a start. False if there is no memory for what was asked."""
        if settings["threads"] != threads():
            set_threads(settings["threads"])
        if "vram" not in settings:
            return True
        if settings["vram"] != self._slots and not self._move(settings):
            return False
        if self._loaded and self._loaded.tier:
            self._loaded.tier.retune(settings["min_hits"], settings["stream_tokens"])
        return True

    def _move(self, settings: Settings) -> bool:
        """Take the device's part anew. The model goes first: both at a time may be too much; weights stay mapped."""
        if self._loaded and self._loaded.tier:
            self._loaded.tier.close()
        self._loaded = self._snapshot = None
        self._slots = -1
        try:
            self.loading.move(self._find, VramWishes(settings["vram"], self._vram.layers, settings["piece"]))
        except InputError:
            return False
        self._loaded = self.loading.load(self._make(), LoadOptions(), experts=self._experts)
        self._slots = settings["vram"]
        self._read_prompt()
        return True

    def _read_prompt(self) -> Tensor:
        """Logits [V] after it."""
        assert self._loaded
        model, self._snapshot = self._loaded.model, None  # before pages for another are taken
        state = model.new_sequence()
        hidden = model.hidden(self._prompt, state)
        self._snapshot = state.snapshot()
        return model.logits(hidden[-1:])[0]

    def _prompt_pace(self) -> float:
        """Seconds for a token of the short prompt; of longer ones it is less."""
        begin = time.perf_counter()
        self._read_prompt()
        return (time.perf_counter() - begin) / len(self._prompt)

    def _begun(self) -> SequenceState:
        assert self._snapshot
        return self._snapshot.resume()

    def _step(self, state: SequenceState, token: int) -> tuple[float, Tensor]:
        """Seconds for a token, and logits [V] after it."""
        assert self._loaded
        model, start = self._loaded.model, time.perf_counter()
        logits = model.logits(model.hidden([token], state))[0]
        return time.perf_counter() - start, logits


def _sum(logits: Tensor) -> int:
    return zlib.crc32(logits.numpy().tobytes())
