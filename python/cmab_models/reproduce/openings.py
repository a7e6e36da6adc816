"""The opening of each run: the losses of its first steps, and its scores after these steps. They show whether changed
code gives the same numbers.

If the code of a system has changed since a result was trained, the result is out of date and is trained again. But not
every change of code changes a number. If every first loss and score equals the recorded one to rounding, `confirm`
accepts the result for the new code, and reports this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..training import Run, first_losses
from .experiments import EXPERIMENTS

STEPS = 10
"""The number of steps that are compared."""
NEAR = 2e-3
"""The largest difference that other processors and versions of torch cause in this number of steps, relative to numbers
larger than 1.

The largest difference seen is 1e-3: one commit on an AMD EPYC and on a Xeon with AMX differs in 5 of 5,000 few-shot
answers.
"""
FEW = {"evaluation_batches": 1, "plays": 50, "seeds": 1}
"""Settings of tasks that let the scores be computed in a second."""

Opening = dict[str, float]


def opening(run: Run) -> Opening:
    """Return the losses of the first steps of a run, by step, and the scores after them, by name."""
    few = {name: value for name, value in FEW.items() if name in asdict(run.task)}
    short = replace(run, task=run.task.changed(few) if few else run.task)
    model, losses = first_losses(short, STEPS)
    scores: dict[str, float] = short.task.evaluate(model.eval())
    return {**{f"loss {step}": loss for step, loss in enumerate(losses, 1)}, **scores}


def differing(one: Opening, other: Opening) -> list[str]:
    """Return the names of the numbers that differ by more than rounding, or that are in only one of the two
    openings."""
    return [name for name in one | other if not _near(one.get(name), other.get(name))]


def _near(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and abs(a - b) <= NEAR * max(1.0, abs(a), abs(b))


def first_runs() -> Iterable[tuple[str, Run]]:
    """Yield the name of each experiment and, for each of its systems, the run of the first seed."""
    for each in EXPERIMENTS:
        yield from ((each.name, run) for run in replace(each, seeds=each.seeds[:1]).runs(Path("unused")))


def record(file: Path, report: Callable[[str], None]) -> None:
    """Add the openings of all runs to the JSON of results."""
    told = json.loads(file.read_text())
    told["openings"] = {}
    for name, run in first_runs():
        report(f"{run.system} in {name}")
        told["openings"].setdefault(name, {})[run.system] = _alone(run)
    file.write_text(json.dumps(told, indent=1) + "\n")


def confirm(file: Path, report: Callable[[str], None]) -> list[str]:
    """Accept the results of changed code if their openings are the same as before. Return the runs with another
    opening, and the reasons."""
    told: dict[str, Any] = json.loads(file.read_text())
    failed = []
    for name, run in first_runs():
        digest, known = run.recorded()["code"], told["code"][name]
        if known[run.system] == digest:
            continue
        if others := differing(told["openings"][name][run.system], _alone(run)):
            failed.append(f"{run.system} in {name}: another {', '.join(others[:3])}")
            continue
        # The code with which it was trained.
        told.setdefault("confirmed", {}).setdefault(name, {}).setdefault(run.system, known[run.system])
        known[run.system] = digest
        report(f"{run.system} in {name}: begins as before")
    file.write_text(json.dumps(told, indent=1) + "\n")
    return failed


def _alone(run: Run) -> Opening:
    """Return an opening, computed on one thread, as in a run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return opening(run)
    finally:
        torch.set_num_threads(threads)
