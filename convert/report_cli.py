"""mosaic-report: what a conversion cost, as tables, as a page, as JSON; and how two model directories differ."""

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from mosaic.convert import report, report_evaluation, report_tables
from mosaic.convert.against import disagreements, measure
from mosaic.convert.compare import Model, open_model
from mosaic.convert.comparison import compare, text
from mosaic.convert.quantize import check_kernels
from mosaic.format.catalog import CATALOG_FILE, read_catalog
from mosaic.format.errors import EXIT_CHECK_FAILED, InputError
from mosaic.format.evaluation import Evaluation, read_evaluations
from mosaic.format.jsonfile import write_durably
from mosaic.format.layout import CONFIG_FILE
from mosaic.format.program import Version, run_program
from mosaic.format.source import Checkpoint

WORST = 10  # tensors shown
MOST = 10  # disagreements shown

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Model directory of mosaic-convert, or any checkpoint.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="Compare OUT with this directory, tensor by tensor.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="CHECKPOINT", help="Measure OUT anew against the checkpoint it was made from."),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where report.html and report.json go; otherwise report.html into OUT."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Tensors compared at a time.")] = os.cpu_count() or 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report or comparison as JSON.")] = False,
    version: Version = False,
) -> None:
    """Show the quantization error of a model directory: by class, by layer, the worst tensors; and as report.html.

    What mosaic-eval kept of the model on texts is shown with it.

    mosaic-report OUT shows what mosaic-convert recorded. With --against the numbers are computed anew from both
    directories, for any checkpoint that Mosaic knows (an official FP8 release, say), and held against what was
    recorded. mosaic-report OUT OTHER tells which tensors have the same bytes and how far apart the others are.

    Exit codes: 0 done, 1 the recorded report is not that of the bytes, 2 bad input.
    """
    if other and (against or into):
        raise InputError(
            "these options do not go together",
            found=f"OTHER with {'--against' if against else '--into'}",
            expected="OUT OTHER, or OUT with options",
            remedy="see mosaic-report --help",
        )
    if into and any((into / name).exists() for name in (CATALOG_FILE, CONFIG_FILE)):
        raise InputError(
            "FOLDER holds a model",
            file=into,
            expected="a folder for reports: the report.json of a model directory is part of it",
            remedy="choose another folder, or leave --into out to write report.html into OUT",
        )
    check_kernels()
    if other:
        _compare(out, other, workers, as_json)
        return
    recorded = _recorded(out, against is None)
    evaluations = _evaluations(out)
    value = _measured(out, against, workers) if against else recorded
    assert value is not None
    wrong = list(disagreements(recorded, value)) if recorded and against else []
    if as_json:
        print(json.dumps(_joined(value, evaluations)))
    else:
        tables = [report_tables.by_class(value["summary"]), report_tables.by_layer(value)]
        tables.append(report_tables.worst(value, WORST))
        print("\n\n".join(tables + [report_evaluation.table(evaluations)] * bool(evaluations)))
    if names := value.get("unmeasured"):
        shown = ", ".join(report_tables.printable(name) for name in names[:3])
        print(f"note: {len(names)} tensors are not in {against} and were not measured: {shown}", file=sys.stderr)
    if wrong:
        print(f"{out / report.REPORT_FILE} is not the report of these bytes:", file=sys.stderr)
        print("\n".join(wrong[:MOST] + [f"and {len(wrong) - MOST} more"] * (len(wrong) > MOST)), file=sys.stderr)
        sys.exit(EXIT_CHECK_FAILED)
    _write(value, evaluations, out, into)
    if recorded and against:
        print(f"measured anew: agrees with {out / report.REPORT_FILE}", file=sys.stderr)


def _recorded(out: Path, needed: bool) -> dict[str, Any] | None:
    """The report that mosaic-convert wrote; None if OUT is not its work and that may be."""
    if (out / CATALOG_FILE).is_file():
        return report.read(out / report.REPORT_FILE)
    if needed:
        if not (out / report.REPORT_FILE).is_file():
            read_catalog(out)  # says what OUT is instead
        return report.read(out / report.REPORT_FILE)
    return None


def _measured(out: Path, checkpoint: Path, workers: int) -> dict[str, Any]:
    with ExitStack() as stack:
        source, stored = (open_model(stack.enter_context(Checkpoint(folder))) for folder in (checkpoint, out))
        with _progress(stored) as bar:
            return measure(source, stored, workers, bar.update)


def _evaluations(out: Path) -> tuple[Evaluation, ...]:
    """What mosaic-eval kept of OUT; nothing of a directory that is not ours."""
    return read_evaluations(out, read_catalog(out).plan_digest) if (out / CATALOG_FILE).is_file() else ()


def _joined(value: dict[str, Any], evaluations: tuple[Evaluation, ...]) -> dict[str, Any]:
    """The report with the evaluations, if there are any."""
    return value | ({"evaluations": [asdict(evaluation) for evaluation in evaluations]} if evaluations else {})


def _write(value: dict[str, Any], evaluations: tuple[Evaluation, ...], out: Path, into: Path | None) -> None:
    """report.html, and elsewhere than in OUT report.json too; nothing into a directory that is not ours."""
    folder = into or (out if (out / CATALOG_FILE).is_file() else None)
    if folder is None:
        print("note: OUT is not Mosaic's, so nothing was written; --into FOLDER writes report.html", file=sys.stderr)
        return
    from mosaic.convert.report_html import render  # loads matplotlib

    page = folder / report.HTML_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if into:
            write_durably(folder / report.REPORT_FILE, report.to_bytes(_joined(value, evaluations)))
        write_durably(page, render(value, out.resolve().name, evaluations).encode())
    except OSError as error:
        raise InputError(
            "cannot write the report",
            file=page,
            found=error.strerror or error,
            expected="a folder that may be written to, with some room",
            remedy="choose another one: --into FOLDER",
        ) from error
    print(f"written: {page}", file=sys.stderr)


def _compare(out: Path, other: Path, workers: int, as_json: bool) -> None:
    with ExitStack() as stack:
        one, two = (open_model(stack.enter_context(Checkpoint(folder))) for folder in (out, other))
        with _progress(two) as bar:
            result = compare(one, two, workers, bar.update)
    print(json.dumps(result) if as_json else text(result, WORST))


def _progress(model: Model) -> "tqdm[Any]":
    total = sum(model.stored(key).weight.nbytes for key in model.contract)
    return tqdm(total=total, unit="B", unit_scale=True, disable=None, desc="compare", leave=False)


def main() -> None:
    """Entry point."""
    run_program(app)


if __name__ == "__main__":
    main()
