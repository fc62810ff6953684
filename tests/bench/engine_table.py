"""What tests/bench/engine.py found: cost per layer by difference, the true model by extrapolation, one table."""

from dataclasses import dataclass, field
from statistics import median

import numpy as np

LAYERS = 40  # of the 35B


@dataclass
class Series:
    """One engine and one test, at several sizes."""

    engine: str
    test: str
    milliseconds: dict[int, list[float]] = field(default_factory=dict)  # per token, by number of layers
    nbytes: dict[int, float] = field(default_factory=dict)  # read per token, if that says anything

    def add(self, layers: int, milliseconds: float) -> None:
        """One repetition."""
        self.milliseconds.setdefault(layers, []).append(milliseconds)

    def median(self, layers: int) -> float:
        """Milliseconds per token."""
        return median(self.milliseconds[layers])

    def line(self) -> tuple[float, float] | None:
        """Milliseconds of a layer, and of the rest; None with less than two sizes."""
        return fit({layers: self.median(layers) for layers in self.milliseconds})

    def gb_s(self) -> float | None:
        """GB/s of weights at the largest size."""
        largest = max(self.milliseconds)
        return self.nbytes[largest] / self.median(largest) / 1e6 if largest in self.nbytes else None

    def as_dict(self, ceiling: float | None) -> dict[str, object]:
        """Everything that is known."""
        line, speed = self.line(), self.gb_s()
        whole = None if line is None else line[0] * LAYERS + line[1]
        return {
            "engine": self.engine,
            "test": self.test,
            "ms_per_token": self.milliseconds,
            "ms_per_layer": line and line[0],
            "ms_of_the_rest": line and line[1],
            f"ms_at_{LAYERS}_layers": whole,
            f"tok_s_at_{LAYERS}_layers": whole and 1e3 / whole,
            "gb_s": speed,
            "of_ceiling": speed / ceiling if speed and ceiling else None,
        }


def fit(milliseconds: dict[int, float]) -> tuple[float, float] | None:
    """(per layer, the rest) of a line through times by number of layers: by least squares if more than two."""
    if len(milliseconds) < 2:
        return None
    slope, rest = np.polyfit(list(milliseconds), list(milliseconds.values()), 1)
    return float(slope), float(rest)


def table(series: list[Series], ceiling: float | None) -> str:
    """Medians (least and most) in milliseconds per token. `ceiling`: GB/s that can be read."""
    sizes = sorted({size for entry in series for size in entry.milliseconds})
    head = f"{'ms per token':<13}{'':<9}" + "".join(f"{f'{size} layers':>27}{'tok/s':>9}" for size in sizes)
    head += f"{'per layer':>11}{'rest':>9}{f'{LAYERS} layers':>11}{'tok/s':>9}{'GB/s':>8}{'of ceiling':>12}"
    lines = [head]
    for entry in series:
        text = f"{entry.engine:<13}{entry.test:<9}"
        for size in sizes:
            if size not in entry.milliseconds:
                text += f"{'-':>27}{'-':>9}"
                continue
            times, middle = entry.milliseconds[size], entry.median(size)
            text += f"{f'{middle:.2f} ({min(times):.2f}, {max(times):.2f})':>27}{1e3 / middle:>9.2f}"
        line, speed = entry.line(), entry.gb_s()
        if line:
            whole = line[0] * LAYERS + line[1]
            text += f"{line[0]:>11.3f}{line[1]:>9.3f}{whole:>11.2f}{1e3 / whole:>9.2f}"
        else:
            text += f"{'-':>11}{'-':>9}{'-':>11}{'-':>9}"
        if speed:
            text += f"{speed:>8.2f}" + (f"{speed / ceiling:>12.0%}" if ceiling else "")
        lines.append(text)
    return "\n".join(lines)
