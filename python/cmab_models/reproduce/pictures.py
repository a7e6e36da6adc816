"""The pictures on the page of results: the tasks' pictures, with the models of the first seed, and the costs of
contexts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from ..cli import kept
from ..pictures import PICTURES, context, draw, save
from ..training import Run
from .runner import finished


def drawn(runs: Mapping[str, Sequence[Run]], costs: list[context.Cost], folder: Path) -> list[tuple[str, Path]]:
    """Draw all pictures of the runs, by experiment, into the folder; return their titles and files."""
    made = []
    for task in dict.fromkeys(run.task.name for each in runs.values() for run in each if run.task.name in PICTURES):
        models = _models(task, runs)
        if models:
            first = next(run for each in runs.values() for run in each if run.task.name == task)
            draw(first.task, models, folder / f"{task}.png")
            made.append((task, folder / f"{task}.png"))
    save(lambda: context.figure(costs), folder / "context.png")
    return [*made, ("memory and time against the size of the context", folder / "context.png")]


def _models(task: str, runs: Mapping[str, Sequence[Run]]) -> dict[str, nn.Module]:
    """Return the models of the first seed by system. The name has the part of the experiment's name after the comma."""
    found = {}
    for experiment, each in runs.items():
        variant = experiment.partition(", ")[2]
        for run in each:
            if run.task.name == task and run.seed == 0 and finished(run):
                found[f"{run.system}, {variant}" if variant else run.system] = kept(run)
    return found
