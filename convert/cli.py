"""mosaic-convert: a downloaded checkpoint in, a model directory out."""

import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mosaic.convert import report, report_tables
from mosaic.convert.pipeline import convert, missing_layers, spans
from mosaic.convert.plan import ConversionPlan, make_plan
from mosaic.convert.quantize import NonFinite
from mosaic.convert.recipe import ScaleRule, load_recipe
from mosaic.convert.target import check_place, free_space, needed_space
from mosaic.convert.verify import verify_showing_progress
from mosaic.format.errors import EXIT_CHECK_FAILED, InputError
from mosaic.format.program import Version, run_program
from mosaic.format.source import Checkpoint

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Downloaded checkpoint, BF16 or FP8.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Model directory to write.")],
    recipe: Annotated[str, typer.Option(help="e4m3, e4m3-head, experts-only, or the path of a YAML file.")] = "e4m3",
    plan: Annotated[bool, typer.Option("--plan", help="Print what would be written; reads headers only.")] = False,
    scale: Annotated[
        ScaleRule, typer.Option(help="Block scales: amax, or mse (searched for the least error, slow).")
    ] = ScaleRule.AMAX,
    workers: Annotated[int, typer.Option(min=1, help="Shards converted at a time, by two threads each.")] = (
        max((os.cpu_count() or 1) // 2, 1)
    ),
    layers: Annotated[
        str | None,
        typer.Option(metavar="FIRST:END", help="Convert only these layers (0:10 is 0 to 9): one share of several."),
    ] = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="All layers are there: write the rest, join, verify every byte.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier conversion in OUT.")] = False,
    nonfinite: Annotated[NonFinite, typer.Option(help="NaN and infinite weights: refuse or zero.")] = NonFinite.REFUSE,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan or the summary as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    version: Version = False,
) -> None:
    """Convert a Hugging Face MoE checkpoint to blockwise 128x128 E4M3, one shard per layer.

    OUT can be run with mosaic-run and checked with mosaic-verify. With the recipes e4m3 and experts-only it is also
    laid out as the official FP8 releases are, for transformers, vLLM and SGLang; those read lm_head unquantised only,
    so e4m3-head is for mosaic-run. A conversion that was stopped is resumed by running the same command again.

    Several processes or machines can share the work on a common file system: each with its own --layers FIRST:END,
    all with the same other options; when all are done, one runs with --finish.

    Exit codes: 0 done, 1 --finish found damage, 2 bad input or refused, 130 interrupted. MOSAIC_ISA (scalar, avx2,
    avx512) chooses the kernels.
    """
    with Checkpoint(checkpoint) as source:
        planned = make_plan(source, load_recipe(recipe, scale), nonfinite)
        share = None if layers is None else layer_range(layers, len(planned.spec.layers))
        given = [name for name, on in (("--layers", share), ("--finish", finish), ("--overwrite", overwrite)) if on]
        if len(given) > 1:
            raise InputError(
                "these options do not go together",
                found=" with ".join(given),
                expected="shares with --layers alone, then --finish alone",
                remedy="to replace an earlier conversion, remove OUT before the first share",
            )
        for name in source.unlisted:
            print(f"note: not listed in the index, ignored: {name}", file=sys.stderr)
        if "tokenizer.json" not in {file.name for file in planned.companions}:
            print("note: the checkpoint has no tokenizer.json; mosaic-run will need one in OUT", file=sys.stderr)
        if plan:
            check_place(planned, out)
            needed, free = needed_space(planned, list(planned.shards)), free_space(out)
            print(f"note: {needed:,} bytes are needed in all, {free:,} are free on the disk of OUT", file=sys.stderr)
            shown = replace(
                planned, shards=tuple(shard for shard in planned.shards if share is None or shard.layer in share)
            )
            print(json.dumps(plan_json(shown), indent=1) if as_json else plan_text(shown))
            return
        start = time.monotonic()
        try:
            written = convert(
                planned, out, workers=workers, overwrite=overwrite, quiet=quiet, layers=share, finish=finish
            )
        except KeyboardInterrupt:
            print("stopped; finished shards are kept, the same command goes on from there", file=sys.stderr)
            raise
        seconds = time.monotonic() - start
        missing = missing_layers(planned, out) if share and written else []
    size = sum(shard.layout.nbytes for shard in planned.shards if share is None or shard.layer in share)
    result = {"out": str(out), "written": written, "seconds": round(seconds, 3), "bytes": size}
    done = f"in {seconds:.1f} s" if written else "already complete, nothing written"
    if share and written:
        rest = f"missing: layers {spans(missing)}" if missing else "all layers are there; now run it with --finish"
        print(json.dumps(result | {"missing_layers": missing}) if as_json else f"{out}: layers {layers} {done}\n{rest}")
        return
    summary = report.read(out / report.REPORT_FILE)["summary"]
    if as_json:
        result["summary"] = summary
    else:
        print(report_tables.by_class(summary))
        shards = len([shard for shard in planned.shards if share is None or shard.layer in share])
        print(f"\n{out}: {shards} shards, {size:,} bytes, {done}")
    broken = [check for check in verify_showing_progress(out) if not check.holds] if finish else []
    if as_json:
        print(json.dumps(result | ({"verified": not broken} if finish else {})))
    elif finish:
        print("\n".join(check.text() for check in broken) or "every invariant of the format holds")
    if broken:
        print(f"{out} is damaged: convert again with --overwrite", file=sys.stderr)
        sys.exit(EXIT_CHECK_FAILED)


def layer_range(text: str, count: int) -> range:
    """The layers that FIRST:END means, both optional, of `count`."""
    match = re.fullmatch(r"(\d{0,9}):(\d{0,9})", text, re.ASCII)
    first, end = (int(match[1] or 0), int(match[2] or count)) if match else (0, 0)
    if not 0 <= first < end <= count:
        raise InputError(
            "no such layers",
            found=f"--layers {text}",
            expected=f"FIRST:END with 0 <= FIRST < END <= {count}",
            remedy="0:10 means the layers 0 to 9",
        )
    return range(first, end)


def plan_json(plan: ConversionPlan) -> dict[str, object]:
    """The plan as JSON values."""
    return {
        "model_type": plan.spec.model_type,
        "recipe": plan.recipe.name,
        "tensor_bytes": plan.tensor_bytes,
        "shards": [
            {"file": shard.layout.file, "nbytes": shard.layout.nbytes, "tensors": len(shard.layout.entries)}
            for shard in plan.shards
        ],
        "treatments": report.plan_rows(plan),
        "notes": report.plan_notes(plan),
        "dropped": list(plan.dropped),
        "unlisted": plan.checkpoint.unlisted,
    }


def plan_text(plan: ConversionPlan) -> str:
    """The plan for a person."""
    lines = [f"{plan.spec.model_type}, {len(plan.spec.layers)} layers, recipe {plan.recipe.name}", ""]
    lines += [f"{'file':<28}{'tensors':>9}{'bytes':>18}"]
    for shard in plan.shards:
        lines.append(f"{shard.layout.file:<28}{len(shard.layout.entries):>9,}{shard.layout.nbytes:>18,}")
    lines += ["", f"{'role':<18}{'part':<10}{'from':<9}{'to':<9}{'tensors':>9}{'bytes':>18}"]
    for row in report.plan_rows(plan):
        lines.append(
            f"{row['role']:<18}{row['part']:<10}{row['from']:<9}{row['to']:<9}{row['tensors']:>9,}{row['nbytes']:>18,}"
        )
    lines += [f"note: {note}" for note in report.plan_notes(plan)]
    lines += [f"dropped: {name}" for name in plan.dropped]
    total = sum(shard.layout.nbytes for shard in plan.shards)
    return "\n".join([*lines, "", f"{plan.tensor_bytes:,} bytes of tensors, {total:,} bytes of shards"])


def main() -> None:
    """Entry point."""
    run_program(app)


if __name__ == "__main__":
    main()
