"""mosaic-verify: every invariant of docs/FORMAT.md, checked on a model directory."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from mosaic.convert.verify import verify
from mosaic.format.errors import EXIT_CHECK_FAILED, InputError, run_program
from mosaic.recipes import demo_model

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def command(
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Model directory of mosaic-convert.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Check the embedded demo model instead of OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
) -> None:
    """Check every numbered invariant of docs/FORMAT.md: sizes, checksums, order, numbers, index.

    Exit code 0: all hold; 1: one does not; 2: not a model directory.
    """
    if demo == (out is not None):
        raise InputError(
            "what to check is not clear",
            found="OUT and --demo together" if demo else "neither OUT nor --demo",
            expected="one of them",
            remedy="see mosaic-verify --help",
        )
    folder = out or demo_model()
    with tqdm(unit="B", unit_scale=True, disable=None, desc="verify", leave=False) as bar:
        results = verify(folder, bar.update)
    sound = all(result.holds for result in results)
    if as_json:
        print(json.dumps({"sound": sound, "invariants": [asdict(result) for result in results]}))
    else:
        for result in results:
            state = "ok" if result.holds else "FAILED" if result.checked else "not checked"
            print(f"{result.invariant:<4} {state:<12} {result.title}")
            for failure in result.failures:
                print("     " + failure.replace("\n", "\n     "))
    if not sound:
        print(f"{folder} is damaged", file=sys.stderr)
        sys.exit(EXIT_CHECK_FAILED)


def main() -> None:
    """Entry point."""
    run_program(app)


if __name__ == "__main__":
    main()
