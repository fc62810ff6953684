"""What pictures of a report by layer share: the x axis, lines with markers, the legend. Loads matplotlib.

MTP block and head, which are no layers, stand beside them.
"""

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mosaic.convert.report_rows import Place, Survey, Tally
from mosaic.convert.report_svg import COLORS, MARKERS, PAGE, RULE, SOFT, Sheet
from mosaic.convert.report_tables import NAMES
from mosaic.format.tensors import Part

LEGEND_LINE = 20  # pixels
SLOT = 44  # pixels for a place beside the layers

Points = list[tuple[float, float]]


class Layers:
    """The x axis of pictures by layer: decoder layers by number, a gap, then the other places."""

    def __init__(self, survey: Survey, width: float) -> None:
        self.places = survey.places
        self.width = width  # pixels
        layers = [place.layer for place in self.places if place.layer is not None and in_row(place)]
        self.first, self.last = (min(layers), max(layers)) if layers else (0, -1)
        self.beside = [place for place in self.places if not in_row(place)]
        rest = max(width - SLOT * len(self.beside), width / 4)
        self.step = SLOT * max(1, self.last - self.first + 1) / rest

    def position(self, place: Place) -> float:
        """Where a place stands."""
        if place.layer is not None and in_row(place):
            return place.layer
        return self.last + self.step * (self.beside.index(place) + 1)

    def prepare(self, axes: Axes) -> None:
        """Limits and ticks of the x axis."""
        end = self.last + self.step * len(self.beside)
        margin = 0.5 if self.last <= self.first else 0.012 * (end - self.first)
        left, layers = self.last + self.step / 2, []
        if self.last >= self.first:
            locator = MaxNLocator(max(1, round(self.width / 55)), integer=True, steps=[1, 2, 4, 5, 10])
            layers = [tick for tick in locator.tick_values(self.first, self.last) if self.first <= tick <= self.last]
            left = self.first - margin
            if self.beside:
                axes.axvline(self.last + self.step / 2, color=RULE, linewidth=1)
        labels = [f"{tick:.0f}" for tick in layers] + [place.label for place in self.beside]
        axes.set_xticks([*layers, *map(self.position, self.beside)], labels)
        axes.set_xlim(left, end + (self.step / 2 if self.beside else margin))

    def draw(self, axes: Axes, role: str, value: Callable[[Tally], float | None]) -> Points:
        """Draw one value of a role wherever there is one, joined from layer to layer."""
        rows: Points = []
        others: Points = []
        for place in self.places:
            number = value(place.roles[role]) if role in place.roles else None
            if number is not None:
                (rows if in_row(place) else others).append((self.position(place), number))
        for points, width in ((rows, 1.3), (others, 0.0)):
            if points:
                axes.plot(*zip(*points, strict=True), linewidth=width, **looks(role))
        return rows + others


def in_row(place: Place) -> bool:
    """Whether a place is a decoder layer."""
    return place.part == Part.DECODER and place.layer is not None


def looks(role: str) -> dict[str, Any]:
    """Colour and marker of a role."""
    marker = MARKERS.get(role, "x")
    return {
        "color": COLORS.get(role, SOFT),
        "marker": marker,
        "markersize": {"o": 5, "s": 4.8, "D": 4.6}.get(marker, 6.5),
        "markeredgecolor": PAGE,
        "markeredgewidth": 0.6,
    }


def legend_handles(roles: list[str]) -> list[Line2D | Patch]:
    """One line per role."""
    return [Line2D([], [], linewidth=1.3, label=NAMES.get(role, role), **looks(role)) for role in roles]


def legend_height(handles: list[Line2D | Patch], narrow: bool) -> int:
    """Pixels that the legend takes."""
    return LEGEND_LINE * (-(-len(handles) // 2) if narrow else 1)


def legend(sheet: Sheet, handles: list[Line2D | Patch]) -> None:
    """The legend, at the top."""
    columns = 2 if sheet.narrow else len(handles)
    sheet.figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        borderaxespad=0,
        borderpad=0,
        labelspacing=0.5,
        columnspacing=1.6,
        handlelength=1.8,
        handletextpad=0.6,
    )
