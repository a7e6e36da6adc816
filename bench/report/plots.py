"""The plots of a run: memory and time along each axis, and the gains over peers."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cmab_kernels.measure import readable

from ..runs import DEFINITION, BadRun, Row, Run, Spread, called, fastest
from . import drawing
from .drawing import INK, OURS, PAPER, STYLE, Panel, Style, styles
from .series import Series, axes, series, words

MIB = 2**20
RESOLUTION = {"cpu": 0.3, "cuda": 0.001}
"""Peaks of memory below this number of MiB cannot be distinguished, and are drawn at this value."""

NAMES = {
    "N": "keys",
    "n": "tokens of the window",
    "m": "landmarks",
    "D": "width of a head",
    "H": "heads",
    "B": "batch",
    "L": "queries",
    "C": "width of the model",
    "t": "tokens a call",
}
"""The names of axes."""


def panels(run: Run, scan: str) -> list[Panel]:
    """The panels of one operator: its curves along each axis."""
    return [
        panel for number, axis in enumerate(axes(run, scan)) for panel in _curves(run, scan, axis, main=number == 0)
    ]


def _curves(run: Run, scan: str, axis: str, main: bool) -> Iterator[Panel]:
    """Memory only along the main axis, and time along all axes."""
    for number, one in enumerate(series(run, scan, axis)):
        draw = {"Memory": partial(_draw_memory, one, RESOLUTION[run.device])} if main else {}
        draw["Time"] = partial(_draw_time, one)
        for title, drawn in draw.items():
            yield _curve(run, one, number, title, drawn)


def _curve(run: Run, one: Series, number: int, title: str, drawn: Callable[[Mapping[str, Style], Axes], None]) -> Panel:
    chosen = {name: styles(run)[name] for name in run.implementations if name in one.lines}
    return Panel(
        name=slug(one.scan, title, one.axis, str(number)),
        title=f"{title} against {NAMES.get(one.axis, one.axis)}",
        about=f"{one.scan}: {words(one.fixed)}",
        alt=f"{title} of {one.scan} against {NAMES.get(one.axis, one.axis)}, {words(one.fixed)}. {_said(one, title)}",
        draw=partial(drawn, chosen),
        legend={called(name): style for name, style in chosen.items()},
    )


def _said(one: Series, title: str) -> str:
    """The values at the ends of each curve, in words."""
    tell: Callable[[Row], str] = {
        "Time": lambda row: readable(row.seconds.median),
        "Memory": lambda row: drawing.mebibytes(max(0, row.scratch) / MIB),
    }[title]
    ends = ((name, rows[0], rows[-1]) for name, rows in one.lines.items())
    return "; ".join(
        f"{name}: {tell(first)} at {_value(first, one)}, {tell(last)} at {_value(last, one)}"
        for name, first, last in ends
    )


def _value(row: Row, one: Series) -> str:
    return words({one.axis: row.parameters[one.axis]})


def slug(*parts: str) -> str:
    """A name for files and identifiers."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", "-".join(parts)).strip("-").lower()


# ---- curves ----------------------------------------------------------------------------------------------------------


def _draw(one: Series, figure: Callable[[Row], Spread], chosen: Mapping[str, Style], axes: Axes) -> list[Spread]:
    """Draw a figure of the rows along the axis, shade the range of its quartiles, and return all of its values."""
    every = []
    for name, style in chosen.items():
        rows = one.lines[name]
        found = [figure(row) for row in rows]
        where = [float(row.parameters[one.axis]) for row in rows]
        middle, low, high = (list(ends) for ends in zip(*found, strict=True))
        axes.plot(where, middle, **style.line())
        if low != high:
            axes.fill_between(where, low, high, color=style.colour, alpha=0.2, linewidth=0)
        every += found
    return every


def _draw_time(one: Series, chosen: Mapping[str, Style], axes: Axes) -> None:
    every = _draw(one, lambda row: row.seconds, chosen, axes)
    drawing.log_scale(axes.yaxis, [bound for spread in every for bound in spread], readable)
    _name_axes(axes, one, "time, median and quartiles")


def _draw_memory(one: Series, least: float, chosen: Mapping[str, Style], axes: Axes) -> None:
    """Values that are too small to measure are drawn as the smallest measurable value."""
    every = _draw(one, lambda row: Spread(*3 * [max(least, row.scratch / MIB)]), chosen, axes)
    drawing.log_scale(axes.yaxis, [least, 20 * least, *(peak.median for peak in every)], drawing.mebibytes, pad=2)
    axes.axhline(least, color=INK, linewidth=0.6, linestyle=":", zorder=0)
    note = f"resolution {drawing.mebibytes(least)}"
    axes.text(0.99, least, note, transform=axes.get_yaxis_transform(), fontsize="small", ha="right", va="top")
    _name_axes(axes, one, "peak of memory beyond inputs and results")


def _name_axes(axes: Axes, one: Series, name: str) -> None:
    drawing.name_y(axes, name)
    axes.set_xlabel(NAMES.get(one.axis, one.axis), labelpad=2)
    drawing.sizes_axis(axes, one.values)


# ---- gains -----------------------------------------------------------------------------------------------------------

CLEAR = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6}
"""The outline of labels that are drawn over lines."""


def overview(run: Run) -> Panel | None:
    """Every operator on one line: a dot for each group, against the fastest of its peers."""
    found = {scan: [gain for _, gain in gains(run, scan)] for scan in run.scans}
    found = {scan: values for scan, values in found.items() if values}
    if not found:
        return None
    return Panel(
        name="overview",
        title="How many times as fast as the fastest peer",
        about="A dot is one group; the bar is the median of an operator. To the left of 1 we are slower.",
        alt="; ".join(f"{scan}: {drawing.times(min(v))} to {drawing.times(max(v))}" for scan, v in found.items()),
        draw=partial(_draw_overview, found),
        legend={},
        height=0.34 * len(found) + 0.1,
        left=0.16,
    )


def gains(run: Run, scan: str) -> list[tuple[Row, float]]:
    """For each group with a baseline that is not ours: our fastest kernel, and the baseline's time in units of ours."""
    found = []
    for group in run.groups.values():
        ours = fastest(group)
        if (
            group[0].scan == scan
            and ours
            and ours.ratio
            and any(row.implementation == ours.baseline and row.peer for row in group)
        ):
            found.append((ours, 1 / ours.ratio.median))
    return found


def _draw_overview(found: Mapping[str, Sequence[float]], axes: Axes) -> None:
    every = [1.0, *(gain for values in found.values() for gain in values)]
    drawing.log_scale(axes.xaxis, [0.7 * min(every), 1.25 * max(every)], drawing.times)
    for place, (scan, values) in enumerate(found.items()):
        axes.plot(
            values,
            [place] * len(values),
            linestyle="",
            marker="o",
            markersize=5,
            color=OURS,
            alpha=0.55,
            markeredgewidth=0,
        )
        axes.plot(statistics.median(values), place, marker="|", markersize=11, markeredgewidth=2, color=INK)
        axes.text(
            0.005, place - 0.27, scan, fontsize=7.5, va="bottom", transform=axes.get_yaxis_transform(), bbox=CLEAR
        )
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_ylim(len(found) - 0.5, -0.75)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("times as fast", labelpad=2)


# ---- plots for the pages ---------------------------------------------------------------------------------------------

FIRST = "nn.CMAB"
"""The scan of the plot on the first page."""

TITLES = {
    FIRST: "A CMAB that has read N points is given one more",
    "prefix_attention_states": "A loss after each of N events, forward and backward",
}
"""Scan -> the content of its plot, in words."""

LINES = {
    FIRST: {
        "cmab_kernels.nn.CMAB.update": "CMAB.update\nreads the one",
        "cmab_kernels.nn.CMAB.forward": "CMAB.forward\nreads all again",
        "the block with scaled_dot_product_attention": "torch's attention\nreads all again",
    }
}
"""Scan -> implementation -> the text beside its line, if that is not its name."""

SHOWN = {"prefix_attention_states": {"pass": "forward + backward", "B": 16, "L": 8, "D": 16}}
"""Scan -> the sizes and choices of its plot, if they are not determined by the curves."""


def _shown(run: Run, scan: str) -> Series:
    """The curves of a scan along N that have most points: our kernels and their peers, without the definition."""
    wanted = SHOWN.get(scan, {}).items()
    found = [one for one in series(run, scan, "N") if wanted <= one.fixed.items()] if scan in run.scans else []
    if not found:
        raise BadRun(f"{run.path}: no curve of {scan} for its plot; measure it")
    one = max(found, key=lambda one: (len(one.values), len(one.lines)))
    return replace(one, lines={name: rows for name, rows in one.lines.items() if name != DEFINITION})


def digest(run: Run, scan: str) -> str:
    """A short hash of the rows that a plot shows."""
    rows = [
        (name, row.group, row.seconds.median, row.seconds.low, row.seconds.high, row.scratch)
        for name, rows in _shown(run, scan).lines.items()
        for row in rows
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def picture(run: Run, scan: str, path: Path) -> None:
    """Memory and time side by side, for a page 800 pixels wide; the file names its run and its rows."""
    one = _shown(run, scan)
    chosen = {name: styles(run)[name] for name in run.implementations if name in one.lines}
    with matplotlib.rc_context(STYLE | {"font.size": 12}):
        figure = Figure((8, 4.5), facecolor=PAPER)
        figure.text(0.015, 0.975, TITLES[scan], fontsize=15, fontweight="bold", va="top")
        about = textwrap.fill(f"{words(one.fixed)}; {run.processor}", 84)
        figure.text(0.015, 0.9, about, fontsize=10.5, va="top", linespacing=1.35)
        figures: dict[str, tuple[Callable[[Mapping[str, Style], Axes], None], Callable[[Row], float]]] = {
            "memory beyond inputs, results": (
                partial(_draw_memory, one, least := RESOLUTION[run.device]),
                lambda row: max(least, row.scratch / MIB),
            ),
            "time": (partial(_draw_time, one), lambda row: row.seconds.median),
        }
        for (title, (drawn, value)), left in zip(figures.items(), (0.125, 0.615), strict=True):
            axes = figure.add_axes((left, 0.13, 0.21, 0.595))
            drawn(chosen, axes)
            axes.set_title(title, loc="left", fontsize=12, x=-0.4)
            drawing.name_ends(
                axes, {_beside(scan, name): (value(one.lines[name][-1]), style) for name, style in chosen.items()}
            )
        figure.savefig(
            path, format="png", dpi=200, metadata={"Software": None, "Run": run.name, "Digest": digest(run, scan)}
        )


def _beside(scan: str, implementation: str) -> str:
    """The text beside the line of an implementation."""
    return LINES.get(scan, {}).get(implementation, called(implementation).replace(", ", ",\n"))
