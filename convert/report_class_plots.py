"""The pictures of a report by class, as small panels of one scale: SQNR, block scales, use of the codes.

Loads matplotlib.
"""

from collections.abc import Iterator
from math import ceil, floor, log2, log10

from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from mosaic.convert.report_layer_plots import GAUSSIAN_DB, percent_of_power
from mosaic.convert.report_rows import Survey, Tally
from mosaic.convert.report_svg import COLORS, INK, RULE, SOFT, Sheet
from mosaic.convert.report_tables import class_name, number, share
from mosaic.format.e4m3 import E4M3_MAX, NAN_CODE, SMALLEST_NORMAL_CODE, VALUES

BINS = 60
EXPONENT = SMALLEST_NORMAL_CODE  # as many codes have one exponent as are below the smallest normal one
TOP_CODE = NAN_CODE - 1
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Panels:
    """A grid of axes, one per class, below each other on a phone."""

    def __init__(self, classes: dict[tuple[str, str], Tally], narrow: bool, height: int, left: int) -> None:
        self.classes = classes
        self.columns = 1 if narrow else 3
        self.height, self.left = height, left
        rows = ceil(len(classes) / self.columns)
        self.row = height + 52  # with title and tick labels
        self.sheet = Sheet(rows * self.row, narrow)

    def __iter__(self) -> Iterator[tuple[Axes, str, Tally]]:
        """Axes, colour and tensors of every class."""
        pitch = (self.sheet.width + 18) / self.columns
        for index, ((role, part), tally) in enumerate(self.classes.items()):
            row, column = divmod(index, self.columns)
            box = (column * pitch + self.left, row * self.row + 22, pitch - 18 - self.left, self.height)
            axes = self.sheet.axes(*box)
            axes.set_title(class_name(role, part))
            yield axes, COLORS.get(role, SOFT), tally


def sqnr_by_class(survey: Survey, narrow: bool) -> Sheet:
    """How the SQNR of single tensors is distributed."""
    chosen = {key: tally for key, tally in survey.classes.items() if tally.decibels}
    values = [value for tally in chosen.values() for value in tally.decibels]
    low, high = min(*values, GAUSSIAN_DB - 0.5), max(*values, GAUSSIAN_DB + 0.5)
    low, high = low - 0.03 * (high - low), high + 0.03 * (high - low)
    panels = Panels(chosen, narrow, 64, 0)
    for axes, color, tally in panels:
        axes.hist(tally.decibels, bins=BINS, range=(low, high), color=color, histtype="stepfilled")
        axes.axvline(GAUSSIAN_DB, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xlim(low, high)
        axes.set_yticks([])
        axes.xaxis.set_major_locator(MaxNLocator(6))
        count = len(tally.decibels)
        side_note(axes, "1 tensor" if count == 1 else f"{count:,} tensors, worst {min(tally.decibels):.2f} dB")
    return panels.sheet


def scales_by_class(survey: Survey, narrow: bool) -> Sheet:
    """How many blocks have a scale of which power of two."""
    chosen = {key: tally for key, tally in survey.classes.items() if sum(tally.scales.values())}
    exponents = [exponent for tally in chosen.values() for exponent in tally.scales]
    low, high = min(exponents), max(exponents)
    highest = max(max(tally.scales.values()) / sum(tally.scales.values()) for tally in chosen.values())
    panels = Panels(chosen, narrow, 90, 36)
    for axes, color, tally in panels:
        blocks = sum(tally.scales.values())
        axes.bar(list(tally.scales), [count / blocks for count in tally.scales.values()], 0.86, color=color)
        axes.set_xlim(min(low, high - 5) - 0.6, max(high, low + 5) + 0.6)
        axes.set_ylim(0, 1.05 * highest)
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.xaxis.set_major_formatter(lambda x, _: power_of_two(x))
        if tally.scale_range:
            side_note(axes, " to ".join(map(number, tally.scale_range)))
    return panels.sheet


def codes_by_class(survey: Survey, narrow: bool) -> Sheet:
    """How often each magnitude is used, beside its share in all classes together."""
    chosen = {key: tally for key, tally in survey.classes.items() if sum(tally.codes)}
    everything = shares(survey.overall)
    positive = [value for tally in chosen.values() for value in shares(tally) if value > 0]
    bottom, top = floor(log10(min(positive))), ceil(log10(max(positive)))
    bottom, top = max(bottom, top - 8), max(top, bottom + 1)
    panels = Panels(chosen, narrow, 100 if narrow else 130, 56)
    for axes, color, tally in panels:
        axes.set_yscale("log")
        axes.axvspan(1, SMALLEST_NORMAL_CODE, color=RULE, linewidth=0)
        axes.text(SMALLEST_NORMAL_CODE + 1, 10.0 ** (top - 0.2), "subnormal", va="top", color=SOFT)
        draw_codes(axes, shares(tally), color, 10.0**bottom)
        if len(chosen) > 1:
            visible = [max(value, 10.0**bottom) for value in everything[:NAN_CODE]]
            axes.stairs(visible, range(NAN_CODE + 1), color=INK, linewidth=0.9, baseline=None)
        axes.set_xlim(0, NAN_CODE)
        axes.set_ylim(10.0**bottom, 10.0**top)
        powers = range(bottom, top + 1, 2)
        axes.yaxis.set_major_locator(FixedLocator([10.0**power for power in powers]))
        axes.yaxis.set_major_formatter(FixedFormatter([percent_of_power(power) for power in powers]))
        axes.yaxis.set_minor_locator(NullLocator())
        codes = range(SMALLEST_NORMAL_CODE, NAN_CODE, 3 * EXPONENT)
        axes.set_xticks([code + 0.5 for code in codes], [power_of_two(log2(VALUES[code])) for code in codes])
        side_note(axes, f"{E4M3_MAX:.0f}: {share(shares(tally)[TOP_CODE])}")
    return panels.sheet


def draw_codes(axes: Axes, values: list[float], color: str, bottom: float) -> None:
    """One bar per code, exponents in turns dark and light, the top code in ink."""
    for parity, alpha in ((0, 0.55), (1, 0.85)):
        chosen = [
            max(v, bottom) if code // EXPONENT % 2 == parity else bottom for code, v in enumerate(values[:NAN_CODE])
        ]
        axes.stairs(chosen, range(NAN_CODE + 1), baseline=bottom, fill=True, color=color, alpha=alpha, linewidth=0)
    axes.stairs([max(values[TOP_CODE], bottom)], (TOP_CODE, NAN_CODE), baseline=bottom, fill=True, color=INK)


def shares(tally: Tally) -> list[float]:
    """How large a share of all codes each magnitude has."""
    total = sum(tally.codes)
    return [count / total for count in tally.codes] if total else [0.0] * (NAN_CODE + 1)


def side_note(axes: Axes, text: str) -> None:
    """A remark above the right end of axes."""
    axes.set_title(text, loc="right", fontsize=11, color=SOFT)


def power_of_two(exponent: float) -> str:
    """2 to a whole power."""
    return "2" + f"{exponent:.0f}".translate(SUPERSCRIPTS)
