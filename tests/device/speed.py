"""Tokens per second of a model of the 35B's layers, by how many of its experts have room on the card.

Its weights are random, so routing is nearly uniform: no expert is much hotter than another, and by the rule of
`PlacementPolicy` hardly one would be worth its copy. So the room is filled with whatever is used, and what is there
then stays there. With a model that was trained the same room has more hits.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import Tensor

from bench.checks import check_room
from bench.shape import model_config
from bench.write_model import model_bytes, write_model
from device.card import Card, attempt, eager
from device.lines import Report
from device.rates import TINY
from mosaic.format.errors import InputError
from mosaic.runtime.bench import SHORT_PROMPT, Measurement, begun, decode_seconds, random_tokens, run_tests
from mosaic.runtime.device.choice import DeviceChoice
from mosaic.runtime.device.part import Tuning
from mosaic.runtime.experts.hot import HotExperts
from mosaic.runtime.home import plainly
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.loading import Loaded, Loading, LoadOptions
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops.cpu import CpuOps
from mosaic.runtime.wishes import VramWishes

KV = KVFormat.BF16
# Of the largest logit, in the middle of all tokens: see BOUND in `engine`; with so many experts more often one is as
# good as another.
ERROR = 1e-3


@dataclass(frozen=True)
class Room:
    """On the card, for a share of all experts. `graphs`: CUDA graphs; `copying`: what is used goes on to be copied."""

    share: float
    graphs: bool = True
    copying: bool = False

    def __str__(self) -> str:
        forms = "" if self.graphs else ", no CUDA graphs", ", always copying" if self.copying else ""
        return f"room for {self.share:.0%}{''.join(forms)}"


ROOMS = [*map(Room, (0.0, 0.1, 0.25, 0.5, 1.0)), Room(1.0, graphs=False), Room(0.25, copying=True)]


@dataclass(frozen=True)
class Amounts:
    """`vocab`: rows of head and embedding. The others are tokens.

    `fill`: decoded before, to fill the room. `checked`: the last ones of the prompt, whose logits are compared.
    """

    vocab: int = 32768
    prompt: int = 1024
    fill: int = 192
    decode: int = 48
    checked: int = 64
    repetitions: int = 2

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return max(self.prompt, SHORT_PROMPT + max(self.fill, self.decode))


TINY_AMOUNTS = Amounts(vocab=512, prompt=520, fill=2, decode=2, checked=8, repetitions=1)


def run(card: Card, report: Report, layers: int) -> None:
    """The model is made for it and deleted afterwards: 0.84 GB for each layer."""
    amounts = TINY_AMOUNTS if card.rehearsed else Amounts()
    config = model_config(layers, amounts.vocab, TINY if card.rehearsed else None)
    with TemporaryDirectory(prefix="mosaic-check-") as folder:
        model = Path(folder) / "model"
        check_room(model, model_bytes(config))
        write_model(model, config, seed=0, quiet=True)
        _Speeds(card, report, model, amounts).all_of_them()


def _stay(*arguments: object) -> None:
    """Instead of promoting."""


class _Speeds:
    """Of one model."""

    def __init__(self, card: Card, report: Report, model: Path, amounts: Amounts) -> None:
        self._card, self._report, self._model, self._amounts = card, report, model, amounts
        self._tokens: list[int] = []
        self._expected = torch.empty(0)

    def all_of_them(self) -> None:
        """First by the CPU alone."""
        loading = Loading(self._model, KV, context=self._amounts.context)
        spec, places = loading.weights.spec, loading.places
        self._tokens = random_tokens(spec.vocab_size, self._amounts.context)
        loaded = loading.load(CpuOps(), LoadOptions())
        self._expected = self._logits(loaded.model)
        used = len(places.layers) * places.top_k
        for test in self._tests(loaded, loading.piece):
            self._report.add(f"{test.kind} of {test.tokens:,}, CPU alone", test.tok_s, "tok/s")
        del loaded, loading
        slot = max(places[key].nbytes for key in places)
        for room in ROOMS:
            with attempt(self._card, self._report, str(room)):
                self._beside(room, round(room.share * len(places)) * slot, used)

    def _beside(self, room: Room, vram: int, used: int) -> None:
        """All layers on the card, with so many bytes for experts. `used`: experts that a token uses, in all layers."""
        device = eager(self._card.device())
        if not room.graphs:
            device.run = plainly
        chosen, wishes = DeviceChoice(device, needed=True), VramWishes(vram)
        loading = Loading(self._model, KV, context=self._amounts.context, chosen=chosen, vram=wishes)
        try:
            plan = loading.plans[1]
        except InputError:
            self._report.add(str(room), vram / 1e9, "GB", note="left out: the card has less, or it is too little")
            return
        assert plan
        loaded = loading.load(CpuOps(), LoadOptions(tuning=Tuning(min_hits=1)))
        self._fill(loaded.model)
        error = self._error(self._logits(loaded.model))
        with nullcontext() if room.copying else patch.object(HotExperts, "promote", _stay):
            tests = self._tests(loaded, plan.piece)
        for test in tests:
            note = f"{test.device_bytes_per_token / 1e6:.1f} MB copied per token"
            if test.kind == "decode":
                note = f"{test.device_hits_per_token / used:.0%} of experts there, {note}, {plan.total / 1e9:.1f} GB"
            trouble = self._card.trouble(device)
            note += f"; {trouble}" if trouble else f"; logits off by {error:.0e}"
            sound = error <= ERROR and not trouble
            self._report.add(f"{test.kind} of {test.tokens:,}, {room}", test.tok_s, "tok/s", passed=sound, note=note)

    def _fill(self, model: HybridModel) -> None:
        """The room on the card, with what other tokens use. Their sequence ends here: there is memory for one."""
        tokens = self._tokens[::-1]
        state = begun(model, tokens)
        decode_seconds(model, state, tokens[SHORT_PROMPT:][: self._amounts.fill])

    def _tests(self, loaded: Loaded, piece: int) -> list[Measurement]:
        amounts = self._amounts
        return run_tests(loaded, piece, [amounts.prompt], [amounts.decode], amounts.repetitions, lambda text: None)

    def _logits(self, model: HybridModel) -> Tensor:
        """After each of the last tokens of a prompt."""
        hidden = model.hidden(self._tokens[: self._amounts.prompt], model.new_sequence())
        return model.logits(hidden[-self._amounts.checked :])

    def _error(self, found: Tensor) -> float:
        errors = (found - self._expected).abs().amax(-1) / self._expected.abs().amax()
        return float(errors.median())
