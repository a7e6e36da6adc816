"""The width of features that least squares needs, over the number of variables."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING

from . import TRUTH, colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(needed: Mapping[str, Mapping[int, int | None]], widest: int) -> Figure:
    """Draw the needed width by the number of variables, for each system. None means that the widest did not do: an
    arrow at the top. Dotted is a width of as many features as there are variables."""
    from matplotlib import pyplot as plt

    made, axes = plt.subplots(figsize=(3.6, 2.8))
    variables = sorted({each for widths in needed.values() for each in widths})
    for (system, widths), marker in zip(needed.items(), cycle("osvD*"), strict=False):
        found = {each: width for each, width in sorted(widths.items()) if width is not None}
        axes.plot(list(found), list(found.values()), marker + "-", color=colour(system), label=system)
        more = [each for each, width in sorted(widths.items()) if width is None]
        axes.plot(more, [widest] * len(more), "^", color=colour(system), fillstyle="none")
    axes.plot(variables, variables, ":", color=TRUTH, label="as many as variables")
    axes.set(title="width that is needed", xlabel="variables", xscale="log", yscale="log")
    axes.set_xticks(variables, [str(each) for each in variables])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=7)
    made.set_layout_engine("constrained")
    return made
