"""Predictions of a function of a Gaussian process as its points arrive, next to the exact posterior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..data import gp
from ..neural_processes import NeuralProcess
from ..tasks import seeded
from . import TRUTH, colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = (1, 3, 8, 20)
"""The numbers of points after which the prediction is shown."""


def figure(task: Any, models: Mapping[str, nn.Module]) -> Figure:
    """Return a row for each model: mean and two standard deviations after 1, 3, 8 and 20 points, which are read one at
    a time."""
    from matplotlib import pyplot as plt

    generator = seeded(3)
    prior = gp.priors(task.kernel, 1, generator)
    x, y, *_ = gp.draw(prior, max(SHOWN), 0, generator)
    grid = torch.linspace(-2, 2, 200).view(1, -1, 1)
    made, rows = plt.subplots(
        len(models), len(SHOWN), figsize=(3 * len(SHOWN), 2.4 * len(models)), sharey=True, squeeze=False
    )
    for row, (name, model) in zip(rows, cast("Mapping[str, NeuralProcess]", models).items(), strict=True):
        state, device = None, next(model.parameters()).device
        with torch.no_grad():
            for i in range(max(SHOWN)):
                state = model.condition(x[:, i : i + 1].to(device), y[:, i : i + 1].to(device), state)
                if i + 1 in SHOWN:
                    axes = row[SHOWN.index(i + 1)]
                    _band(axes, grid, prior.posterior(x[:, : i + 1], y[:, : i + 1], grid), TRUTH, "exact posterior")
                    _band(axes, grid, model.predict(state, grid.to(device)), colour(name), name)
                    axes.plot(x[0, : i + 1, 0], y[0, : i + 1, 0], "k.", markersize=4)
                    axes.set(title=f"{i + 1} point{'s' if i else ''}", ylim=(-3, 3))
        row[0].legend(frameon=False, fontsize=7, loc="upper left")
    made.suptitle(
        "Points of a function arrive one by one: means, and bands of two standard deviations", x=0.01, ha="left"
    )
    made.set_layout_engine("constrained")
    return made


def _band(axes: Any, grid: Tensor, predicted: Any, shade: str, label: str) -> None:
    x, mean, deviation = grid[0, :, 0], predicted.mean[0].flatten().cpu(), predicted.stddev[0].flatten().cpu()
    axes.fill_between(x, mean - 2 * deviation, mean + 2 * deviation, color=shade, alpha=0.15, linewidth=0)
    axes.plot(x, mean, color=shade, linewidth=1.5, label=label)
