"""The regret of bandits, play by play."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..tasks.bandit import DELTAS
from . import TRUTH, colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(task: Any, models: Mapping[str, nn.Module]) -> Figure:
    """Draw the cumulative regret for each radius: the mean over wheels, the smallest and the largest, and that of a
    uniform policy."""
    from matplotlib import pyplot as plt

    made, panels = plt.subplots(1, len(DELTAS), figsize=(2.6 * len(DELTAS), 2.6))
    plays = range(1, task.plays + 1)
    for axes, delta, uniform in zip(panels, DELTAS, task.uniform_regrets(), strict=True):
        axes.plot(plays, uniform.mean(0).cumsum(0), color=TRUTH, linestyle=":", label="uniform")
        axes.set(title=f"radius {delta:g}", xlabel="plays", yscale="symlog", ylim=(0, None))
    for (name, model), style in zip(models.items(), ["-", "--", "-.", ":"] * len(models), strict=False):
        for axes, regrets in zip(panels, task.regrets(model), strict=True):
            sums = regrets.cumsum(1)
            axes.plot(plays, sums.mean(0), color=colour(name), linestyle=style, label=name)
            axes.fill_between(plays, sums.amin(0), sums.amax(0), color=colour(name), alpha=0.15, linewidth=0)
    panels[0].set_ylabel("cumulative regret")
    panels[0].legend(frameon=False, fontsize=7)
    made.set_layout_engine("constrained")
    return made
