"""What mosaic-bench OUT prints: the speeds of a model directory here, and what lay where meanwhile."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mosaic.format.catalog import read_catalog
from mosaic.runtime import machine, options
from mosaic.runtime.bench import SHORT_PROMPT, Measurement, run_tests
from mosaic.runtime.device.choice import device_beside
from mosaic.runtime.kv import KVFormat
from mosaic.runtime.loading import Loading, LoadOptions
from mosaic.runtime.ops.choice import Activations, OpsName, make_ops, option
from mosaic.runtime.ops.cpu import isa
from mosaic.runtime.sizes import format_size
from mosaic.runtime.tuned import known_tuning, settle_threads
from mosaic.runtime.wishes import VramWishes

CEILING_SECONDS = 1.0

Figures = dict[str, float | int | str | None]


def print_measurement(
    out: Path | None,
    *,
    prompts: Sequence[int],
    generate: Sequence[int],
    repetitions: int,
    threads: int | None,
    ops: str,
    activations: str,
    ram: int | None,
    kv: str,
    device: str,
    vram: VramWishes,
    as_json: bool,
) -> None:
    """Measure a model directory, or the demo, at each size. Sizes in tokens and bytes."""
    kv_format = option("kv", kv, KVFormat)
    chosen = make_ops(option("ops", ops, OpsName), option("activations", activations, Activations), threads)
    beside = device_beside(chosen, device, used=vram != VramWishes())
    folder = options.model_folder(out)
    needed = max(*prompts, SHORT_PROMPT + max(generate))  # run_tests tells what is too much for the model
    catalog = read_catalog(folder)
    context = min(needed, catalog.spec.max_position_embeddings)
    tuned = settle_threads(chosen, threads, known_tuning(catalog, beside.name))
    count = threads or tuned.threads or machine.cores()
    loading = Loading(folder, kv_format, context=context, ram=ram, chosen=beside, vram=vram, tuned=tuned)
    loaded = loading.load(chosen, LoadOptions())
    model = loaded.model
    tests = run_tests(loaded, loading.piece, prompts, generate, repetitions, _note)
    traffic = loaded.traffic()
    peak = machine.peak_rss()  # before the ceiling takes memory of its own
    _note("measuring the read ceiling")
    ceiling = machine.read_ceiling(CEILING_SECONDS, count) / 1e9
    prefill, decode = (next(test for test in tests if test.kind == kind) for kind in ("prefill", "decode"))
    read = _gb_s(decode, model.nbytes_per_token)
    figures: Figures = {
        "model": str(folder),
        "prompt": prefill.tokens,
        "generate": decode.tokens,
        "repetitions": repetitions,
        "prefill_tok_s": prefill.tok_s,
        "decode_tok_s": decode.tok_s,
        "weight_bytes_per_token": model.nbytes_per_token,
        "decode_gb_s": read,
        "read_ceiling_gb_s": ceiling,
        "read_share": read / ceiling,
        "threads": count,
        "isa": isa(),
        "ops": ops,
        "activations": activations if ops == OpsName.CPU else None,
        "kv": kv,
        "peak_rss_bytes": peak,
        "ram_bytes": loading.plan.budget,
        "expert_slots": loading.plan.slots,
        **_device_figures(loading),
        **traffic.as_dict(),
    }
    print(_table(tests, figures))
    if as_json:
        print(json.dumps({**figures, "tests": [test.as_dict() for test in tests]}))


def _device_figures(loading: Loading) -> Figures:
    """What lies on the device, and what was tuned."""
    device, plan = loading.device, loading.plans[1]
    return {
        "device": device.name if device else None,
        "vram_bytes": plan.items["expert slots"] if plan else None,
        "vram_total_bytes": plan.total if plan else None,
        "device_slots": plan.slots if plan else None,
        "device_layers": plan.layers if plan else None,
        "device_head": plan.head if plan else None,
        "prefill_piece": loading.piece,
        "tuned": str(loading.tuned) or None,
    }


def _table(tests: Sequence[Measurement], figures: Figures) -> str:
    """What a person reads."""
    weight_bytes, ceiling = figures["weight_bytes_per_token"], figures["read_ceiling_gb_s"]
    assert isinstance(weight_bytes, int)
    assert isinstance(ceiling, float)
    with_activations = f", {figures['activations']} activations" if figures["activations"] else ""
    on_device = figures["device"] is not None
    head = f"{'test':<10}{'tok/s':>10}{'min':>10}{'max':>10}{'GB/s':>8}{'of ceiling':>12}"
    lines = [
        f"{figures['model']}: {figures['ops']}{with_activations}, kv {figures['kv']}, "
        f"{figures['threads']} threads, {figures['isa']}",
        head + (f"{'device hits':>13}{'copied':>12}" if on_device else ""),
    ]
    for test in tests:
        line = f"{test.name:<10}{test.tok_s:>10.2f}{min(test.values):>10.2f}{max(test.values):>10.2f}"
        if test.kind == "decode":
            speed = _gb_s(test, weight_bytes)
            line += f"{speed:>8.2f}{speed / ceiling:>12.0%}"
        if on_device:
            copied = format_size(round(test.device_bytes_per_token))
            line = f"{line:<60}{test.device_hits_per_token:>13.1f}{copied:>12}"
        lines.append(line)
    lines.append(
        f"medians of {figures['repetitions']}; {weight_bytes:,} weight bytes per token; "
        f"read ceiling {ceiling:.2f} GB/s; peak memory {figures['peak_rss_bytes']:,} bytes"
    )
    if figures["expert_slots"] is not None:
        lines.append(
            f"{figures['expert_slots']:,} experts in memory; found there, prompts and warm-up included: "
            f"{figures['expert_hit_rate']:.1%}; the others read at {figures['disk_gb_s']:.2f} GB/s"
        )
    if on_device:
        lines.append(
            f"on {figures['device']}: {figures['device_slots']:,} expert slots, {figures['device_layers']} dense "
            f"layers, {'with' if figures['device_head'] else 'without'} the head; prompts in pieces of "
            f"{figures['prefill_piece']:,}; hits and copied bytes are per token"
        )
    if figures["tuned"]:
        lines.append(f"tuned: {figures['tuned']}")
    return "\n".join(lines)


def _gb_s(test: Measurement, nbytes: int) -> float:
    """GB/s of weights, of which a token needs `nbytes`."""
    return test.tok_s * nbytes / 1e9


def _note(text: str) -> None:
    print(text, file=sys.stderr)
