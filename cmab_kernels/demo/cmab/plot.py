"""The picture of the demo `cmab`: memory and time against the number of pixels, beside the photograph."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...measure import readable
from .. import STYLE
from . import conditioning as c

if TYPE_CHECKING:
    from . import Figures, Scan

COLOURS = {c.CMAB_NAME: "#c0392b", c.SDPA_NAME: "#2c6e9f", c.MULTIHEAD_NAME: "#5f6a6a"}
LABELS = {c.CMAB_NAME: "CMAB, streamed", c.SDPA_NAME: c.SDPA_NAME, c.MULTIHEAD_NAME: c.MULTIHEAD_NAME}
GAP = 0.11
"""The smallest distance between two labels, as a share of the height of the axes."""

WARNING = "#b3261e"


def draw(scans: list[Scan], target: Path, where: str, warning: str = "") -> None:
    """Write the plot of `scans` to `target`.

    `where` is a line of text that names the machine. `warning` is a text about unreliable figures.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure, (photo, memory, time) = plt.subplots(1, 3, figsize=(12.5, 4.4), width_ratios=(0.7, 1, 1))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.06)
        height, width = c.photograph().shape[:2]
        difference = max((scan.difference.get("conditioning", 0.0) for scan in scans), default=0.0)
        title = f"{c.LATENTS} latents read a photograph in three ways, whose results differ by {difference:.0e} at most"
        figure.suptitle(f"{title}\n" if warning else title, x=0.01, ha="left")
        figure.text(0.01, 0.925, warning, color=WARNING, weight="bold", va="top")
        photo.imshow(c.photograph().numpy())
        photo.set_title(f"{height * width:,} pixels")
        photo.axis("off")
        _curves(
            memory, scans, lambda figures: figures.memory / 2**20, _mebibytes, "Peak memory beyond pixels and weights"
        )
        _curves(time, scans, lambda figures: figures.seconds, readable, "Time")
        figure.supxlabel(where, fontsize=7, color="0.45", x=0.99, ha="right")
        figure.savefig(target, dpi=160)
        plt.close(figure)


def _curves(
    axes: Any, scans: list[Scan], figure_of: Callable[[Figures], float], told: Callable[[float], str], title: str
) -> None:
    """Draw one curve for each method on logarithmic axes, with its name and its last figure at the end of the curve."""
    ends = {}
    for name, colour in COLOURS.items():
        measured = [(scan.count, figure_of(scan.conditioning[name])) for scan in scans if name in scan.conditioning]
        if measured:
            counts, figures = zip(*measured, strict=True)
            axes.plot(
                counts, figures, color=colour, marker="o", markersize=4, linewidth=2.4 if name == c.CMAB_NAME else 1.4
            )
            ends[name] = (counts[-1], figures[-1])
    axes.set(xscale="log", yscale="log", title=title, xlabel="pixels")
    axes.minorticks_off()
    sizes: list[float] = [scan.count for scan in scans]
    _ticks(axes.xaxis, sizes if len(sizes) > 1 else _widened(axes.xaxis), _short)
    _ticks(axes.yaxis, _widened(axes.yaxis), told)
    axes.grid(True, color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    _name_ends(axes, ends, told)


def _widened(axis: Any) -> list[float]:
    """Widen a logarithmic axis to a factor of ten or more, and return at least two round numbers on it."""
    low, high = axis.get_view_interval()
    more = max(1.0, math.sqrt(10 * low / high))
    low, high = low / more, high * more
    axis.set_view_interval(low, high, ignore=True)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    found = [step * 10.0**decade for decade in decades for step in (1, 2, 5) if low <= step * 10.0**decade <= high]
    whole = [tick for tick in found if math.log10(tick).is_integer()]
    return whole if len(whole) > 2 else found


def _ticks(axis: Any, places: list[float], told: Callable[[float], str]) -> None:
    axis.set_ticks(places, [told(place) for place in places])


def _name_ends(axes: Any, ends: dict[str, tuple[int, float]], told: Callable[[float], str]) -> None:
    """Write each curve's name in its colour at its end. A name that would overlap the name above is moved down."""
    to_axes = (axes.transData + axes.transAxes.inverted()).transform
    height = 1 + GAP / 2
    for name, end in sorted(ends.items(), key=lambda item: -item[1][1]):
        x, y = to_axes(end)
        height = min(y, height - GAP)
        text = f"{LABELS[name]}\n{told(end[1])}"
        weight = "bold" if name == c.CMAB_NAME else "normal"
        axes.text(
            x + 0.03,
            height,
            text,
            transform=axes.transAxes,
            color=COLOURS[name],
            va="center",
            fontsize=8,
            weight=weight,
            linespacing=1.15,
        )


def _mebibytes(figure: float) -> str:
    return f"{figure:,.0f} MiB" if figure >= 1 else f"{figure:.2g} MiB"


def _short(count: float) -> str:
    """Return a number in a short form, such as 10k or 1.5M."""
    for size, letter in ((10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{round(count / size, 1):g}{letter}"
    return f"{count:.0f}"
