"""What mosaic-eval found, as a table: how the model does on texts, beside how its weights differ."""

from collections.abc import Sequence

from mosaic.convert import report_tables
from mosaic.format.evaluation import Evaluation, Perplexity

HEAD = ["text", "tokens", "window", "computed with", "perplexity"]
COMPARED = ["reference", "its perplexity", "change", "KL mean", "KL median", "KL 99 %", "KL max", "same top"]


def cells(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    """One row per evaluation, heading first; columns of a reference only if any has one."""
    compared = any(evaluation.comparison for evaluation in evaluations)
    return [HEAD + COMPARED * compared, *(_row(evaluation, compared) for evaluation in evaluations)]


def table(evaluations: Sequence[Evaluation]) -> str:
    """The same as text."""
    return report_tables.aligned(cells(evaluations), left=(0, 3))


def _row(evaluation: Evaluation, compared: bool) -> list[str]:
    activations = f" {evaluation.activations}" if evaluation.activations else ""
    row = [
        report_tables.printable(evaluation.text),
        f"{evaluation.tokens:,}",
        f"{evaluation.context:,}",
        report_tables.printable(f"{evaluation.ops}{activations}, kv {evaluation.kv}"),
        _perplexity(evaluation.perplexity),
    ]
    if evaluation.comparison is None:
        return row + [""] * (len(COMPARED) * compared)
    other = evaluation.comparison
    kl = other.divergence
    change = "" if other.ratio.error is None else f" +- {other.ratio.error:.3%}"
    return [
        *row,
        report_tables.printable(f"{other.reference}, {' '.join(other.dtypes)}"),
        _perplexity(other.perplexity),
        f"{other.ratio.value - 1:+.3%}{change}",
        *(f"{value:.4g}" for value in (kl.mean, kl.median, kl.p99, kl.maximum)),
        f"{other.same_top:.2%}",
    ]


def _perplexity(value: Perplexity) -> str:
    return f"{value.value:.5g}" + ("" if value.error is None else f" +- {value.error:.2g}")
