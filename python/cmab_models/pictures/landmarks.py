"""Accuracy and time of a step, by the number of landmarks."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import nn

from . import TRUTH, colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(task: Any, models: Mapping[str, nn.Module]) -> Figure:
    """Draw the two scores, such as the accuracy over windows and in streams, and the median time of a step on this
    machine, with a point for each model.

    A model without landmarks attends to all tokens; its point is at the length of the window.
    """
    from matplotlib import pyplot as plt

    made, (accuracy, times) = plt.subplots(1, 2, figsize=(7.2, 2.8))
    for label, value in task.references().items():
        accuracy.axhline(value, color=TRUTH, linestyle=":")
        accuracy.annotate(label, (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7)
    for name, model in models.items():
        scores, landmarks = task.evaluate(model), _landmarks(model, task.sequence_len)
        names = list(scores)[:2]
        for score, shape in zip(names, "ox", strict=True):
            accuracy.plot(landmarks, scores[score], shape, mfc="none" if shape == "o" else None, color=colour(name))
        times.plot(
            landmarks, median(step["milliseconds"] for step in task.stream(model)), "o", color=colour(name), label=name
        )
    accuracy.set(title=f"o {names[0]}, x {names[1]}", xlabel="landmarks", xscale="log", ylim=(0, 1))
    times.set(title="time of a step, ms", xlabel="landmarks", xscale="log", ylim=(0, None))
    times.legend(frameon=False, fontsize=7)
    made.set_layout_engine("constrained")
    return made


def _landmarks(model: Any, sequence_len: int) -> int:
    """Return the number of landmarks of the last layer."""
    return getattr(model.layers[-1].self_attn, "num_landmarks", sequence_len)
