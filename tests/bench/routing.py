"""Writes a synthetic routing trace: as skewed and as local as published for Qwen3.6, or uniform.

python tests/bench/routing.py OUT.trace --layers 40 --tokens 2000

"published": in every layer the Gini coefficient of the experts' uses is about 0.65, the 26 to 28 most used of 256 take
half of the lookups, later layers are more skewed; 35 % of a token's experts were the previous token's as well; kinds of
prompts (CLASSES of them, in turns of TURN tokens on average) have hot experts of their own: of their 16 most used, two
have about one in common. "uniform": every choice of top_k experts is as likely, whatever came before.
"""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from mosaic.format.errors import InputError
from mosaic.format.program import run_program
from mosaic.runtime.experts.trace import TraceHeader, TraceWriter

CLASSES = 4
TURN = 250  # tokens
SKEW = (1.65, 2.75)  # standard deviation of the log weights, in the first layer and in the last
COMMON = 0.1  # share of their variance that all classes have in common
KEPT = 0.09  # of the previous token's experts, beside those that are chosen again anyway
EXPERT_NBYTES = 3 * (512 * 2048 + 16 * 4 * 2)  # Qwen3.6-35B-A3B: three matrices of E4M3 codes and BF16 scales

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
Choices = NDArray[np.intp]  # [layers, top_k]


class Kind(StrEnum):
    """Statistics of a trace."""

    PUBLISHED = "published"
    UNIFORM = "uniform"


def routing(kind: Kind, layers: int, experts: int, top_k: int, seed: int) -> Iterator[Choices]:
    """Choices of one token after another, without end."""
    random = np.random.default_rng(seed)
    if kind is Kind.UNIFORM:
        while True:
            yield _most(random.random((layers, experts)), top_k)
    classes = _log_weights(random, layers, experts)
    while True:
        for number in random.permutation(CLASSES):
            choices: Choices | None = None
            for _ in range(random.geometric(1 / TURN)):
                scores = classes[number] + random.gumbel(size=(layers, experts))  # their top_k: drawn by weight
                if choices is not None:
                    kept = random.random((layers, top_k)) < KEPT
                    np.put_along_axis(scores, choices, np.take_along_axis(scores, choices, 1) + kept * 1e3, 1)
                choices = _most(scores, top_k)
                yield choices


def _log_weights(random: np.random.Generator, layers: int, experts: int) -> NDArray[np.float64]:
    """[classes, layers, experts]"""
    common = random.standard_normal((layers, experts))
    own = random.standard_normal((CLASSES, layers, experts))
    skew = np.linspace(*SKEW, layers)[:, None]
    return skew * (np.sqrt(COMMON) * common + np.sqrt(1 - COMMON) * own)


def _most(scores: NDArray[np.float64], count: int) -> Choices:
    """The positions of the `count` highest in each row, the highest first."""
    found = np.argpartition(-scores, count - 1)[:, :count]
    return np.take_along_axis(found, np.argsort(-np.take_along_axis(scores, found, 1)), 1)


@app.command()
def command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The trace to write; must not exist.")],
    layers: Annotated[int, typer.Option(min=1)] = 40,
    experts: Annotated[int, typer.Option(min=1)] = 256,
    top_k: Annotated[int, typer.Option(min=1)] = 8,
    tokens: Annotated[int, typer.Option(min=1)] = 2000,
    kind: Annotated[Kind, typer.Option(help="Statistics of the trace.")] = Kind.PUBLISHED,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same trace.")] = 0,
) -> None:
    """Write the routing of so many tokens."""
    if out.exists():
        raise InputError("there is something already", file=out, remedy="remove it, or choose another name")
    try:
        header = TraceHeader(f"synthetic, {kind}", tuple(range(layers)), experts, top_k, EXPERT_NBYTES)
    except ValueError as error:
        raise InputError("no such model", found=error, remedy="choose other numbers") from error
    with TraceWriter(out, header) as writer:
        for _, choices in zip(range(tokens), routing(kind, layers, experts, top_k, seed), strict=False):
            for layer, row in enumerate(choices):
                writer.record(layer, row[None])


if __name__ == "__main__":
    run_program(app)
