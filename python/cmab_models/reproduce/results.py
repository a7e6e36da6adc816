"""What came out of all runs, and tables of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..pictures.context import Cost
from ..tasks import Task
from ..training import Run
from .runner import finished


class Spread(NamedTuple):
    """A score over the seeds."""

    mean: float
    deviation: float
    """Between seeds; 0 for one."""
    seeds: int

    def __str__(self) -> str:
        return number(self.mean) + (f" ± {number(self.deviation)}" if self.seeds > 1 else "")


class Results:
    """The records of runs that are finished, by experiment and system, and the costs of contexts."""

    def __init__(self, runs: Mapping[str, Iterable[Run]], costs: Sequence[Cost] = ()) -> None:
        self.costs = costs
        self.tasks: dict[str, Task] = {}
        self.records: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for name, each in runs.items():
            for run in each:
                record = finished(run)
                if record is not None:
                    self.tasks.setdefault(name, run.task)
                    self.records.setdefault(name, {}).setdefault(run.system, []).append(record)

    def every(self) -> list[dict[str, Any]]:
        """Return all records."""
        return [record for systems in self.records.values() for records in systems.values() for record in records]

    def scores(self, experiment: str, system: str, score: str) -> list[float]:
        """Return a score of each seed; `KeyError` says what was not run."""
        records = self.records.get(experiment, {}).get(system)
        if records is None:
            raise KeyError(f"{system} was not run in {experiment}")
        return [float(record["scores"][score]) for record in records]

    def spread(self, experiment: str, system: str, score: str) -> Spread:
        """Return a score over the seeds."""
        return spread(self.scores(experiment, system, score))

    def seconds(self, experiment: str, system: str, kind: str = "cpu_seconds") -> float:
        """Return the mean seconds of a run."""
        return statistics.fmean(record[kind] for record in self.records[experiment][system])


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation of values."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def number(value: float) -> str:
    """Return the value as text, with three decimals or, where these would show little, two digits."""
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.01 else f"{value:.1e}"


def table(results: Results, experiment: str) -> str:
    """Return the scores of all systems, in Markdown: one row for each, and below what needs no model."""
    systems = results.records[experiment]
    scores = list(dict.fromkeys(score for records in systems.values() for score in records[0]["scores"]))
    lines = ["| | " + " | ".join(score.replace("_", " ") for score in scores) + " | seeds | steps | CPU s | wall s |"]
    lines.append("|---|" + "---:|" * (len(scores) + 4))
    for system, records in systems.items():
        cells = [str(results.spread(experiment, system, score)) if score in records[0]["scores"] else "" for score in scores]
        seconds = (results.seconds(experiment, system, kind) for kind in ("cpu_seconds", "wall_seconds"))
        cells += [str(len(records)), f"{records[0]['steps']:,}", *(f"{each:.0f}" for each in seconds)]
        lines.append(f"| {system} | " + " | ".join(cells) + " |")
    known = [f"{name.replace('_', ' ')} {number(value)}" for name, value in results.tasks[experiment].references().items()]
    return "\n".join([*lines, "", f"Without a model: {', '.join(known)}."])
