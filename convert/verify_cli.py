"""mosaic-verify: every invariant of docs/FORMAT.md, or one engine's loading rules, checked on a directory."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mosaic.convert.engine_files import Engine
from mosaic.convert.engines import check_for
from mosaic.convert.verify import Result, verify_showing_progress
from mosaic.format.errors import EXIT_CHECK_FAILED, InputError
from mosaic.format.program import Version, run_program
from mosaic.recipes import demo_model

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def command(
    out: Annotated[
        Path | None,
        typer.Argument(metavar="OUT", help="Model directory of mosaic-convert; with --for any checkpoint directory."),
    ] = None,
    engine: Annotated[
        Engine | None,
        typer.Option("--for", help="Check this engine's loading rules instead: headers only, quick, any checkpoint."),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Check the embedded demo model instead of OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
    version: Version = False,
) -> None:
    """Check every numbered invariant of docs/FORMAT.md: sizes, checksums, order, numbers, index.

    With --for: whether vLLM, SGLang or transformers can load OUT faithfully, as far as that can be told from its
    headers (docs/SERVING.md).

    Exit code 0: all hold; 1: one does not; 2: not a model directory (with --for: not a checkpoint directory).
    """
    if demo == (out is not None):
        raise InputError(
            "what to check is not clear",
            found="OUT and --demo together" if demo else "neither OUT nor --demo",
            expected="one of them",
            remedy="see mosaic-verify --help",
        )
    folder = out or demo_model()
    results: Sequence[Result]
    if engine:
        results, verdict = check_for(engine, folder), f"{folder} breaks a loading rule of {engine}"
    else:
        results, verdict = verify_showing_progress(folder), f"{folder} is damaged"
    sound = all(result.holds for result in results)
    if as_json:
        print(json.dumps({"sound": sound, "invariants": [asdict(result) for result in results]}))
    else:
        for result in results:
            print(result.text())
    if not sound:
        print(verdict, file=sys.stderr)
        sys.exit(EXIT_CHECK_FAILED)


def main() -> None:
    """Entry point."""
    run_program(app)


if __name__ == "__main__":
    main()
