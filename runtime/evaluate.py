"""Judges a model directory on a text, alone or beside a reference: mosaic-eval between its arguments and its table."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mosaic.format.catalog import CATALOG_FILE
from mosaic.format.errors import InputError
from mosaic.format.evaluation import Comparison, Evaluation
from mosaic.format.layout import WORK_FOLDER
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.layer_major import final_hidden
from mosaic.runtime.model import HybridModel
from mosaic.runtime.ops import Ops
from mosaic.runtime.scoring import Scores, Subject, perplexity, score, summary, windows_of
from mosaic.runtime.source_weights import SourceWeights
from mosaic.runtime.tokenizer import TOKENIZER_FILE, Tokenizer
from mosaic.runtime.weights import ModelWeights, Weights

CONTEXT = 2048  # tokens of a window, unless the model or the user wants fewer

Progress = Callable[[str, int], Callable[[int], object]]
"""Given what is done and in how many steps, something to be told of steps as they are done."""


@dataclass(frozen=True)
class Opened:
    """A model that can be run. `name`: what an evaluation calls it as a reference."""

    folder: Path
    name: str
    weights: ModelWeights
    model: HybridModel


@dataclass(frozen=True)
class Text:
    """A text in tokens."""

    name: str
    sha256: str
    tokens: list[int]


def open_model(weights: Weights, ops: Ops, kv: KVFormat) -> Opened:
    """A model directory of Mosaic's."""
    return Opened(weights.folder, f"recipe {weights.catalog.recipe}", weights, HybridModel(weights, ops, kv))


def open_reference(folder: Path, ops: Ops, kv: KVFormat) -> Opened:
    """A model directory of Mosaic's, or a checkpoint as it was downloaded."""
    if (folder / CATALOG_FILE).is_file() or (folder / WORK_FOLDER).is_dir():
        return open_model(Weights(folder), ops, kv)
    source = SourceWeights(folder)
    return Opened(folder, "checkpoint", source, HybridModel(source, ops, kv, source))


def check_same_vocabulary(this: Opened, reference: Opened, tokenizer: Tokenizer) -> None:
    """InputError if distributions over their tokens cannot be compared. A reference without tokenizer has OUT's."""
    expected, found = (opened.weights.spec.vocab_size for opened in (this, reference))
    if found != expected:
        raise _other_vocabulary(reference.folder, f"{found:,} tokens", f"{expected:,} tokens")
    file = reference.folder / TOKENIZER_FILE
    if file.exists() and not tokenizer.same_vocabulary(Tokenizer(reference.folder)):
        raise _other_vocabulary(file, "other tokens", f"those of {this.folder / TOKENIZER_FILE}")


def _other_vocabulary(file: Path, found: str, expected: str) -> InputError:
    return InputError(
        "the two models have different vocabularies",
        file=file,
        found=found,
        expected=expected,
        remedy="give the checkpoint that OUT was made from, or a relative with the same tokenizer",
    )


def read_text(file: Path, tokenizer: Tokenizer, vocab_size: int, most: int | None) -> Text:
    """A text, at most so many tokens of it; InputError if it is none, or too short to score anything."""
    if not file.is_file():
        raise InputError(
            "no such text",
            file=file,
            found="a directory or a device" if file.exists() else "nothing",
            expected="a file of text",
            remedy="give --text the path of a file",
        )
    data = file.read_bytes()
    try:
        tokens = tokenizer.encode(data.decode("utf-8"))[:most]
    except UnicodeDecodeError as error:
        raise InputError(
            "the text is not UTF-8", file=file, found=error, expected="UTF-8", remedy="convert the text first"
        ) from error
    if len(tokens) < 2:
        raise InputError(
            "too little text",
            file=file,
            found=f"{len(tokens)} tokens",
            expected="at least 2: the first of a window is not scored",
            remedy="give a longer text, or a larger --tokens",
        )
    if max(tokens) >= vocab_size:
        raise InputError(
            "the tokenizer is not that of the model",
            file=TOKENIZER_FILE,
            found=f"token {max(tokens)}",
            expected=f"tokens below {vocab_size:,}",
            remedy="copy tokenizer.json again from the checkpoint the model was converted from",
        )
    return Text(file.name, hashlib.sha256(data).hexdigest(), tokens)


def window_size(wished: int | None, models: list[Opened]) -> int:
    """Tokens of a window; InputError if one of the models does not take so many."""
    longest = min(opened.weights.spec.max_position_embeddings for opened in models)
    if wished is not None and not 2 <= wished <= longest:
        raise InputError(
            "--context is out of range", found=wished, expected=f"2 to {longest:,}", remedy="choose one in this range"
        )
    return wished or min(CONTEXT, longest)


def scores_of(text: Text, context: int, this: Opened, reference: Opened | None, progress: Progress) -> Scores:
    """Both models over all layers, one after the other; then their heads side by side."""
    windows = windows_of(text.tokens, context)
    inputs = [window[:-1] for window in windows]
    targets = [token for window in windows for token in window[1:]]

    def subject(opened: Opened) -> Subject:
        done = progress(str(opened.folder), len(opened.weights.spec.layers))
        return Subject(opened.folder, opened.model, final_hidden(opened.model, opened.weights, inputs, lambda: done(1)))

    first, second = subject(this), subject(reference) if reference else None
    for opened in (this, reference):
        if opened:
            opened.weights.read_ahead("embedding" if opened.weights.spec.tie_embeddings else "head")
    return score(first, second, targets, progress("next-token distributions", len(targets)))


def evaluation(
    text: Text, context: int, scores: Scores, reference: Opened | None, settings: tuple[str, str | None, str]
) -> Evaluation:
    """What the scores come to. `settings`: ops, activations, kv."""
    comparison = None
    if reference and scores.compared:
        compared = scores.compared
        comparison = Comparison(
            reference.name,
            reference.weights.dtypes,
            perplexity(compared.nll),
            perplexity(scores.nll - compared.nll),
            summary(compared.divergence),
            float(compared.same_top.mean()),
        )
    windows = len(windows_of(text.tokens, context))
    size = text.name, text.sha256, context, windows, len(scores.nll)
    return Evaluation(*size, *settings, perplexity(scores.nll), comparison)
