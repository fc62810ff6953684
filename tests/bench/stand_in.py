"""What tiers cost beside the CPU alone, on a device made of RAM: `python tests/bench/stand_in.py OUT`.

The device's operations are the CPU's kernels, so what is between the two times is the tiers' own work: deciding, adding
outputs, and copies of experts, which on a GPU a copy engine makes. The answers go on alike, so that ever more of their
experts lie in slots and ever less is copied.
"""

import time
from pathlib import Path
from typing import Annotated

import typer

from mosaic.format.program import run_program
from mosaic.runtime import Engine
from mosaic.runtime.device.host import HostDevice

PROMPT = "Once upon a time"
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Model directory.")],
    answers: Annotated[int, typer.Option(min=1)] = 12,
    tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 60,
    context: Annotated[int, typer.Option(min=4)] = 512,
) -> None:
    """Milliseconds of a token, in turn, answer after answer of the same text; what was computed and copied there."""
    engines = [Engine.load(out, context=context, device=device) for device in ("cpu", HostDevice())]
    for engine in engines:
        engine.scheduler.stop = frozenset()
    print(f"{'answer':>6}{'CPU ms':>9}{'device ms':>11}{'experts there':>15}{'MB copied':>11}")
    for number in range(answers):
        before = engines[1].scheduler.traffic
        (here, text), (there, same) = (_answer(engine, number, tokens) for engine in engines)
        if text != same:
            raise RuntimeError("the device says something else")
        after = engines[1].scheduler.traffic
        hits = after.device_hits - before.device_hits
        experts = hits + after.hits + after.misses - before.hits - before.misses
        copied = (after.device_bytes - before.device_bytes) / 1e6
        print(f"{number:>6}{here:>9.2f}{there:>11.2f}{hits / experts:>15.0%}{copied:>11.1f}", flush=True)


def _answer(engine: Engine, seed: int, tokens: int) -> tuple[float, list[int]]:
    """Milliseconds of a token, the prompt among them; the tokens."""
    start = time.perf_counter()
    answer = engine.generate(PROMPT, max_tokens=tokens, temperature=1.0, seed=seed)
    return (time.perf_counter() - start) * 1e3 / tokens, [chosen.token for chosen in answer.tokens]


if __name__ == "__main__":
    run_program(app)
