"""Memory and time of a prediction against the size of the context, as measured: figure 3 of paper 003."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cmab_kernels.measure import peak_memory, seconds

from ..systems import SYSTEMS
from . import colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPARED = ("cmanp", "lbanp", "tnp-d")
SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
BUDGET = 60.0
MOST_MEMORY = 4096.0
"""The limits of a measurement, in seconds and MiB. Contexts for which a system would exceed either are left out."""
TARGETS = 100


class Cost(NamedTuple):
    """The cost of reading a context and predicting 100 targets."""

    system: str
    points: int
    seconds: float
    mebibytes: float
    """Peak memory beyond the points themselves."""


def measured(systems: Iterable[str] = COMPARED, sizes: Iterable[int] = SIZES) -> list[Cost]:
    """Return the costs of systems of the papers' size, without gradients, on one thread."""
    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for system in systems:
            for points in sizes:
                cost = _cost(system, points)
                found.append(cost)
                # The next context is ten times as large. Attention between all its points costs a hundred times as
                # much.
                growth = 100 if system == "tnp-d" else 10
                if growth * cost.seconds > BUDGET or growth * cost.mebibytes > MOST_MEMORY:
                    break
    finally:
        torch.set_num_threads(threads)
    return found


def _cost(system: str, points: int) -> Cost:
    peak = peak_memory(_prepared, system, points, warm_up=(system, 10), limit=600)
    _prepared(system, 10)()  # the first call in a process also sets up threads and libraries
    return Cost(system, points, seconds(_prepared(system, points)), peak.extra / 2**20)


def _prepared(system: str, points: int) -> Any:
    """Return a call that predicts targets from this many points. The points and the model are made before the call."""
    generator = torch.Generator().manual_seed(0)
    x, y, target_x = (
        torch.randn(1, count, width, generator=generator) for count, width in ((points, 2), (points, 3), (TARGETS, 2))
    )
    model: Any = SYSTEMS[system](dim_x=2, dim_y=3).eval()

    def task() -> list[Tensor]:
        with torch.no_grad():
            return [model.predict(model.condition(x, y), target_x).mean]

    return task


def figure(costs: list[Cost]) -> Figure:
    """Return the picture of the costs."""
    from matplotlib import pyplot as plt

    made, (memory, time) = plt.subplots(1, 2, figsize=(9, 3.4))
    for axes, unit, title in (
        (memory, "mebibytes", "Peak memory beyond the points (MiB)"),
        (time, "seconds", "Time, one thread (s)"),
    ):
        for system in dict.fromkeys(cost.system for cost in costs):
            each = [cost for cost in costs if cost.system == system]
            values = [getattr(cost, unit) for cost in each]
            axes.plot([cost.points for cost in each], values, "o-", color=colour(system), markersize=4)
            axes.annotate(f" {system}", (each[-1].points, values[-1]), color=colour(system), va="center")
        axes.set(xscale="log", yscale="log", xlabel="points of the context", title=title)
        axes.grid(True, color="0.92")
        axes.set_xlim(right=4 * max(cost.points for cost in costs))
    made.set_layout_engine("constrained")
    return made
