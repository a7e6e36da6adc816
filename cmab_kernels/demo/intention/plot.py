"""The picture of the demo `intention`: the examples, the accuracies, and the predicted points of the cloud."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from .. import STYLE
from . import cloud, digits

OURS, ATTENTION, OTHERS, INK = "#0072B2", "#D55E00", "#B0B0B0", "#333333"  # colour-blind people can distinguish these
TILE = 10
"""The distance from one digit to the next, in pixels of a digit."""


def draw(lessons: digits.Lessons, outcomes: list[digits.Outcome], comparison: cloud.Comparison, target: Path) -> None:
    """Write the picture to `target`. It shows the first draw of examples, and the first draw of pairs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure: Any = plt.figure(figsize=(12.5, 8.4))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
        top, bottom = figure.subfigures(2, 1, height_ratios=(1.05, 1))
        shown, accuracy = top.subplots(1, 2, width_ratios=(1, 1.2))
        _digits(shown, lessons, next(one for one in outcomes if one.name == digits.KERNEL))
        _bars(accuracy, outcomes, len(lessons.query))
        _clouds(bottom.subplots(1, 3, sharex=True, sharey=True), comparison)
        figure.savefig(target, dpi=160)
        plt.close(figure)


# ---- digits ----------------------------------------------------------------------------------------------------------


def _digits(axes: Any, lessons: digits.Lessons, learner: digits.Outcome) -> None:
    """Draw the examples, one column for each class.

    Below them, draw an unseen image of each class with its predicted class.
    """
    pixels, classes = digits.images()
    support, query, predicted = (
        lessons.support[0].view(digits.CLASSES, digits.SHOTS),
        lessons.query[0],
        learner.predicted[0],
    )
    below = digits.SHOTS + 0.9
    for column in range(digits.CLASSES):
        for row in range(digits.SHOTS):
            _tile(axes, pixels[support[column, row]], column, row)
        unseen = int((classes[query] == column).nonzero()[0])
        _tile(axes, pixels[query[unseen]], column, below)
        taken = int(predicted[unseen])
        place = {"x": column * TILE + 4, "y": (below + 1) * TILE + 2.5, "ha": "center", "va": "center"}
        axes.text(**place, s=str(taken), weight="bold", color=OURS if taken == column else ATTENTION)
    axes.text(0, below * TILE - 2.5, "Its answers for unseen images")
    axes.set(xlim=(-0.5, digits.CLASSES * TILE), ylim=((below + 1.5) * TILE, -0.5), aspect="equal", anchor="NW")
    axes.set_title(f"Intention learns digits from these {digits.SHOTS} examples of each")
    axes.axis("off")


def _tile(axes: Any, pixels: Tensor, column: int, row: float) -> None:
    """Draw one digit, (64,) from 0 to 1, at a column and a row."""
    left, top = column * TILE, row * TILE
    axes.imshow(pixels.view(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1, extent=(left, left + 8, top + 8, top))


def _bars(axes: Any, outcomes: list[digits.Outcome], draws: int) -> None:
    """Draw a bar for each learner's accuracy. The bars of this package and of attention have special colours."""
    colours = {digits.KERNEL: OURS, digits.LINEAR: OURS, digits.ATTENTION: ATTENTION}
    for place, one in enumerate(outcomes):
        percent = 100 * one.accuracy
        named = {"color": "white", "weight": "bold"} if one.name in colours else {"color": INK}
        axes.barh(place, percent, height=0.68, color=colours.get(one.name, OTHERS))
        axes.text(1.5, place, one.name, va="center", **named)
        axes.text(percent + 1, place, f"{percent:.1f} %", va="center", color=INK)
    spread = max(100 * one.error for one in outcomes)
    axes.set(
        xlim=(0, 100),
        yticks=[],
        title=f"Unseen digits recognised, mean of {draws} draws of examples (standard error {spread:.1f} %)",
    )
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter("{x:g} %")


# ---- the cloud -------------------------------------------------------------------------------------------------------


def _clouds(panels: Any, comparison: cloud.Comparison) -> None:
    """Draw the cloud before the map, and the clouds that Intention and attention predict."""
    source, target, pairs = cloud.source(), cloud.target(), comparison.pairs[0]
    given, by_intention, by_attention = panels
    _cloud(given, source, source[pairs], INK)
    given.set_title(f"A cloud before it is turned, shrunk and shifted; {cloud.PAIRS} results are known")
    for axes, name, colour, said in (
        (by_intention, cloud.INTENTION, OURS, "Intention finds the map"),
        (by_attention, cloud.ATTENTION, ATTENTION, "Attention averages the known results"),
    ):
        axes.scatter(*target.T.numpy(), s=5, color="0.88", linewidths=0)
        _cloud(axes, comparison.predicted[name][0], target[pairs], colour)
        axes.set_title(f"{said}: error {_share(comparison.errors[name])} of the radius", color=colour)
    for axes in panels:
        axes.set_aspect("equal")
        axes.axis("off")


def _cloud(axes: Any, points: Tensor, marked: Tensor, colour: str) -> None:
    """Draw points, coloured by their place before the map, and the numbered points of the pairs."""
    axes.scatter(*points.T.numpy(), s=5, c=cloud.source()[:, 0].numpy(), cmap="cividis", linewidths=0)
    for number, (x, y) in enumerate(marked.tolist(), start=1):
        axes.scatter(x, y, s=130, facecolor="white", edgecolor=colour, linewidth=1.4, zorder=3)
        axes.text(
            x, y, str(number), ha="center", va="center_baseline", fontsize=8, weight="bold", color=colour, zorder=4
        )


def _share(error: float) -> str:
    """Return an error as a percentage, or in scientific notation if it is tiny."""
    return f"{100 * error:.0f} %" if error > 0.005 else f"{error:.0e}"
