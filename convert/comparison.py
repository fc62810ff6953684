"""What a comparison of two model directories comes to: a value for JSON, and the same as text."""

from collections.abc import Callable
from typing import Any

from mosaic.convert import report_tables
from mosaic.convert.compare import Model, Pair, pairs, shared
from mosaic.convert.sums import decibels, relative

COMPARISON_VERSION = 1
SHOWN = 5  # names of a list


def compare(one: Model, other: Model, workers: int, progress: Callable[[int], object]) -> dict[str, Any]:
    """Every tensor of two directories; errors are those of `other` against `one`."""
    both = set(shared(one, other))
    entries = [_entry(pair) for pair in pairs(one, other, workers, progress)]
    lists = {
        "only_in_first": [spec.name for key, spec in one.contract.items() if key not in other.contract],
        "only_in_second": [spec.name for key, spec in other.contract.items() if key not in one.contract],
        "of_other_shape": [
            spec.name for key, spec in other.contract.items() if key in one.contract and key not in both
        ],
    }
    identical = not any(lists.values()) and all(entry["equal"] for entry in entries)
    return {
        "version": COMPARISON_VERSION,
        "identical": identical,
        **lists,
        "summary": _summary(entries),
        "tensors": entries,
    }


def _entry(pair: Pair) -> dict[str, Any]:
    spec = pair.second.spec
    entry: dict[str, Any] = {
        "name": spec.name,
        "role": spec.role,
        "part": spec.part,
        "layer": spec.layer,
        "expert": spec.expert,
        "shape": list(spec.shape),
        "dtypes": [pair.first.weight.dtype, pair.second.weight.dtype],
        "equal": pair.equal,
    }
    if not pair.equal:
        entry |= {
            "relative_l2": pair.sums.relative_l2,
            "sqnr_db": pair.sums.sqnr_db,
            "max_abs_error": pair.sums.max_abs_error,
            "signal": pair.sums.signal,
            "noise": pair.sums.noise,
            "not_numbers": pair.sums.nonfinite + pair.incomparable,
        }
    return entry


def _summary(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per role and part."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault((entry["role"], entry["part"]), []).append(entry)
    rows = []
    for (role, part), members in groups.items():
        different = [member for member in members if not member["equal"]]
        row = {"role": role, "part": part, "tensors": len(members), "equal": len(members) - len(different)}
        if different:
            signal, noise = (sum(member[key] for member in different) for key in ("signal", "noise"))
            row |= {
                "same_values": sum(member["noise"] == 0 for member in different),
                "relative_l2": relative(signal, noise),
                "sqnr_db": decibels(signal, noise),
                "max_abs_error": max(member["max_abs_error"] for member in different),
                "not_numbers": sum(member["not_numbers"] for member in different),
            }
        rows.append(row)
    return rows


def text(result: dict[str, Any], count: int) -> str:
    """A table by class, the `count` most different tensors, what only one side has, the verdict."""
    head = ["role", "part", "tensors", "same bytes", "same values", "SQNR dB", "rel. L2", "max difference"]
    lines = [head]
    for row in result["summary"]:
        cells = [row["role"], row["part"], f"{row['tensors']:,}", f"{row['equal']:,}"]
        if "sqnr_db" in row:
            cells += [f"{row['same_values']:,}", *_errors(row)]
        lines.append(cells + [""] * (len(head) - len(cells)))
    blocks = [report_tables.aligned(lines, left=(0, 1))]
    different = [entry for entry in result["tensors"] if not entry["equal"] and entry["noise"]]
    if different:
        different.sort(key=lambda entry: float("-inf") if entry["sqnr_db"] is None else entry["sqnr_db"])
        worst = [["SQNR dB", "rel. L2", "max difference", "dtypes", "most different"]]
        for entry in different[:count]:
            worst.append([*_errors(entry), " ".join(entry["dtypes"]), report_tables.printable(entry["name"])])
        blocks.append(report_tables.aligned(worst, left=(3, 4)))
    blocks += [
        f"{title}: {len(names)} tensors: {', '.join(report_tables.printable(name) for name in names[:SHOWN])}"
        + (", …" if len(names) > SHOWN else "")
        for title, names in (
            ("only in the first", result["only_in_first"]),
            ("only in the second", result["only_in_second"]),
            ("of another shape", result["of_other_shape"]),
        )
        if names
    ]
    if bad := sum(row.get("not_numbers", 0) for row in result["summary"]):
        blocks.append(f"{bad:,} weights are not numbers in one of the two; they are left out of the errors")
    same = sum(row["equal"] for row in result["summary"])
    verdict = f"not identical: {same:,} of {len(result['tensors']):,} tensors have the same bytes"
    blocks.append("identical: every tensor has the same bytes" if result["identical"] else verdict)
    return "\n\n".join(blocks)


def _errors(row: dict[str, Any]) -> list[str]:
    decibel = row["sqnr_db"]
    exact = "" if row["noise" if "noise" in row else "max_abs_error"] else "exact"
    return [
        f"{decibel:.2f}" if decibel is not None else exact,
        report_tables.relative(row["relative_l2"]),
        report_tables.number(row["max_abs_error"]),
    ]
