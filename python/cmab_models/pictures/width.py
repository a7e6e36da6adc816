"""The error of least squares by the width of the features. Paper 004 asks how wide they have to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..regressors import MLP
from . import TRUTH, colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(task: Any, models: Mapping[str, nn.Module]) -> Figure:
    """Draw the errors of `Regressor`s, with a line for each system; names are such as "intention" or "intention, width
    8"."""
    from matplotlib import pyplot as plt

    made, axes = plt.subplots(figsize=(3.6, 2.8))
    errors: dict[str, dict[int, float]] = {}
    for name, model in models.items():
        errors.setdefault(name.partition(",")[0], {})[_width(model)] = task.evaluate(model)["mse"]
    for system, by_width in errors.items():
        axes.plot(*zip(*sorted(by_width.items()), strict=True), "o-", color=colour(system), label=system)
    axes.axhline(task.references()["mean"], color=TRUTH, linestyle=":", label="the mean of all answers")
    axes.axvline(task.variables, color="0.8", zorder=0, label=f"{task.variables} variables")
    axes.set(title="mean squared error", xlabel="width of the features", xscale="log", yscale="log")
    axes.legend(frameon=False, fontsize=7)
    made.set_layout_engine("constrained")
    return made


def _width(model: Any) -> int:
    """Return the input width of the last linear layer. This is the head. An `MLP` has no head: there it is the last
    layer."""
    head: Any = model.layers[-1] if isinstance(model, MLP) else model.head
    return int(head.in_features)
