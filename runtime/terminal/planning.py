"""mosaic-run --plan: where the memory of a run would go, and the speed to expect. Loads no weights."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from mosaic.format.catalog import read_catalog


def show_plan(
    folder: Path,
    kv: str,
    *,
    context: int | None,
    ram: int | None,
    state_budget: int | None,
    threads: int | None,
    device: str,
    vram: int | None,
    gpu_layers: int | None,
    as_json: bool,
) -> None:
    """Print the plan. Sizes in bytes. InputError if there is none."""
    # As much of the program as a run has in memory:
    from mosaic.runtime import engine  # noqa: F401
    from mosaic.runtime.device.choice import choose_device
    from mosaic.runtime.kv import KVFormat
    from mosaic.runtime.loading import Loading
    from mosaic.runtime.machine import cores
    from mosaic.runtime.ops.choice import OpsName, make_ops, option
    from mosaic.runtime.plan_text import expectations, plan_dict, plan_lines
    from mosaic.runtime.speeds import known_speeds, speeds
    from mosaic.runtime.terminal import asking, chat, one_shot, progress, session  # noqa: F401
    from mosaic.runtime.tokenizer import Tokenizer
    from mosaic.runtime.tuned import known_tuning, settle_threads
    from mosaic.runtime.wishes import VramWishes

    kv_format, ops = option("kv", kv, KVFormat), make_ops(OpsName.CPU, threads=threads)
    wishes = VramWishes(vram, gpu_layers)
    chosen = choose_device(device, used=wishes != VramWishes())
    tuned = settle_threads(ops, threads, known_tuning(read_catalog(folder), chosen.name))
    loading = Loading(
        folder, kv_format, context=context, ram=ram, state_budget=state_budget,
        chosen=chosen, vram=wishes, tuned=tuned,
    )  # fmt: skip
    needed = Tokenizer(folder), ops  # they take memory that is planned for
    count = threads or tuned.threads or cores()
    if not known_speeds(*loading.spans, count):
        print("measuring memory and disk, once for so many threads ...", file=sys.stderr)
    found = speeds(*loading.spans, count)
    dense = sum(info.nbytes for info in loading.weights.dense().values())
    plan, vram_plan = loading.plans
    expected = {}
    if not vram_plan:  # what a GPU makes of it, mosaic-bench --simulate foresees
        expected = expectations(plan, loading.places, len(loading.weights.spec.layers), dense, found)
    if as_json:
        print(
            json.dumps(
                {
                    **plan_dict(plan, expected, found, vram_plan),
                    "no_gpu": chosen.why or None,
                    "tuned": asdict(loading.tuned),
                }
            )
        )
    else:
        print(*plan_lines(plan, expected, found, vram_plan), sep="\n")
        if chosen.why:
            print(f"no GPU is used: {chosen.why}")
        if str(loading.tuned):
            print(f"tuned: {loading.tuned}")
    del needed
