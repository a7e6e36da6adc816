"""The picture of the demo `cmab`: memory and time against the number of pixels, beside the photograph."""

from __future__ import annotations

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
"""Smallest distance between two labels, as a share of the height of the axes."""


def draw(scans: list[Scan], target: Path, where: str) -> None:
    """Write the plot of `scans` to `target`; `where` is a line of text that names the machine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure, (photo, memory, time) = plt.subplots(1, 3, figsize=(12.5, 4.2), width_ratios=(0.7, 1, 1))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.06)
        height, width = c.photograph().shape[:2]
        difference = max((scan.difference.get("conditioning", 0.0) for scan in scans), default=0.0)
        title = f"{c.LATENTS} latents read a photograph in three ways, whose results differ by {difference:.0e} at most"
        figure.suptitle(title, x=0.01, ha="left")
        photo.imshow(c.photograph().numpy())
        photo.set_title(f"{height * width:,} pixels")
        photo.axis("off")
        _curves(memory, scans, lambda figures: figures.memory / 2**20, _mebibytes, "Peak memory beyond pixels and weights (MiB)")
        _curves(time, scans, lambda figures: figures.seconds, readable, "Time (s)")
        figure.supxlabel(where, fontsize=7, color="0.45", x=0.99, ha="right")
        figure.savefig(target, dpi=160)
        plt.close(figure)


def _curves(axes: Any, scans: list[Scan], figure_of: Callable[[Figures], float], told: Callable[[float], str], title: str) -> None:
    """Draw one curve for each method on logarithmic axes, with its name and its last figure at its end."""
    ends = {}
    for name, colour in COLOURS.items():
        measured = [(scan.count, figure_of(scan.conditioning[name])) for scan in scans if name in scan.conditioning]
        if measured:
            counts, figures = zip(*measured, strict=True)
            axes.plot(counts, figures, color=colour, marker="o", markersize=4, linewidth=2.4 if name == c.CMAB_NAME else 1.4)
            ends[name] = (counts[-1], figures[-1])
    axes.set(xscale="log", yscale="log", title=title, xlabel="pixels")
    ticks = [scan.count for scan in scans]
    axes.set_xticks(ticks, [_short(count) for count in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    _name_ends(axes, ends, told)


def _name_ends(axes: Any, ends: dict[str, tuple[int, float]], told: Callable[[float], str]) -> None:
    """Write each curve's name in its colour at its end, moved down where it would overlap the name above."""
    to_axes = (axes.transData + axes.transAxes.inverted()).transform
    height = 1 + GAP / 2
    for name, end in sorted(ends.items(), key=lambda item: -item[1][1]):
        x, y = to_axes(end)
        height = min(y, height - GAP)
        text = f"{LABELS[name]}\n{told(end[1])}"
        weight = "bold" if name == c.CMAB_NAME else "normal"
        axes.text(
            x + 0.03, height, text, transform=axes.transAxes, color=COLOURS[name], va="center", fontsize=8, weight=weight, linespacing=1.15
        )


def _mebibytes(figure: float) -> str:
    return f"{figure:,.0f} MiB"


def _short(count: int) -> str:
    """A number in short, such as 10k or 1.5M."""
    for size, letter in ((10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{round(count / size, 1):g}{letter}"
    return str(count)
