"""Sines from ten points of each, as trained models and untrained ones continue them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import TRUTH, colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 4
"""The number of held-out sines that are shown."""


def figure(task: Any, models: Mapping[str, nn.Module]) -> Figure:
    """Return a row for each model: held-out sines, its curves, and dashed the curves of an untrained model of the
    task's size. Titles give both errors, over all held-out sines."""
    from matplotlib import pyplot as plt

    question, grid = task.held_out(), torch.linspace(-5, 5, 200).view(1, -1, 1)
    key, value = question.key[:SHOWN], question.value[:SHOWN]
    truth = task.exact(question._replace(query=grid.double(), key=key.double(), value=value.double()))
    made, rows = plt.subplots(
        len(models), SHOWN, figsize=(3 * SHOWN, 2.2 * len(models)), sharex=True, sharey=True, squeeze=False
    )
    for row, (name, model) in zip(rows, models.items(), strict=True):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            untrained = task.model(name.partition(",")[0]).eval()
        curves = [(each, _answers(each, grid, key, value)) for each in (model, untrained)]
        for i, axes in enumerate(row):
            axes.plot(grid.flatten(), truth[i, :, 0], color=TRUTH, linewidth=1, label="sine")
            for (_, answers), style, label in zip(curves, ("-", "--"), (name, "untrained"), strict=True):
                axes.plot(grid.flatten(), answers[i, :, 0], style, color=colour(name), linewidth=1.2, label=label)
            axes.plot(key[i, :, 0], value[i, :, 0], "k.", markersize=4)
            axes.set(ylim=(-8, 6))
        trained, before = (task.evaluate(each)["mse"] for each, _ in curves)
        row[0].set(title=f"{name}: {trained:.2g}, untrained {before:.2g}")
        row[0].legend(frameon=False, fontsize=7, loc="lower left", ncols=3)
    made.set_layout_engine("constrained")
    return made


@torch.no_grad()
def _answers(model: nn.Module, grid: Tensor, key: Tensor, value: Tensor) -> Tensor:
    device = next(model.parameters()).device
    answers: Tensor = model(grid.expand(len(key), -1, -1).to(device), key.to(device), value.to(device))
    return answers.cpu()
