"""What a card can do at most, and what copies and kernels make of it, at the sizes of Qwen3.6-35B-A3B.

The ceiling of a kernel is what memory and arithmetic leave it: the longer of the time to move its bytes and the time of
its operations. Its outputs are held against those of the CPU's kernels.
"""

from collections.abc import Mapping
from functools import partial
from math import ceil

import torch
from torch import Tensor

from bench.shape import model_config
from device.card import Card, attempt
from device.lines import Report
from device.workloads import FLOAT32, TENSOR_CORES, Sizes, Workload, workloads
from mosaic.format import architectures
from mosaic.format.layout import CONFIG_FILE
from mosaic.format.spec import ModelSpec
from mosaic.runtime.device import Device
from mosaic.runtime.device.host import HostDevice
from mosaic.runtime.experts.expert_slots import expert_slots

MEMORY = "memory"
COPIED = 256 << 20  # bytes of a copy
EXPERT = 3 << 20  # bytes of one expert
SIDE = 8192  # of the square matrices that show the ceiling of arithmetic
CACHES = 4  # so many times what the card's cache holds is used in turn: as in a model, nothing is there already
MOST_COPIES = 512
# Of the largest output. Both compute in float32, in other orders: at these sizes the CPU's kernels are off from float64
# by 9e-7 at most, in small ones by 6e-7 from the GPU's in triton's interpreter. What is wrong is so by about its size.
FLOAT32_ERROR = 1e-4
MOST_SHARE = 1.25  # of a ceiling: reading alone may be some faster than copying; more was measured wrongly

TINY = {
    "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
}  # fmt: skip
TINY_SIZES = Sizes(few=2, tokens=80, before=70, long=130, rows=128)

Ceilings = Mapping[str, float]  # bytes or operations per second, by what does it


def run(card: Card, report: Report) -> None:
    """All of it."""
    shrink = 256 if card.rehearsed else 1
    device = card.device()
    ceilings = _ceilings(card, device, report, COPIED // shrink, SIDE // shrink)
    _copies(card, device, report, COPIED // shrink)
    spec = true_spec(TINY if card.rehearsed else {})
    _expert(device, report, spec)
    del device
    for workload in workloads(spec, TINY_SIZES if card.rehearsed else Sizes()):
        with attempt(card, report, workload.what):
            _measure(card, report, workload, ceilings)


def true_spec(sizes: Mapping[str, int]) -> ModelSpec:
    """Of the 35B, with one layer, attention."""
    config = model_config(1, 512, dict(sizes))
    return architectures.find(config, CONFIG_FILE).parse(config, CONFIG_FILE)


def _ceilings(card: Card, device: Device, report: Report, nbytes: int, side: int) -> Ceilings:
    source, target = (torch.zeros(4 * nbytes, dtype=torch.uint8, device=device.place) for _ in range(2))
    found = {MEMORY: 2 * source.nbytes / card.seconds(lambda: target.copy_(source))}
    report.add("copy within the card's memory, read and written", found[MEMORY] / 1e9, "GB/s")
    for unit, kind in ((TENSOR_CORES, torch.float16), (FLOAT32, torch.float32)):
        one, other = (torch.randn(side, side, device=device.place).to(kind) for _ in range(2))
        found[unit] = 2 * side**3 / card.seconds(lambda one=one, other=other: one @ other)
        report.add(f"product of {kind} matrices by torch", found[unit] / 1e12, "TFLOP/s")
    return found


def _copies(card: Card, device: Device, report: Report, nbytes: int) -> None:
    """Between host and card: large pieces, and experts as they are promoted."""
    there, pinned = torch.zeros(nbytes, dtype=torch.uint8, device=device.place), device.staging(nbytes).random_(256)
    plain = torch.zeros(nbytes, dtype=torch.uint8)
    upload = nbytes / card.seconds(lambda: there.copy_(pinned, non_blocking=True))
    report.add("copy to the card, pinned", upload / 1e9, "GB/s")
    for what, target, source in (
        ("copy from the card, pinned", pinned, there),
        ("copy to the card, pageable", there, plain),
        ("copy from the card, pageable", plain, there),
    ):
        seconds = card.seconds(lambda target=target, source=source: target.copy_(source, non_blocking=True))
        report.add(what, nbytes / seconds / 1e9, "GB/s", nbytes / seconds / upload)
    expert = min(EXPERT, nbytes)
    parts = [slice(first, first + expert) for first in range(0, nbytes - expert + 1, expert)]
    there.zero_()

    def promote() -> None:
        fences = [device.upload(pinned[part], there[part], device.fence()) for part in parts]
        device.follow(fences[-1])

    speed = len(parts) * expert / card.seconds(promote)
    right = torch.equal(device.fetch(there[: parts[-1].stop])[0], pinned[: parts[-1].stop])
    report.add("experts to the card, beside its work", speed / 1e9, "GB/s", speed / upload, right)


def _expert(device: Device, report: Report, spec: ModelSpec) -> None:
    """What a tier decides by."""
    sizes = spec.hidden_size, spec.moe.intermediate_size
    held = expert_slots(partial(device.memory.empty, "measured"), 4 * spec.moe.top_k, *sizes, torch.bfloat16)
    held.codes.zero_()
    held.scales.zero_()
    for what, seconds in zip(("copied into its slot", "computed for a token"), device.measure(held), strict=True):
        report.add(f"an expert {what}, as loading measures it", seconds * 1e6, "us")


def _measure(card: Card, report: Report, workload: Workload, ceilings: Ceilings) -> None:
    """Median over as many places as the cache cannot hold, one after the other."""
    device = card.device()
    copies = min(ceil(CACHES * card.cache / workload.nbytes), MOST_COPIES)
    with torch.inference_mode():
        runs = workload.make(device, copies)
        [expected] = [made() for made in workload.make(HostDevice(), 1)]
        error = _error(device.fetch(runs[0]())[0], expected)

        def all_of_them() -> None:
            for each in runs:
                each()

        seconds = card.seconds(card.recorded(all_of_them)) / copies
    times = {MEMORY: workload.nbytes / ceilings[MEMORY], workload.unit: workload.operations / ceilings[workload.unit]}
    limit = max(times, key=lambda name: times[name])
    share = times[limit] / seconds
    amount, unit = (workload.nbytes / 1e9, "GB/s") if limit == MEMORY else (workload.operations / 1e12, "TFLOP/s")
    sound = error <= FLOAT32_ERROR and (card.rehearsed or share <= MOST_SHARE)
    note = f"{seconds * 1e6:,.1f} us, limit {limit}, off by {error:.0e}"
    report.add(workload.what, amount / seconds, unit, share, sound, note)


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest, of the largest output; infinite where one is not finite."""
    worst = float((found - expected).abs().max() / expected.abs().max())
    return worst if worst == worst else float("inf")
