"""What mosaic-bench --simulate prints: what can be expected of a machine that is not here. Reads no weight."""

import json
import sys
from pathlib import Path

from mosaic.format.errors import InputError
from mosaic.runtime import hardware
from mosaic.runtime.experts.trace import Trace, read_trace
from mosaic.runtime.hardware import Hardware
from mosaic.runtime.simulator import FOLDER
from mosaic.runtime.simulator.budget import make_budget
from mosaic.runtime.simulator.report import Outcomes, outcome_dict, outcome_lines, table
from mosaic.runtime.simulator.simulation import simulate, warm_up
from mosaic.runtime.simulator.sizes import ModelSizes, published, sizes_of
from mosaic.runtime.sizes import ARENA, format_size

GIB = 1 << 30
BUNDLED = FOLDER / "synthetic-35b.trace"  # python tests/bench/routing.py synthetic-35b.trace --tokens 800 --seed 0
ARENAS = (GIB, 2 * GIB, ARENA, 4 * GIB, 6 * GIB)  # shown side by side


def print_known() -> None:
    """The hardware profiles that come with Mosaic."""
    for name in hardware.known():
        print(f"{name:<20}{hardware.load(name).title}")


def print_simulation(
    profile: str, file: Path | None, folder: Path | None, vram: int | None, ram: int | None, as_json: bool
) -> None:
    """Simulate a trace, or the bundled one, of the model in a folder, or of Qwen3.6-35B-A3B. Sizes in bytes."""
    machine = hardware.load(profile)
    sizes = sizes_in(folder) if folder else published()
    trace = trace_of(file, sizes, has_folder=folder is not None)
    chosen, outcomes = run(trace, machine, sizes, vram, ram)
    lines = [
        machine.title,
        f"{sizes.model}: {sizes.num_experts:,} experts of {sizes.expert:,} bytes; {sizes.context:,} tokens of context",
        f"routing: {trace.header.model}{'' if file else ', bundled with Mosaic: not recorded from a model'}; "
        f"{len(trace.experts):,} tokens, of which {warm_up(trace):,} only fill the caches",
        *outcome_lines(outcomes[chosen], chosen),
        *(table(outcomes) if chosen else []),
    ]
    print("\n".join(lines))
    if as_json:
        about = {
            "profile": profile,
            "hardware": machine.title,
            "model": sizes.model,
            "trace": str(file) if file else None,
            "routing": trace.header.model,
            "context": sizes.context,
            **outcome_dict(chosen, outcomes[chosen]),
            "budgets": [outcome_dict(*each) for each in outcomes.items()],
        }
        print(json.dumps(about))


def sizes_in(folder: Path) -> ModelSizes:
    """Of a model directory; InputError if it has no experts."""
    from mosaic.runtime.experts.places import ExpertPlaces
    from mosaic.runtime.weights import Weights

    weights = Weights(folder)
    places = ExpertPlaces(weights)
    if not len(places):
        raise InputError("a model without experts", file=folder, remedy="simulate a mixture of experts")
    return sizes_of(weights, max(places[key].nbytes for key in places))


def trace_of(file: Path | None, sizes: ModelSizes, *, has_folder: bool) -> Trace:
    """The trace to replay; InputError unless it is of a model of this shape and has tokens."""
    trace, moe = read_trace(file or BUNDLED), sizes.spec.moe
    found = trace.header.layers, trace.header.num_experts, trace.header.top_k
    expected = sizes.expert_layers, moe.num_experts, moe.top_k
    if found != expected:
        raise InputError(
            "a trace of another model" if file else "no routing of this model comes with Mosaic",
            file=file,
            found=_shape(*found),
            expected=_shape(*expected),
            remedy="record one with mosaic-run --record-routing, and name it with --trace"
            if has_folder
            else "name the model directory that it was recorded from, too",
        )
    if not len(trace.experts):
        raise InputError("a trace without tokens", file=file, remedy="record a longer one")
    return trace


def run(trace: Trace, machine: Hardware, sizes: ModelSizes, vram: int | None, ram: int | None) -> tuple[int, Outcomes]:
    """The bytes of VRAM that were chosen, and what comes of them and of others that this machine can have."""
    if not machine.gpu:
        if vram is not None:
            expected, remedy = "no --vram", "leave it out, or choose another profile"
            raise InputError("this machine has no VRAM", found=format_size(vram), expected=expected, remedy=remedy)
        return 0, {0: simulate(trace, machine, sizes, make_budget(machine, sizes, 0, ram))}
    chosen = ARENA if vram is None else vram
    budgets = {chosen: make_budget(machine, sizes, chosen, ram)}
    for arena in ARENAS:
        try:
            budgets[arena] = make_budget(machine, sizes, arena, ram)
        except InputError as error:
            print(f"note: {format_size(arena)} of VRAM left out: {error.problem}", file=sys.stderr)
    outcomes: Outcomes = {}
    for arena, budget in sorted(budgets.items()):
        print(f"simulating with {format_size(arena)} of VRAM for experts", file=sys.stderr)
        outcomes[arena] = simulate(trace, machine, sizes, budget)
    return chosen, outcomes


def _shape(layers: tuple[int, ...], experts: int, top_k: int) -> str:
    return f"{len(layers)} layers, {layers[0]} to {layers[-1]}, of {experts} experts, top {top_k}"
