"""mosaic-run --tune: finds the settings with which a model is fastest here, shows them and keeps them."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mosaic.format.catalog import read_catalog
from mosaic.format.errors import InputError
from mosaic.recipes import SAMPLE_TEXT, cache_folder
from mosaic.runtime.options import THREADS_VARIABLE
from mosaic.runtime.terminal.one_shot import INTERRUPTED

if TYPE_CHECKING:
    from mosaic.runtime.loading import Loading
    from mosaic.runtime.tuned import Tuned
    from mosaic.runtime.tuning import Found
    from mosaic.runtime.wishes import VramWishes

CHARACTERS = 8  # of a text, at most, that have a token among them


@contextmanager
def _stoppable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        _note("stopped: nothing was kept")
        raise typer.Exit(INTERRUPTED) from None


@_stoppable()
def tune(
    folder: Path,
    kv: str,
    *,
    context: int | None,
    ram: int | None,
    state_budget: int | None,
    activations: str,
    threads: int | None,
    device: str,
    vram: int | None,
    gpu_layers: int | None,
    as_json: bool,
) -> None:
    """Measure for a minute at most, print what was found and keep it. What is given is not tuned. Sizes in bytes.

    InputError, before anything is loaded, if there is nothing to tune or no place to keep it. Ends with 130 after
    Ctrl-C.
    """
    from mosaic.runtime.device.choice import choose_device
    from mosaic.runtime.kept import try_to_keep
    from mosaic.runtime.kv import KVFormat
    from mosaic.runtime.loading import Loading
    from mosaic.runtime.ops.choice import Activations, OpsName, make_ops, option
    from mosaic.runtime.ops.cpu import CpuOps
    from mosaic.runtime.terminal.progress import loading_bars
    from mosaic.runtime.tokenizer import Tokenizer
    from mosaic.runtime.tuned import TITLES, TUNED_FILE, keep_tuning, known_tuning, settle_threads, shown
    from mosaic.runtime.tuning import SECONDS, Climb
    from mosaic.runtime.tuning_trials import LONGEST_PROMPT, Rig
    from mosaic.runtime.wishes import VramWishes

    kv_format, multiplied = option("kv", kv, KVFormat), option("activations", activations, Activations)
    ops, wishes = make_ops(OpsName.CPU, multiplied, threads), VramWishes(vram, gpu_layers)
    with _keeping():
        try_to_keep(TUNED_FILE)
    find = partial(choose_device, device, used=wishes != VramWishes())
    chosen, catalog, tokenizer = find(), read_catalog(folder), Tokenizer(folder)
    name, known = chosen.name, known_tuning(catalog, chosen.name)
    loading = Loading(
        folder, kv_format, context=context, ram=ram, state_budget=state_budget, chosen=chosen, vram=wishes,
        tuned=settle_threads(ops, threads, known),
    )  # fmt: skip
    del chosen  # the rig lets go of the device to take it anew
    tokens = tokenizer.encode(SAMPLE_TEXT.read_text(encoding="utf-8")[: CHARACTERS * LONGEST_PROMPT])
    if not loading.plans[1]:
        _refuse_without_choice(threads, "--device cpu" if device == "cpu" else "no GPU that helps")
    with loading_bars() as progress:
        rig = Rig(loading, wishes, lambda: CpuOps(multiplied), find, tokens, progress)
    start = time.monotonic()
    pace = rig.write(min(tokenizer.num_tokens, catalog.spec.vocab_size))
    _note(f"{1 / pace:.2f} tok/s as it is")
    held = {"threads"} if threads else set[str]()
    if wishes != VramWishes():
        held.add("vram")
    knobs = rig.knobs(held)
    if not knobs:
        given = " beside --vram, --gpu-layers" if "vram" in held else ""
        _refuse_without_choice(threads, f"a GPU with nothing to choose{given}")
    climb = Climb(
        knobs, rig.settings, start + SECONDS,
        told=lambda knob, value, cost: _note(f"{TITLES[knob.name]} {shown(knob.name, value)}: {1 / cost:.2f} tok/s"),
    )  # fmt: skip
    climb.run()
    seconds = time.monotonic() - start
    tuned = _settled(known, climb.found, rig.loading, wishes)
    if as_json:
        settings = {name: {**asdict(found), **_speeds(found)} for name, found in climb.found.items()}
        about = {"model": str(folder), "device": name, "seconds": seconds, "decode_tok_s": 1 / pace}
        print(json.dumps({**about, "settings": settings, "tuned": asdict(tuned)}))
    else:
        print(*_table(climb.found, seconds), sep="\n")
    with _keeping():
        _note(f"kept in {keep_tuning(catalog, name, tuned)}")


def _settled(known: "Tuned", found: "dict[str, Found]", loading: "Loading", wishes: "VramWishes") -> "Tuned":
    """What was known, and in its place what was compared; of slots also beside what they were found."""
    compared: dict[str, int | None] = {name: one.after for name, one in found.items() if one.cost is not None}
    plan = loading.plans[1]
    if plan and "vram" in compared and (beside := loading.vram_plan(replace(wishes, slots_nbytes=compared["vram"]))):
        compared |= {"vram_budget": plan.budget, "layers": beside.layers}
    return replace(known, **compared)


def _refuse_without_choice(threads: int | None, beside: str) -> None:
    """InputError if there is but one number of threads to choose from, where `beside` them nothing can be chosen."""
    from mosaic.runtime.machine import cores

    if cores() == 1:
        found, remedy = "one core", "none is needed: run it as it is"
    elif threads and os.environ.get(THREADS_VARIABLE) == str(threads):
        found, remedy = f"{THREADS_VARIABLE}={threads}", f"unset {THREADS_VARIABLE}"
    elif threads:
        found, remedy = f"--threads {threads}", "leave --threads out"
    else:
        return
    expected = "a choice of threads, or of what lies on a GPU"
    raise InputError("nothing is left to tune", found=f"{found}, and {beside}", expected=expected, remedy=remedy)


@contextmanager
def _keeping() -> Iterator[None]:
    """Makes an InputError of what the cache folder refuses."""
    from mosaic.runtime.tuned import TUNED_FILE

    folder, problem, remedy = cache_folder(), "what is tuned cannot be kept", "set XDG_CACHE_HOME to another folder"
    try:
        yield
    except IsADirectoryError as error:
        remedy = f"remove it, or {remedy}"
        raise InputError(
            problem, file=folder / TUNED_FILE, found="a folder", expected="a file", remedy=remedy
        ) from error
    except OSError as error:
        expected = "a folder that can be written to"
        raise InputError(problem, file=folder, found=error.strerror, expected=expected, remedy=remedy) from error


def _table(found: "dict[str, Found]", seconds: float) -> list[str]:
    """For a person."""
    from mosaic.runtime.tuned import TITLES, shown

    lines = [f"{'setting':<24}{'before':>12}{'after':>12}{'tok/s before':>16}{'after':>12}"]
    for name, one in found.items():
        speeds = (f"{speed:.2f}" if speed else "-" for speed in _speeds(one).values())
        before, after = (f"{speed:>{width}}" for speed, width in zip(speeds, (16, 12), strict=True))
        line = f"{TITLES[name]:<24}{shown(name, one.before):>12}{shown(name, one.after):>12}{before}{after}"
        doubt = "" if one.doubted is None else f"  kept: {shown(name, one.doubted)} is too close to noise"
        lines.append(line + doubt)
    left = [TITLES[name] for name, one in found.items() if not one.finished]
    lines.append(f"in {seconds:.0f} s" + (f"; no time was left for more of: {', '.join(left)}" if left else ""))
    return lines


def _speeds(found: "Found") -> dict[str, float | None]:
    """Tokens per second, of the work that a setting is for."""
    before = 1 / found.cost if found.cost else None
    return {"tok_s_before": before, "tok_s_after": before and before * found.gain}


def _note(text: str) -> None:
    print(text, file=sys.stderr)
