"""Intensities over a held-out sequence of events, and the predicted probabilities of the marks that occurred."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ..data.hawkes import Hawkes
from ..point_processes import PointProcess
from ..tasks.events import EventTask, HawkesTask
from . import TRUTH, colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 24
"""The number of events at the end of the sequence that are drawn. The models also read all events before these."""


def figure(task: EventTask, models: Mapping[str, nn.Module]) -> Figure:
    """Draw the intensity of the next event between the last events of a sequence, and below it the probability of each
    mark that occurred.

    The unit of the clock is the task's `period`: departures are in days. For a Hawkes process the exact intensity is
    drawn as well.
    """
    from matplotlib import pyplot as plt

    times, marks = task.shown()
    shown = times[-SHOWN:]
    events, at = shown / task.period, torch.linspace(float(shown[0]), float(shown[-1]), 2000, dtype=torch.float64)
    made, (above, below) = plt.subplots(2, 1, figsize=(9, 4.4), sharex=True, height_ratios=(2, 1))
    if isinstance(task, HawkesTask):
        above.plot(at, Hawkes().intensity(times, marks, at).sum(1), color=TRUTH, linewidth=1, label="exact")
    for name, model in cast("Mapping[str, PointProcess]", models).items():
        before, kinds, asked = (part.to(next(model.parameters()).device) for part in (times, marks, at))
        with torch.no_grad():
            curve = model.intensity(before, kinds, asked).cpu() * task.period
            given = model.log_prob(before.unsqueeze(0), kinds.unsqueeze(0)).mark[0, -SHOWN:].exp().cpu()
        above.plot(at / task.period, curve, color=colour(name), linewidth=1.2, label=name)
        below.plot(events, given, "o", color=colour(name), markersize=4, alpha=0.7)
    above.plot(events, torch.zeros_like(events), "|", color="k", markersize=10, clip_on=False)
    above.set_ylim(bottom=0)
    above.set_title("Intensity of the next event, whatever its mark; events below")
    above.legend(frameon=False)
    below.set_ylim(0, 1)
    below.set_title("Probability of the mark that came")
    below.set_xlabel("time" if isinstance(task, HawkesTask) else "days")
    made.set_layout_engine("constrained")
    return made
