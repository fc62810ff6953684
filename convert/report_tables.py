"""The rows of a report as text: aligned tables for the terminal, and how single numbers are written.

Plain ASCII throughout, whatever a checkpoint calls its tensors.
"""

from collections.abc import Sequence

from mosaic.convert.report_rows import Entry, Survey, worst_tensors
from mosaic.convert.sums import ErrorSums
from mosaic.format.tensors import Part, Role

SHORT: dict[str, str] = {
    Role.ROUTED_EXPERTS: "routed",
    Role.SHARED_EXPERT: "shared",
    Role.DENSE_MLP: "dense",
    Role.ATTENTION: "attn",
    Role.LINEAR_ATTENTION: "linear",
    Role.LM_HEAD: "head",
}
NAMES: dict[str, str] = {
    role: {Role.DENSE_MLP: "dense MLP", Role.LM_HEAD: "LM head"}.get(role, role.replace("_", " ")) for role in Role
}


def by_class(summary: list[Entry]) -> str:
    """The summary of a report; with rule mse also what it gained over amax."""
    head = ["role", "part", "treatment", "tensors", "weights"]
    errors = ["rel. L2", "SQNR dB", "max error", "to zero", "subnormal"]
    searched = any("mse_gain_db" in row for row in summary)
    lines = [head + errors + ["gain dB"] * searched]
    for row in summary:
        measured, gain = "relative_l2" in row, row.get("mse_gain_db")
        cells = [row["role"], row["part"], row["treatment"], f"{row['tensors']:,}", f"{row['weights']:,}"]
        if measured:
            decibels = "exact" if row["sqnr_db"] is None else f"{row['sqnr_db']:.2f}"
            cells += [relative(row["relative_l2"]), decibels, number(row["max_abs_error"]), share(row["zeroed_share"])]
        else:
            cells += ["", "as is", "", ""]
        cells.append(share(row.get("subnormal_share")))
        lines.append(cells + [f"{gain:.3f}" if gain is not None else ""] * searched)
    return aligned(lines, left=(0, 1, 2))


def by_layer(report: Entry) -> str:
    """One line per layer: SQNR in dB per class, shares of subnormal and zero codes, range of the scales."""
    lines = by_layer_cells(Survey(report), SHORT)
    return aligned(lines, left=(0,)) if len(lines) > 1 else "no tensor is stored as E4M3"


def by_layer_cells(survey: Survey, names: dict[str, str]) -> list[list[str]]:
    """The table by layer, heading first, roles called by `names`."""
    roles = [names.get(role, role) for role in survey.roles]
    lines = [["layer", *roles, "subnormal", "zero", "scale min", "scale max"]]
    for place in survey.places:
        cells = [sqnr(place.roles[role].error) if role in place.roles else "" for role in survey.roles]
        cells += [share(place.total.subnormal_share), share(place.total.zero_share)]
        low, high = place.total.scale_range or (None, None)
        lines.append([place.label, *cells, number(low), number(high)])
    return lines


def worst(report: Entry, count: int = 10) -> str:
    """The tensors with the lowest SQNR, one line each, the lowest first; the long names stand last."""
    lines = [[*cells, name] for name, *cells in worst_cells(report, count)]
    return aligned(lines, left=(4, 5)) if len(lines) > 1 else "no measured tensor differs from its source"


def worst_cells(report: Entry, count: int) -> list[list[str]]:
    """The table of the worst tensors, heading first."""
    lines = [["tensor", "SQNR dB", "rel. L2", "max error", "to zero", "shape"]]
    for entry in worst_tensors(report, count):
        shape = "x".join(map(str, entry["shape"]))
        error = [f"{entry['sqnr_db']:.2f}", relative(entry["relative_l2"]), number(entry["max_abs_error"])]
        lines.append([printable(entry["name"]), *error, share(entry["zeroed_share"]), shape])
    return lines


def class_name(role: str, part: str) -> str:
    """A class in words; with its part where the role does not tell."""
    final = role == Role.NORM and part == Part.OUTSIDE
    return f"{'final ' if final else ''}{NAMES.get(role, role)}{' (MTP)' if part == Part.MTP else ''}"


def sqnr(error: ErrorSums | None) -> str:
    """SQNR in dB: `exact` without noise, `as is` where nothing was measured."""
    if error is None:
        return "as is"
    return "exact" if error.sqnr_db is None else f"{error.sqnr_db:.2f}"


def relative(value: float | None) -> str:
    """A relative error in percent; empty if there is none."""
    return "" if value is None else f"{value:.2%}"


def share(value: float | None) -> str:
    """A share of weights in percent, of any size; empty if there is none."""
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.4%}" if value >= 1e-6 else "<0.0001%"


def number(value: float | None) -> str:
    """A value of any magnitude, three digits; empty if there is none."""
    return "" if value is None else f"{value:.2e}"


def printable(name: str) -> str:
    """A name in ASCII: what could confuse a terminal or a reader stands as an escape."""
    return ascii(name)[1:-1]


def aligned(lines: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """Columns two spaces apart, those of `left` left-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pads = ["<" if column in left else ">" for column in range(len(widths))]
    return "\n".join(
        "  ".join(f"{cell:{pad}{width}}" for cell, pad, width in zip(line, pads, widths, strict=True)).rstrip()
        for line in lines
    )
