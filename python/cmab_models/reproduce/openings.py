"""How each run begins: the losses of its first steps and its scores then, which tell whether changed code gives the same numbers.

A result is older than its system if the system's code has changed since, and is trained anew. Not every change changes a number: where
every first loss and score is the same as the recorded one, to rounding, `confirm` lets the result stand for the new code, and says so.
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
"""How many steps are compared."""
NEAR = 2e-3
"""The largest difference, of numbers larger than 1 relative to them, that processors and versions of torch make in so many steps.

The largest seen is 1e-3: one commit on an AMD EPYC and on a Xeon with AMX differs in 5 of 5,000 answers of few shots.
"""
FEW = {"evaluation_batches": 1, "plays": 50, "seeds": 1}
"""Settings of tasks with which the scores take a second."""

Opening = dict[str, float]


def opening(run: Run) -> Opening:
    """Return the losses of the first steps of a run, by number, and the scores after them, by name."""
    few = {name: value for name, value in FEW.items() if name in asdict(run.task)}
    short = replace(run, task=run.task.changed(few) if few else run.task)
    model, losses = first_losses(short, STEPS)
    scores: dict[str, float] = short.task.evaluate(model.eval())
    return {**{f"loss {step}": loss for step, loss in enumerate(losses, 1)}, **scores}


def differing(one: Opening, other: Opening) -> list[str]:
    """Return the names of the numbers that differ by more than rounding, or that one of both lacks."""
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
    """Let results stand for code that has changed and begins as before; return those that begin otherwise, and why."""
    told: dict[str, Any] = json.loads(file.read_text())
    failed = []
    for name, run in first_runs():
        digest, known = run.recorded()["code"], told["code"][name]
        if known[run.system] == digest:
            continue
        if others := differing(told["openings"][name][run.system], _alone(run)):
            failed.append(f"{run.system} in {name}: another {', '.join(others[:3])}")
            continue
        told.setdefault("confirmed", {}).setdefault(name, {}).setdefault(run.system, known[run.system])  # what it was trained with
        known[run.system] = digest
        report(f"{run.system} in {name}: begins as before")
    file.write_text(json.dumps(told, indent=1) + "\n")
    return failed


def _alone(run: Run) -> Opening:
    """Return an opening, computed as runs are, by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return opening(run)
    finally:
        torch.set_num_threads(threads)
