"""mosaic-eval: what a model directory makes of a text, beside a reference. Heavy imports wait for sound arguments."""

import errno
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mosaic.format.errors import InputError
from mosaic.format.program import Version, run_program
from mosaic.runtime import options

if TYPE_CHECKING:
    from mosaic.format.evaluation import Evaluation, Perplexity

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


@app.command()
def command(
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text, UTF-8; special tokens in it are recognised.")],
    out: options.Out = None,
    demo: options.Demo = False,
    against: Annotated[
        Path | None,
        typer.Option(metavar="CHECKPOINT|OTHER", help="The reference: a downloaded checkpoint, or a model directory."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a window; default: 2048, or the model's limit.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Use at most so many tokens of the text; default: all.")
    ] = None,
    kv: options.KV = "bf16",
    ops: options.OpsChoice = "cpu",
    activations: options.ActivationsChoice = "f32",
    threads: options.Threads = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object, in the last line.")
    ] = False,
    version: Version = False,
) -> None:
    """Perplexity of a text; with --against how far next-token distributions are from those of a reference.

    The text is cut into windows of --context tokens that do not overlap; in each every token but the first is scored.
    Divergence is KL(reference || OUT) in nats, softmax in float64; both models compute with the same options. Standard
    errors take tokens for independent.

    Each layer is read once, for all windows; meanwhile the states of all tokens (8 KiB each in the 35B, for each of the
    models) are in memory, or if they are large in a file in TMPDIR.

    The result is kept in OUT, in evaluation.json; mosaic-report shows it.

    Exit codes: 0 done, 2 bad input or refused, 130 interrupted.
    """
    options.one_model(out, demo, "mosaic-eval")

    from tqdm import tqdm

    from mosaic.format.evaluation import read_evaluations
    from mosaic.runtime import evaluate
    from mosaic.runtime.kv import KVFormat
    from mosaic.runtime.ops.choice import Activations, OpsName, make_ops, option
    from mosaic.runtime.tokenizer import Tokenizer
    from mosaic.runtime.weights import Weights

    kv_format = option("kv", kv, KVFormat)
    chosen = make_ops(option("ops", ops, OpsName), option("activations", activations, Activations), threads)
    weights = Weights(options.model_folder(out))
    read_evaluations(weights.folder, weights.catalog.plan_digest)  # what cannot be added to is refused now
    this, tokenizer = evaluate.open_model(weights, chosen, kv_format), Tokenizer(weights.folder)
    reference = evaluate.open_reference(against, chosen, kv_format) if against else None
    if reference:
        evaluate.check_same_vocabulary(this, reference, tokenizer)
    size = evaluate.window_size(context, [this, reference] if reference else [this])
    read = evaluate.read_text(text, tokenizer, weights.spec.vocab_size, tokens)

    with ExitStack() as bars:

        def progress(title: str, steps: int) -> Callable[[int], object]:
            return bars.enter_context(tqdm(total=steps, desc=title, disable=None, leave=False)).update

        scores = evaluate.scores_of(read, size, this, reference, progress)
    settings = (ops, activations if ops == OpsName.CPU else None, kv)
    result = evaluate.evaluation(read, size, scores, reference, settings)
    print(table(result))
    if as_json:
        print(json.dumps(asdict(result)))
    _save(weights.folder, weights.catalog.plan_digest, result)


def table(result: "Evaluation") -> str:
    """What a person reads."""
    lines = [
        f"{ascii(result.text)[1:-1]}: {result.tokens:,} tokens scored, in windows of {result.context:,}",
        f"{'perplexity':<22}{_with_error(result.perplexity)}",
    ]
    if result.comparison:
        other, divergence = result.comparison, result.comparison.divergence
        reference = f"{ascii(other.reference)[1:-1]}, {' '.join(other.dtypes)}"
        error = "" if divergence.error is None else f" +- {divergence.error:.6f}"
        change = "" if other.ratio.error is None else f" +- {other.ratio.error:.3%}"
        lines += [
            f"{'of the reference':<22}{_with_error(other.perplexity)}  ({reference})",
            f"{'change':<22}{other.ratio.value - 1:+.3%}{change}",
            f"{'KL divergence, mean':<22}{divergence.mean:.6f}{error}",
            f"{'  median':<22}{divergence.median:.6f}",
            f"{'  99th percentile':<22}{divergence.p99:.6f}",
            f"{'  maximum':<22}{divergence.maximum:.6f}",
            f"{'same likeliest token':<22}{other.same_top:.3%}",
        ]
    return "\n".join(lines)


def _with_error(value: "Perplexity") -> str:
    return f"{value.value:.6g}" + ("" if value.error is None else f" +- {value.error:.2g}")


def _save(folder: Path, plan_digest: str, result: "Evaluation") -> None:
    from mosaic.format.evaluation import EVALUATION_FILE, add_evaluation

    file = folder / EVALUATION_FILE
    try:
        add_evaluation(folder, plan_digest, result)
    except OSError as error:
        if error.errno in NOT_WRITABLE:
            print(f"note: not kept: {file}: {error.strerror}", file=sys.stderr)
            return
        remedy = "the result above is sound; make room, and run again to keep it"
        raise InputError("cannot keep the result", file=file, found=error.strerror, remedy=remedy) from error
    print(f"kept in {file}", file=sys.stderr)


def main() -> None:
    """Entry point."""
    run_program(app)


if __name__ == "__main__":
    main()
