"""How errors are distributed over questions, where a mean hides a few large ones."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import TRUTH, colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(task: Any, models: Mapping[str, nn.Module]) -> Figure:
    """Draw, for each model, the share of held-out questions whose squared error is at most x. A dot marks the mean,
    which is the score; dotted is the mean of all answers as the answer to every question."""
    from matplotlib import pyplot as plt

    made, axes = plt.subplots(figsize=(4.4, 3.0))
    answer = task.held_out().answer
    constant = (answer - answer.mean((0, 1))).square().mean((1, 2))
    lines = [
        (name, task.errors(model), colour(name), style)
        for (name, model), style in zip(models.items(), cycle(("-", "--", "-.")), strict=False)
    ]
    for name, errors, shade, style in [*lines, ("the mean of all answers", constant, TRUTH, ":")]:
        ordered, mean = errors.sort().values, errors.mean()
        shares = torch.arange(1, len(ordered) + 1) / len(ordered)
        axes.plot(ordered, shares, style, color=shade, linewidth=1.2, label=f"{name}: {mean:.2g}")
        axes.plot(mean, (ordered <= mean).double().mean(), "o", color=shade, markersize=3)
    axes.set(title="share of questions", xlabel="squared error, at most", xscale="log", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=7)
    made.set_layout_engine("constrained")
    return made
