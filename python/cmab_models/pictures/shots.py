"""Accuracy on classes that were never trained on, by the number of examples."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any

from torch import nn

from . import OTHER, OURS, TRUTH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOTS = (1, 2, 3, 5, 10)


def figure(task: Any, models: Mapping[str, nn.Module]) -> Figure:
    """Draw the accuracy of each model with 1 to 10 examples of a class, if there are as many, and the accuracy of
    nearest means."""
    from matplotlib import pyplot as plt

    made, axes = plt.subplots(figsize=(3.6, 2.8))
    shots = [number for number in SHOTS if number <= task.most_shots()]
    tasks = [task.changed({"shots": number}) for number in shots]
    for (name, model), marker in zip(models.items(), cycle("osv^"), strict=False):
        accuracies = [each.evaluate(model)["accuracy"] for each in tasks]
        axes.plot(shots, accuracies, marker + "-", color=OTHER if "attention" in name else OURS, label=name)
    axes.plot(
        shots, [each.references()["nearest mean"] for each in tasks], ":", color=TRUTH, label="nearest mean of pixels"
    )
    axes.set(title=f"accuracy, {task.ways} classes", xlabel="examples of a class", xticks=shots)
    axes.legend(frameon=False, fontsize=7)
    made.set_layout_engine("constrained")
    return made
