"""Drawing of figures: one panel each, as wide as a phone, with the same colour for the same implementation everywhere.

A panel becomes an SVG for a page, or is placed with other panels on a sheet, a PNG file. In the SVG, text remains text
and has the colours of the page.
"""

from __future__ import annotations

import html
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from ..runs import DEFINITION, Run, is_ours

INK, FAINT, PAPER = "#1f2328", "#d8dee5", "#fffffe"
"""The colours of text, grid and background of a sheet; on a page, the colours of the page are used."""

OURS = "#d55e00"
PEERS = ("#0072b2", "#009e73", "#9a4ea3", "#a6761d", "#3d8fb8", "#c2578a")
"""Colours after Okabe and Ito, dark enough for white and light enough for black; markers help where colours do not."""

GREY = "#7d8590"
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))

WIDTH = 3.75
"""Inches of a panel: with 390 pixels, a phone shows its text at the intended size."""

LEFT, RIGHT, TITLE, LINE, UNIT, BOTTOM, ENTRY = 0.68, 0.16, 0.3, 0.145, 0.26, 0.5, 0.17
"""Sizes in inches: the margins left and right of the axes; the heights of the title, of a line under it, and of the
heading of the axes; the height of ticks and the name of the axis; the height of a line of the legend."""

DPI = 160
NAME_SIZE, NAME_SPACING = 10, 1.2
"""The size of names beside lines, in points, and the height of a line of text as a multiple of this size."""

LEGEND: dict[str, Any] = {"fontsize": 7.2, "borderaxespad": 0, "labelspacing": 0.35, "columnspacing": 1.2}

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "cmab_kernels",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Style:
    """How a line looks."""

    colour: str
    marker: str
    dashes: Any = "-"
    width: float = 1.4
    rank: int = 2
    """Lines with higher numbers are drawn on top."""

    def line(self) -> dict[str, Any]:
        size = 4.5 if self.width > 2 else 3.5
        return {
            "color": self.colour,
            "marker": self.marker,
            "markersize": size,
            "linestyle": self.dashes,
            "linewidth": self.width,
            "zorder": self.rank,
        }


def styles(run: Run) -> dict[str, Style]:
    """The style of each implementation of a run: ours has one colour and a broad line, our variants are dashed, and the
    definition is grey."""
    ours = [name for name in run.implementations if is_ours(name)]
    peers = [name for name in run.implementations if name not in ours and name != DEFINITION]
    chosen = {
        name: Style(OURS, MARKERS[i % 7], DASHES[i % 3 + 1] if "," in name else "-", 2.6, 4)
        for i, name in enumerate(ours)
    }
    chosen |= {name: Style(PEERS[i % 6], MARKERS[(i + 1) % 7]) for i, name in enumerate(peers)}
    return chosen | {DEFINITION: Style(GREY, "x", DASHES[2], 1.1, 1)}


@dataclass(frozen=True)
class Panel:
    """One plot: its heading, its text for readers who cannot see it, and the function that draws it."""

    name: str
    """A name of letters, digits, - and _ that no other panel has."""
    title: str
    about: str
    alt: str
    draw: Callable[[Axes], None]
    legend: Mapping[str, Style]
    height: float = 2.1
    """Inches of the axes."""
    left: float = LEFT

    @property
    def about_lines(self) -> list[str]:
        return textwrap.wrap(re.sub(r"(?<=\d) ", "\N{NO-BREAK SPACE}", self.about), 58)

    @property
    def legend_columns(self) -> int:
        """The number of columns of the legend: two, if the names are short enough."""
        return 2 if max(map(len, self.legend), default=0) <= 22 else 1

    @property
    def inches(self) -> float:
        return (
            TITLE
            + LINE * len(self.about_lines)
            + UNIT
            + self.height
            + BOTTOM
            + ENTRY * math.ceil(len(self.legend) / self.legend_columns)
        )

    def onto(self, figure: Figure, x: float = 0.0, y: float = 0.0) -> None:
        """Draw the panel with its upper left corner `x` and `y` inches from that of the figure."""
        wide, high = figure.get_size_inches()

        def at(right: float, down: float) -> tuple[float, float]:
            return (x + right) / wide, 1 - (y + down) / high

        figure.text(*at(0.1, 0.07), self.title, fontsize=9.5, fontweight="bold", va="top")
        for number, line in enumerate(self.about_lines):
            figure.text(*at(0.1, TITLE + LINE * number), line, fontsize=7.5, va="top")
        bottom = TITLE + LINE * len(self.about_lines) + UNIT + self.height
        axes = figure.add_axes((*at(self.left, bottom), (WIDTH - self.left - RIGHT) / wide, self.height / high))
        self.draw(axes)
        handles = [Line2D([], [], label=name, **style.line()) for name, style in self.legend.items()]
        if handles:
            corner = at(0.1, bottom + BOTTOM - 0.04)
            figure.legend(handles=handles, loc="upper left", bbox_to_anchor=corner, ncols=self.legend_columns, **LEGEND)


def svg(panel: Panel) -> str:
    """The panel as an SVG for a page: text remains text, in the colours of the page, and every identifier occurs only
    in this panel."""
    with matplotlib.rc_context(STYLE):
        figure = Figure((WIDTH, panel.inches))
        panel.onto(figure)
        written = io.StringIO()
        figure.savefig(
            written,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{panel.name}-", text)
    text = re.sub(r'\b(?:d|x|y|transform)="[^"]*"', _rounded, text)
    text = text.replace(INK, "currentColor").replace(FAINT, "var(--line)").replace(PAPER, "var(--ground)")
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        rf'<svg viewBox="\1" role="img" aria-label="{html.escape(panel.alt)}">',
        text,
    )
    return text.strip()


def _rounded(attribute: re.Match[str]) -> str:
    """Two decimal places are a fiftieth of a pixel, and make a page a third smaller."""
    return re.sub(r"(\.\d\d)\d+", r"\1", attribute[0])


def sheet(panels: Sequence[Panel], path: Path) -> None:
    """All panels in one PNG; each panel is placed in the shortest column."""
    depths = [0.0] * min(4, len(panels))
    places = []
    for panel in panels:
        column = depths.index(min(depths))
        places.append((panel, column * WIDTH, depths[column]))
        depths[column] += panel.inches
    with matplotlib.rc_context(STYLE):
        figure = Figure((WIDTH * len(depths), max(depths)), facecolor=PAPER)
        for panel, x, y in places:
            panel.onto(figure, x, y)
        figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None})


# ---- axes ------------------------------------------------------------------------------------------------------------

STEPS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0))


def log_ticks(low: float, high: float) -> list[float]:
    """Between three and six round numbers from `low` to `high`; fewer if there are not so many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in STEPS:
        found = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(found) >= 3:
            break
    return found[:: math.ceil(len(found) / 6)] if found else [low]


def log_scale(axis: Any, values: Iterable[float], say: Callable[[float], str], pad: float = 1.35) -> None:
    """Make an axis logarithmic, with room around `values` and a few ticks that `say` formats."""
    low, high = min(values := list(values)) / pad, max(values) * pad
    which = axis.axis_name
    getattr(axis.axes, f"set_{which}scale")("log")
    getattr(axis.axes, f"set_{which}lim")(low, high)
    _ticks(axis, log_ticks(low, high), say)


def _ticks(axis: Any, places: Sequence[float], say: Callable[[float], str]) -> None:
    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FixedFormatter([say(place) for place in places]))
    axis.set_minor_locator(NullLocator())


def sizes_axis(axes: Axes, values: Sequence[int]) -> None:
    """Ticks at the measured sizes, without overlapping labels; at even steps if the sizes grow by factors."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= 8:
        axes.set_xscale("log")
        axes.set_xlim(low / (high / low) ** 0.05, high * (high / low) ** 0.05)
        place: Callable[[float], float] = math.log
    else:
        axes.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        place = float
    shown: list[int] = []
    for value in values:
        apart = 0.05 + 0.018 * len(size(value))
        if not shown or place(value) - place(shown[-1]) > apart * (place(high) - place(low)):
            shown.append(value)
    _ticks(axes.xaxis, shown, size)


def size(value: float) -> str:
    """A size as text, such as 1,024, 100k or 2M."""
    for unit, letter in ((1_000_000, "M"), (1_000, "k")):
        if value >= unit and value % unit == 0:
            return f"{value / unit:,.0f}{letter}"
    return f"{value:,.0f}"


def mebibytes(value: float) -> str:
    return f"{value:,.3g} MiB" if value < 1000 else f"{value:,.0f} MiB"


def name_ends(axes: Axes, ends: Mapping[str, tuple[float, Style]]) -> None:
    """Writes each name in the colour of its line, to the right of the axes. The name is at the height of the line's
    end, or lower if another name is there.

    `ends` is name -> the line's last value, and the style of the line.
    """
    to_axes = (axes.transData + axes.transAxes.inverted()).transform
    inches = axes.get_position().height * axes.get_figure().get_size_inches()[1]
    below = math.inf
    for name, (value, line) in sorted(ends.items(), key=lambda end: -end[1][0]):
        size = NAME_SIZE / 72 * NAME_SPACING * len(name.splitlines()) / inches
        height = min(float(to_axes((1, value))[1]), below - size / 2)
        style: dict[str, Any] = {"color": line.colour, "fontsize": NAME_SIZE, "linespacing": NAME_SPACING}
        style["fontweight"] = "bold" if line.width > 2 else "normal"
        axes.text(1.03, height, name, transform=axes.transAxes, va="center", **style)
        below = height - 0.6 * size


def name_y(axes: Axes, name: str) -> None:
    """Write the name of the y axis above the axes, where it can be read horizontally."""
    axes.set_title(name, loc="left", fontsize=7, pad=4)


def times(value: float) -> str:
    """A factor as text, such as 0.73x or 48x."""
    return f"{value:,.0f}x" if value >= 10 else f"{value:.2g}x"
