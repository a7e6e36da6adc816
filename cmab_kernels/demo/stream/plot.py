"""The picture of the demo `stream`: the noisy photograph and its window, each method's result, and the cost of a
step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...measure import readable
from ...nystrom.costs import executed_on_average, paper_operations
from .. import STYLE
from . import CONTINUAL, EXACT, FIXED, FULL, SCHEMES
from . import tokens as t

if TYPE_CHECKING:
    from . import Run

# Colours that colour-blind people can distinguish.
COLOURS = {
    CONTINUAL: "#0072B2",
    FIXED: "#009E73",
    EXACT: "#D55E00",
    FULL: "#555555",
}
NAMES = {
    EXACT: "Exact attention",
    CONTINUAL: "Nyström attention, continual landmarks",
    FIXED: "Nyström attention, fixed landmarks",
}
PHOTOGRAPHS, FIGURES = (
    (("arrives", EXACT), (CONTINUAL, FIXED)),
    [name for name in ("errors", "times", "operations") for _ in range(2)],
)
"""The layout: two columns of two photographs, and a column of three charts."""

WINDOW = "#CC0066"

PALE = 0.25
"""The contrast of the part of the photograph that has not arrived yet."""

GAP = 0.21
"""The smallest distance between two names, as a share of the height of the axes."""


def draw(measured: Run, target: Path, where: str) -> None:
    """Write the picture to `target`; `where` is a line of text that names the machine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure: Any = plt.figure(figsize=(15, 7.6))
        figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.06)
        size = f"{t.PATCH} x {t.PATCH}"
        told = (
            f"Each patch of {size} pixels attends to the similar patches among the newest {measured.window:,}, "
            "and becomes their mean"
        )
        figure.suptitle(f"{told}, which has less noise", x=0.005, ha="left", fontsize=12, weight="bold")
        rows = [
            [*photographs, figures]
            for photographs, figures in zip(3 * [PHOTOGRAPHS[0]] + 3 * [PHOTOGRAPHS[1]], FIGURES, strict=True)
        ]
        axes = figure.subplot_mosaic(rows, width_ratios=(1.3, 1.3, 1))
        _arriving(axes["arrives"], measured)
        for name in (EXACT, CONTINUAL, FIXED):
            _result(axes[name], measured, name)
        _errors(axes["errors"], measured)
        _times(axes["times"], measured)
        _operations(axes["operations"], measured)
        figure.supxlabel(where, fontsize=7, color="0.45", x=0.99, ha="right")
        figure.savefig(target, dpi=150)
        plt.close(figure)


# ---- photographs -----------------------------------------------------------------------------------------------------


def _arriving(axes: Any, measured: Run) -> None:
    """Draw the photograph at the time when half of it has arrived, with a frame around the attention's window."""
    row = measured.first + measured.rows // 2
    edge, height = row * t.PATCH, t.PATCH * measured.window / t.columns()
    _show(axes, _paled(t.noisy(), edge), f"A noisy photograph arrives: {measured.decibels(_noisy_patches()):.1f} dB")
    axes.axhspan(edge - height, edge, facecolor="none", edgecolor=WINDOW, linewidth=1.6)
    axes.text(
        t.columns() * t.PATCH / 2,
        edge + 8,
        f"the window, {measured.window:,} patches",
        color=WINDOW,
        weight="bold",
        ha="center",
        va="top",
    )


def _result(axes: Any, measured: Run, name: str) -> None:
    """Draw a method's result. Patches before the first step, and patches that were not streamed, stay noisy."""
    patches = _noisy_patches().clone()
    streamed = measured.streams[name].patches()
    start = measured.first * t.columns()
    patches[start : start + len(streamed)] = streamed
    pixels = _paled(t.to_pixels(patches), (measured.first + measured.rows) * t.PATCH)
    _show(axes, pixels, f"{NAMES[name]}: {measured.decibels(streamed):.1f} dB", COLOURS[name])


def _show(axes: Any, pixels: Tensor, title: str, colour: str = "black") -> None:
    """Draw an image (height, width, 3) with a title."""
    axes.imshow(pixels.clamp(0, 1).numpy())
    axes.set_title(title, color=colour)
    axes.axis("off")


def _noisy_patches() -> Tensor:
    return t.to_patches(t.noisy())


def _paled(pixels: Tensor, edge: int) -> Tensor:
    """Return the image, with all rows from `edge` on faded towards white."""
    rows = torch.arange(len(pixels))[:, None, None]
    return torch.where(rows < edge, pixels.clamp(0, 1), 1 - PALE * (1 - pixels.clamp(0, 1)))


# ---- figures ---------------------------------------------------------------------------------------------------------


def _errors(axes: Any, measured: Run) -> None:
    """Draw the relative errors of the two kinds of Nyström attention."""
    exact = max(measured.streams[EXACT].errors)
    axes.set_title(f"Error, relative to full attention ({EXACT}: {exact:.0e} at most)")
    curves = {name: measured.streams[name].errors for name in (CONTINUAL, FIXED)}
    _curves(axes, measured, curves)
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(lambda error, _: f"{error:.0%}")
    _names(axes, curves, lambda error: f"{error:.0%}")


def _times(axes: Any, measured: Run) -> None:
    """Draw the time of a step of each method on a logarithmic axis."""
    axes.set(title="Time of a step", xlabel="row of patches", yscale="log")
    curves = {name: measured.full if name == FULL else measured.streams[name].times for name in SCHEMES}
    _curves(axes, measured, curves)
    axes.yaxis.set_major_formatter(lambda time, _: readable(time))
    axes.minorticks_off()
    full = measured.step_time(FULL)
    _names(axes, curves, lambda time: readable(time) + ("" if time == full else f", 1 / {full / time:,.0f}"))


def _curves(axes: Any, measured: Run, curves: dict[str, list[float]]) -> None:
    """Draw one curve for each method, over the rows of patches."""
    rows = range(measured.first, measured.first + measured.rows)
    for name, figures in curves.items():
        axes.plot(rows, figures, color=COLOURS[name], linewidth=1.4)
    axes.grid(True, axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)


def _names(axes: Any, curves: dict[str, list[float]], told: Callable[[float], str]) -> None:
    """Write the name and the median of each curve beside it. A name that would overlap the name above is moved down."""
    axes.autoscale_view()
    to_axes = (axes.transData + axes.transAxes.inverted()).transform
    height = 1 + GAP
    for name, figures in sorted(curves.items(), key=lambda item: -statistics.median(item[1])):
        median = statistics.median(figures)
        height = min(float(to_axes((0, median))[1]), height - GAP)
        style = {"color": COLOURS[name], "fontsize": 8, "weight": "bold", "va": "center", "linespacing": 1.1}
        axes.text(1.02, height, f"{name}\n{told(median)}", transform=axes.transAxes, **style)


def _operations(axes: Any, measured: Run) -> None:
    """Draw two bars for each method on a logarithmic axis: the paper's count, pale, and below it the executed count."""
    n, m = measured.window, measured.landmarks
    for place, (name, scheme) in enumerate(reversed(SCHEMES.items())):
        for offset, count, alpha, by in (
            (-0.2, paper_operations(scheme, n, m, t.WIDTH), 0.4, "by the paper"),
            (0.2, executed_on_average(scheme, n, m, t.WIDTH), 1.0, "executed"),
        ):
            axes.barh(place + offset, count, height=0.38, color=COLOURS[name], alpha=alpha)
            axes.text(count * 1.15, place + offset, f"{_short(count)} {by}", va="center", fontsize=7.5)
    most = paper_operations(SCHEMES[FULL], n, m, t.WIDTH)
    axes.set(title="Operations of a step, on average", xscale="log", xlim=(1e3, 50 * most))
    axes.set_yticks(range(len(SCHEMES)), list(reversed(SCHEMES)))
    axes.invert_yaxis()
    axes.minorticks_off()


def _short(count: float) -> str:
    """Return a number in a short form, such as 79 M or 12 k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:.0f}"
