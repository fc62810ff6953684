"""A drawing surface for the report: matplotlib figures out as small inline SVG that takes its colours from the page.

Loads matplotlib, so only what draws may import it. No pyplot, no GUI. The same figure gives the same bytes, whatever
matplotlibrc says. Figures are drawn in placeholder colours; in the SVG these become CSS variables, which the page sets
for light, dark and print. Texts stay texts, in the page's font.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mosaic.format.tensors import QUANTIZABLE, Role

#: Placeholder colours and the CSS variables they become.
INK, SOFT, RULE, PAGE = "#010101", "#020202", "#030303", "#040404"
ROLES = [role for role in Role if role in QUANTIZABLE]
COLORS: dict[str, str] = {role: f"#0505{number:02x}" for number, role in enumerate(ROLES)}
MARKERS: dict[str, str] = dict(zip(ROLES, "osv^DP", strict=True))
VARIABLES = {INK: "--ink", SOFT: "--soft", RULE: "--rule", PAGE: "--page"} | {
    color: f"--class-{number}" for number, color in enumerate(COLORS.values())
}
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": SOFT,
    "axes.labelsize": 11,
    "axes.linewidth": 1,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titley": 1.0,  # as it would be; matplotlib need not measure
    "figure.facecolor": "none",
    "font.size": 11,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": SOFT,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.color": SOFT,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}
WIDE, NARROW = 1040, 380
POINTS = 72


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib's own defaults and then ours, for drawing and saving."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


def sheet_width(narrow: bool) -> int:
    """Width in CSS pixels, for a page or for a phone."""
    return NARROW if narrow else WIDE


class Sheet:
    """A figure measured in CSS pixels, as wide as a page or, with `narrow`, as a phone."""

    def __init__(self, height: float, narrow: bool) -> None:
        self.narrow, self.width, self.height = narrow, sheet_width(narrow), height
        self.figure = Figure(figsize=(self.width / POINTS, height / POINTS), dpi=POINTS)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes in a box; the corner of the sheet is at the top left."""
        bottom = self.height - top - height
        box = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(box)

    def svg(self, name: str, label: str) -> Markup:
        """The picture, for inlining; `label` is what it shows, in words."""
        buffer = io.StringIO()
        with mpl.rc_context({"svg.hashsalt": f"{name}-{self.width}"}):
            self.figure.savefig(buffer, format="svg", metadata=NO_METADATA)
        text = buffer.getvalue()
        body = text[text.index(">", text.index("<svg")) + 1 :]
        body = re.sub(r"<(style|metadata)\b.*?</\1>", "", body, flags=re.S)
        body = re.sub(r'<g id="[^"]*"', "<g", body)  # they repeat from figure to figure
        body = re.sub(r"<[^>]*>", _compact, body).replace("xlink:href", "href")
        kind = "narrow" if self.narrow else "wide"
        head = Markup('<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">')
        return head.format(kind, self.width, f"{self.height:g}", label) + Markup(re.sub(r"\s*\n\s*", "\n", body))


def _compact(tag: re.Match[str]) -> str:
    """A tag with the page's font and colours and no more digits than can be seen."""
    text = re.sub(r"\s*font-family: [^;\"]*;?", "", tag[0])
    text = re.sub(r"-?\d+\.\d{2,}", lambda match: f"{float(match[0]):.1f}", text)
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: f"var({VARIABLES[match[0]]})", text)
