"""The demo end to end, by the CPU alone and with parts of it on a card: the same tokens, as likely as before."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from device.card import Card, attempt, eager
from device.lines import Report
from mosaic.recipes import DEMO_CHECKPOINT
from mosaic.runtime import Engine
from mosaic.runtime.device import Device
from mosaic.runtime.device.part import Tuning
from mosaic.runtime.experts.places import ExpertPlaces
from mosaic.runtime.loading import LoadOptions
from mosaic.runtime.request import Request
from mosaic.runtime.sampler import Chosen
from mosaic.runtime.sampling import Sampling
from mosaic.runtime.weights import Weights

TEXT = DEMO_CHECKPOINT.parent / "heldout" / "austen.txt"
PROMPTS = {"short prompt": 24, "streamed prompt": 700}  # tokens; the longer one's experts pass by the card
ANSWER = 48  # tokens
REHEARSED = 24  # of them, if nothing is measured
# Nats. Between the CPU's kernels and float64 1.2e-5 was seen at most. Where two experts are as good as equally likely,
# float32 may choose the other one, which changes single tokens by far more: so it holds for all tokens but a few.
BOUND = 1e-3
ALL_BUT = 0.01
NEAR_TIE = 2 * BOUND  # what the likeliest token may be ahead of the next, where another one is taken for the likeliest


@dataclass(frozen=True)
class Reading:
    """What an engine made of a prompt: its tokens but the first, and those of the answer, with log-probabilities."""

    prompt: list[Chosen]
    answer: list[Chosen]
    hits: int  # experts that the card had
    nbytes: int  # of experts, copied there


def run(card: Card, report: Report) -> None:
    """Three arenas and three numbers of layers on the card: none, half, all."""
    answer = REHEARSED if card.rehearsed else ANSWER
    with TemporaryDirectory(prefix="mosaic-check-") as folder:
        model = Path(folder) / "demo"
        command = [sys.executable, "-m", "mosaic.convert.cli", str(DEMO_CHECKPOINT), str(model), "--quiet"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        weights = Weights(model)
        places, layers = ExpertPlaces(weights), len(weights.spec.layers)
        slot = max(places[key].nbytes for key in places)
        expected = _readings(_load(model, "cpu", None, None), answer)
        for slots in (2 * places.top_k, len(places) // 2, len(places)):
            for placed in (0, layers // 2, layers):
                where = f"{slots} of {len(places)} experts, {placed} of {layers} layers"
                with attempt(card, report, where):
                    engine = _load(model, eager(card.device()), slots * slot, placed)
                    found = _readings(engine, answer)
                    for name, reading in found.items():
                        _compare(report, f"{where}, {name}", expected[name], reading)
                    hits, nbytes = (sum(getattr(each, name) for each in found.values()) for name in ("hits", "nbytes"))
                    note = f"{nbytes / 1e6:,.1f} MB copied there"
                    report.add(where, hits, "hits", passed=hits > 0 and nbytes > 0, note=note)


def _load(model: Path, device: Device | str, vram: int | None, layers: int | None) -> Engine:
    """With copies of experts as often as can be: where they are is to change in the middle of answers."""
    options, context = LoadOptions(tuning=Tuning(min_hits=1)), max(PROMPTS.values()) + ANSWER
    return Engine.load(model, context=context, device=device, vram=vram, gpu_layers=layers, options=options)


def _readings(engine: Engine, answer: int) -> dict[str, Reading]:
    text = engine.tokenizer.encode(TEXT.read_text()[: 16 * max(PROMPTS.values())])
    return {name: _read(engine, text[:count], answer) for name, count in PROMPTS.items()}


def _read(engine: Engine, tokens: Sequence[int], answer: int) -> Reading:
    request = Request(tokens, Sampling(temperature=0), max_tokens=answer, logprobs=2, score_prompt=True)
    generation = engine.scheduler.submit(request)
    chosen = list(engine.scheduler.tokens(generation))
    traffic = generation.stats.traffic
    prompt = [scored for scored in generation.prompt_scores if scored]
    return Reading(prompt, chosen, traffic.device_hits, traffic.device_bytes)


def _compare(report: Report, what: str, expected: Reading, found: Reading) -> None:
    """The answer as far as its tokens are the same: behind another token other ones follow."""
    pairs = list(zip(expected.answer, found.answer, strict=False))
    same = next((place for place, (one, other) in enumerate(pairs) if one.token != other.token), len(pairs))
    compared = [*zip(expected.prompt, found.prompt, strict=True), *pairs[: same + 1]]
    errors = np.array([_error(one, other) for one, other in compared])
    margins = [one.top[0][1] - one.top[1][1] for one, other in compared if one.top[0][0] != other.top[0][0]]
    within = (errors <= BOUND).mean() >= 1 - ALL_BUT
    whole = same == len(expected.answer) == len(found.answer) or bool(margins)
    note = f"median {np.median(errors):.0e}; {same} of {len(expected.answer)} tokens the same"
    if margins:
        note += f"; {len(margins)} times another likeliest token, at most {max(margins):.0e} behind"
    passed = bool(within and whole and max(margins, default=0.0) <= NEAR_TIE)
    report.add(what, float(errors.max()), "nats off", passed=passed, note=note)


def _error(one: Chosen, other: Chosen) -> float:
    """Of the log-probability of a token, or of the likeliest one's where tokens differ."""
    assert one.logprob is not None
    assert other.logprob is not None
    return abs(one.logprob - other.logprob) if one.token == other.token else abs(one.top[0][1] - other.top[0][1])
