"""The pictures of a report by layer: SQNR, and the shares of subnormal and zero codes. Loads matplotlib."""

from math import floor, log10
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from mosaic.convert.report_layer_axis import Layers, in_row, legend, legend_handles, legend_height
from mosaic.convert.report_rows import Survey, Tally
from mosaic.convert.report_svg import COLORS, SOFT, Sheet, sheet_width
from mosaic.convert.report_tables import NAMES
from mosaic.format.tensors import Role

GAUSSIAN_DB = 31.56  # SQNR of normally distributed weights; tests/convert/test_report_html.py
LEAST_SPAN = 1.0  # dB on the y axis, so that scatter does not look like trouble


def sqnr_by_layer(survey: Survey, narrow: bool) -> Sheet:
    """SQNR of every class in every layer, and how far the tensors of routed experts spread."""
    left, right, height = 34, 46, 260
    layers = Layers(survey, sheet_width(narrow) - left - right)
    measured = {role for (role, _), tally in survey.classes.items() if tally.decibels}
    roles = [role for role in survey.roles if role in measured]
    handles = legend_handles(roles)
    spread = [
        (layers.position(place), min(tally.decibels), max(tally.decibels), in_row(place))
        for place in layers.places
        if (tally := place.roles.get(Role.ROUTED_EXPERTS)) and len(tally.decibels) > 1
    ]
    if spread:
        handles.insert(1, Patch(color=COLORS[Role.ROUTED_EXPERTS], alpha=0.2, label="worst to best expert tensor"))
    top = legend_height(handles, narrow) + 24
    sheet = Sheet(top + height + 22, narrow)
    axes = sheet.axes(left, top, layers.width, height)
    legend(sheet, handles)
    axes.set_title("SQNR, dB", fontsize=11, color=SOFT)
    draw_spread(axes, spread)
    drawn = [(y, x, role) for role in roles for x, y in layers.draw(axes, role, sqnr)]
    layers.prepare(axes)
    values = [y for y, _, _ in drawn] + [y for _, low, high, _ in spread for y in (low, high)] + [GAUSSIAN_DB]
    middle, span = (min(values) + max(values)) / 2, max(LEAST_SPAN, max(values) - min(values))
    axes.set_ylim(middle - 0.6 * span, middle + 0.55 * span)
    axes.axhline(GAUSSIAN_DB, color=SOFT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        "normal", (1, GAUSSIAN_DB), (5, 0), ("axes fraction", "data"), "offset points", va="center", color=SOFT
    )
    mark_lowest(axes, min(drawn), layers)
    return sheet


def draw_spread(axes: Axes, spread: list[tuple[float, float, float, bool]]) -> None:
    """A band through the layers, a bar elsewhere: position, lowest, highest, whether a layer."""
    look: dict[str, Any] = {"color": COLORS[Role.ROUTED_EXPERTS], "alpha": 0.2}
    band = [(x, low, high) for x, low, high, in_layer in spread if in_layer]
    if len(band) > 1:
        xs, lows, highs = zip(*band, strict=True)
        axes.fill_between(xs, lows, highs, linewidth=0, **look)
    for x, low, high, in_layer in spread:
        if not in_layer or len(band) == 1:
            axes.vlines(x, low, high, linewidth=8, **look)


def mark_lowest(axes: Axes, lowest: tuple[float, float, str], layers: Layers) -> None:
    """Say which point is the lowest."""
    y, x, role = lowest
    place = next(place for place in layers.places if layers.position(place) == x)
    where = f", layer {place.label}" if in_row(place) else f" ({place.label})" if role != Role.LM_HEAD else ""
    left, right = axes.get_xlim()
    side = "left" if x < (2 * left + right) / 3 else "right" if x > (left + 2 * right) / 3 else "center"
    text = f"lowest: {NAMES.get(role, role)}{where}: {y:.2f}"
    axes.annotate(text, (x, y), (0, -8), textcoords="offset points", ha=side, va="top")


def shares_by_layer(survey: Survey, narrow: bool) -> Sheet:
    """Shares of codes that are subnormal, and of codes that are 0, of every class in every layer."""
    left, gap, height = 54, 54, 190
    pictures = (("subnormal codes", subnormal_share), ("codes that are 0", zero_share))
    width = sheet_width(narrow) - left if narrow else (sheet_width(narrow) - 2 * left - 20) / 2
    layers = Layers(survey, width)
    handles = legend_handles(survey.roles)
    top = legend_height(handles, narrow) + 24
    sheet = Sheet(top + (2 * height + gap if narrow else height) + 22, narrow)
    legend(sheet, handles)
    for index, (title, value) in enumerate(pictures):
        corner = (left, top + index * (height + gap)) if narrow else (left + index * (width + left + 20), top)
        axes = sheet.axes(*corner, width, height)
        axes.set_title(title)
        shares = [y for role in survey.roles for _, y in layers.draw(axes, role, value)]
        layers.prepare(axes)
        share_axis(axes, shares)
    return sheet


def share_axis(axes: Axes, shares: list[float]) -> None:
    """A logarithmic y axis in percent, with a place for 0 if that occurs."""
    positive = [share for share in shares if share > 0]
    low, high = (floor(log10(f(positive))) for f in (min, max)) if positive else (-4, -4)
    low, high = min(low, -1), min(high, -1)  # 100% is the most
    powers = range(low, high + 2, 1 + (high + 1 - low) // 6)
    ticks, labels = [10.0**power for power in powers], [percent_of_power(power) for power in powers]
    if len(positive) == len(shares):
        axes.set_yscale("log")
        axes.set_ylim(10.0**low, 10.0 ** (high + 1))
    else:
        axes.set_yscale("symlog", linthresh=10.0**low, linscale=0.5)
        axes.set_ylim(-(10.0**low) * 0.3, 10.0 ** (high + 1))
        ticks, labels = [0, *ticks], ["0", *labels]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FixedFormatter(labels))
    axes.yaxis.set_minor_locator(NullLocator())


def percent_of_power(power: int) -> str:
    """10^power in percent."""
    return f"{100 * 10.0**power:.{max(0, -power - 2)}f}%" if power > -8 else f"{100 * 10.0**power:.0e}%"


def sqnr(tally: Tally) -> float | None:
    """SQNR of what was measured together."""
    return tally.error.sqnr_db if tally.error else None


def subnormal_share(tally: Tally) -> float | None:
    """Share of subnormal codes."""
    return tally.subnormal_share


def zero_share(tally: Tally) -> float | None:
    """Share of codes that are 0."""
    return tally.zero_share
