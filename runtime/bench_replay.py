"""What mosaic-bench --replay prints: a routing trace replayed at several sizes of the expert cache. Needs no model."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mosaic.format.errors import InputError
from mosaic.runtime.experts import profile
from mosaic.runtime.experts.replay import Outcome, replay
from mosaic.runtime.experts.trace import Trace, TraceHeader, read_trace

GIB, MIB = 1 << 30, 1 << 20

Results = dict[int, dict[str, Outcome]]  # by slots, by policy


def add_to_profile(file: Path, saved: Path) -> None:
    """Add a trace's uses to a routing profile, which is made if there is none."""
    header, made = read_trace(file).header, profile.from_trace(read_trace(file))
    if saved.exists():
        made += profile.load(saved, header.layers, header.num_experts)
    try:
        made.save(saved)
    except OSError as error:
        expected, remedy = "a file that can be written", "choose another place"
        raise InputError(
            "cannot save a profile", file=saved, found=error.strerror, expected=expected, remedy=remedy
        ) from error


def print_replay(file: Path, slots: Sequence[int], as_json: bool) -> None:
    """Replay a trace at these numbers of slots, or at the default ones."""
    trace = read_trace(file)
    if trace.dropped:
        print(f"note: the last {trace.dropped:,} bytes of {file} are no whole token", file=sys.stderr)
    if not len(trace.experts):
        raise InputError("a trace without tokens", file=file, remedy="record a longer one")
    least, most = slot_range(trace.header)
    for count in slots:
        if not least <= count <= most:
            raise InputError(
                "--slots is not usable with this trace",
                file=file,
                found=f"{count:,}",
                expected=f"{least:,}, twice the top {trace.header.top_k}, to {most:,}",
                remedy="choose another number",
            )
    results: Results = {}
    for count in slots or default_slots(trace.header):
        print(f"replaying with {count:,} slots", file=sys.stderr)
        results[count] = replay(trace, count)
    print(table(trace, results))
    if as_json:
        print(json.dumps(as_dict(file, trace, results)))


def slot_range(header: TraceHeader) -> tuple[int, int]:
    """The fewest slots that can work, and as many as there are experts."""
    least = 2 * header.top_k
    return least, max(least, len(header.layers) * header.num_experts)


def default_slots(header: TraceHeader) -> list[int]:
    """The floor, twice, four times as many and so on, and all."""
    least, most = slot_range(header)
    counts = [max(least, len(header.layers) * header.top_k)]
    while counts[-1] < most:
        counts.append(min(2 * counts[-1], most))
    return counts


def table(trace: Trace, results: Results) -> str:
    """What a person reads."""
    header = trace.header
    names = list(next(iter(results.values())))
    lines = [
        f"{header.model}: {len(trace.experts):,} tokens; {len(header.layers)} layers of {header.num_experts} experts, "
        f"top {header.top_k}, {header.expert_nbytes:,} bytes each",
        f"{'slots':>8}{'GiB':>9}" + "".join(f"{name:>10}{'MiB/token':>11}" for name in names),
    ]
    for slots, outcomes in results.items():
        columns = [f"{each.hit_rate:>10.2%}{each.bytes_per_token / MIB:>11.2f}" for each in outcomes.values()]
        lines.append(f"{slots:>8,}{slots * header.expert_nbytes / GIB:>9.2f}" + "".join(columns))
    return "\n".join(lines)


def as_dict(file: Path, trace: Trace, results: Results) -> dict[str, object]:
    """What a machine reads."""
    header = trace.header
    return {
        "trace": str(file),
        "model": header.model,
        "tokens": len(trace.experts),
        "layers": len(header.layers),
        "num_experts": header.num_experts,
        "top_k": header.top_k,
        "expert_nbytes": header.expert_nbytes,
        "budgets": [
            {
                "slots": slots,
                "bytes": slots * header.expert_nbytes,
                **{
                    name: {"hit_rate": outcome.hit_rate, "bytes_per_token": outcome.bytes_per_token}
                    for name, outcome in outcomes.items()
                },
            }
            for slots, outcomes in results.items()
        ],
    }
