"""evaluation.json: how a model directory does on texts. mosaic-eval writes it, mosaic-report shows it.

No part of the catalog, since it comes later; it says which conversion it is about, and is not believed of another.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mosaic.format.errors import InputError
from mosaic.format.jsonfile import read_json, to_bytes, write_durably
from mosaic.format.typed import typed

EVALUATION_FILE = "evaluation.json"
EVALUATION_VERSION = 1
LARGEST = 1e300  # no number of a model comes near; what is larger, or none, is refused


@dataclass(frozen=True)
class Perplexity:
    """exp(mean) of the negative log-likelihood of the tokens, and its standard error (None: of a single token)."""

    value: float
    error: float | None


@dataclass(frozen=True)
class Divergence:
    """KL(reference || this) of the next-token distributions, in nats, over all scored tokens."""

    mean: float
    error: float | None  # standard error of the mean
    median: float
    p99: float
    maximum: float


@dataclass(frozen=True)
class Comparison:
    """The same text by another model, the reference, computed with the same settings."""

    reference: str  # "checkpoint", or "recipe NAME" of a model directory
    dtypes: tuple[str, ...]  # of its weights, by their safetensors names
    perplexity: Perplexity
    ratio: Perplexity  # this model's perplexity over the reference's, its error from the differences token by token
    divergence: Divergence
    same_top: float  # share of the tokens before which both hold the same one likeliest


@dataclass(frozen=True)
class Evaluation:
    """One text by one model."""

    text: str  # name of its file
    text_sha256: str
    context: int  # tokens of a window; windows do not overlap
    windows: int
    tokens: int  # scored: all but the first of each window
    ops: str
    activations: str | None
    kv: str
    perplexity: Perplexity
    comparison: Comparison | None

    @property
    def question(self) -> tuple[object, ...]:
        """What was asked: of two evaluations that agree in it the later one counts."""
        reference = self.comparison and (self.comparison.reference, self.comparison.dtypes)
        return (self.text_sha256, self.context, self.tokens, self.ops, self.activations, self.kv, reference)


@dataclass(frozen=True)
class _File:
    version: int
    plan_digest: str
    evaluations: tuple[Evaluation, ...]


def read_evaluations(folder: Path, plan_digest: str) -> tuple[Evaluation, ...]:
    """The evaluations of a model directory, those of an earlier conversion left out; InputError if the file is none."""
    file = folder / EVALUATION_FILE
    if not file.exists():
        return ()
    value = read_json(file)
    remedy = f"remove it, and run mosaic-eval again for what it held; {EVALUATION_FILE} is no part of the model"
    version = value.get("version")
    if type(version) is not int or version != EVALUATION_VERSION:
        problem = "evaluations of another version"
        raise InputError(problem, file=file, found=version, expected=EVALUATION_VERSION, remedy=remedy)
    try:
        found = typed(_File, value, "file")
        if unusable := [number for number in _numbers(value) if not abs(number) < LARGEST]:
            raise ValueError(f"the number {unusable[0]}")
    except ValueError as error:
        raise InputError("not sound evaluations", file=file, found=error, remedy=remedy) from error
    return found.evaluations if found.plan_digest == plan_digest else ()


def add_evaluation(folder: Path, plan_digest: str, evaluation: Evaluation) -> None:
    """Write one more, in the place of an earlier answer to the same question."""
    kept = [known for known in read_evaluations(folder, plan_digest) if known.question != evaluation.question]
    value = _File(EVALUATION_VERSION, plan_digest, (*kept, evaluation))
    write_durably(folder / EVALUATION_FILE, to_bytes(asdict(value), indent=1))


def _numbers(value: Any) -> list[float]:
    """Every number in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for entry in value for number in _numbers(entry)]
    return [value] if isinstance(value, int | float) else []
