"""report.html: the quantization error of a converted model on one page, in itself complete.

No script, no network, no time and no path: the same report gives the same bytes. Numbers come from `report_rows`, their
wording from `report_tables`, pictures from `report_layer_plots` and `report_class_plots`; the rest is in the template.
"""

from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from mosaic.convert import report_evaluation, report_tables
from mosaic.convert.report_rows import Entry, Survey
from mosaic.convert.sums import decibels
from mosaic.format.evaluation import Evaluation

TEMPLATE = Path(__file__).with_name("report.html.jinja")
WORST = 20


def render(report: dict[str, Any], title: str, evaluations: Sequence[Evaluation] = ()) -> str:
    """The page for a parsed report.json and what mosaic-eval found; `title` is what the model is called."""
    environment = jinja2.Environment(
        autoescape=True, finalize=visible, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "sqnr": report_tables.sqnr,
        "share": report_tables.share,
        "relative": report_tables.relative,
        "size": size,
        "count": lambda value: f"{value:,}",
    }
    survey = Survey(report)
    total = survey.overall
    tensors = report["tensors"]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        report=report,
        total=total,
        weights=sum(prod(entry["shape"]) for entry in tensors),
        nbytes=sum(entry["nbytes"] for entry in tensors),
        rounded=sum(entry["dtype"] != "F8_E4M3" and entry.get("sqnr_db") is not None for entry in tensors),
        passed=len(total.entries) - len(total.measured),
        nonfinite=sum(entry.get("nonfinite_zeroed", 0) for entry in tensors),
        notes=Counter((entry["note"], entry["role"]) for entry in tensors if entry.get("note")),
        names=report_tables.NAMES,
        summary=summary_cells(report),
        layers=report_tables.by_layer_cells(survey, report_tables.NAMES),
        worst=report_tables.worst_cells(report, WORST),
        gains=gain_cells(survey),
        evaluations=report_evaluation.cells(evaluations) if evaluations else [],
        pictures=pictures(survey),
    )


def summary_cells(report: Entry) -> list[list[str]]:
    """The summary as report.json has it, heading first."""
    head = ["class", "treatment", "SQNR dB", "rel. L2", "max error", "to zero", "subnormal", "scale min", "scale max"]
    lines = [[*head, "tensors", "weights", "size"]]
    for row in report["summary"]:
        cells = [report_tables.class_name(row["role"], row["part"]), row["treatment"]]
        if "relative_l2" in row:
            cells.append("exact" if row["sqnr_db"] is None else f"{row['sqnr_db']:.2f}")
            cells += [report_tables.relative(row["relative_l2"]), report_tables.number(row["max_abs_error"])]
        else:
            cells += ["as is", "", ""]
        cells += [report_tables.share(row.get(key)) for key in ("zeroed_share", "subnormal_share")]
        cells += [report_tables.number(row.get(key)) for key in ("scale_min", "scale_max")]
        lines.append([*cells, f"{row['tensors']:,}", f"{row['weights']:,}", size(row["nbytes"])])
    return lines


def gain_cells(survey: Survey) -> list[list[str]]:
    """What rule mse gained over rule amax, by class, heading first."""
    lines = [["class", "tensors", "amax, dB", "mse, dB", "gain, dB", "noise saved"]]
    for (role, part), tally in survey.classes.items():
        amax, mse = tally.amax_error, tally.mse_error
        if amax and mse:
            gain = decibels(amax.noise, mse.noise)
            saved = f"{1 - mse.noise / amax.noise:.2%}" if amax.noise else ""
            shown = report_tables.sqnr(amax), report_tables.sqnr(mse)
            name, count = report_tables.class_name(role, part), f"{len(tally.mse):,}"
            lines.append([name, count, *shown, "" if gain is None else f"{gain:+.3f}", saved])
    return lines


def pictures(survey: Survey) -> dict[str, Markup]:
    """Inline SVG by name, each for a page and for a phone; only of what there is to show."""
    total = survey.overall
    if not (total.decibels or total.histograms):
        return {}
    from mosaic.convert import report_class_plots, report_layer_plots  # load matplotlib, which takes a second
    from mosaic.convert.report_svg import style

    plots = []
    if total.decibels:
        plots += [
            (report_layer_plots.sqnr_by_layer, "SQNR by layer, one line per class"),
            (report_class_plots.sqnr_by_class, "Distribution of the SQNR of single tensors, one panel per class"),
        ]
    if total.scales:
        plots.append((report_class_plots.scales_by_class, "Block scales by power of two, one panel per class"))
    if sum(total.codes):
        plots += [
            (report_class_plots.codes_by_class, "How often each code is used, one panel per class"),
            (report_layer_plots.shares_by_layer, "Shares of subnormal and zero codes by layer, one line per class"),
        ]
    with style():
        return {
            plot.__name__: Markup("\n").join(plot(survey, narrow).svg(plot.__name__, label) for narrow in (False, True))
            for plot, label in plots
        }


def size(nbytes: int) -> str:
    """Bytes in decimal units, three digits."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.{0 if units[0] == 'B' or value >= 99.95 else 1 if value >= 9.995 else 2}f} {units[0]}"


def visible(value: Any) -> Any:
    """Text with escapes for what cannot be seen or written (controls, bidirectional overrides, lone surrogates)."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in value)
