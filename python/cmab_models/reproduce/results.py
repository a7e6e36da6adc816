"""The results of all runs, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..pictures.context import Cost
from ..tasks import Task
from ..training import Run
from .runner import finished

LOWER = ("mse", "regret", "simple")
"""Scores whose names begin with one of these are better if they are lower."""
BASELINES = ("cnp", "mlp")
"""Systems that read their context as a mean or as one vector. If they reach a score, the task does not need attention
for it."""
CEILINGS = "exact"
"""References whose names begin with this are upper bounds, not baselines."""


class Spread(NamedTuple):
    """A score over the seeds."""

    mean: float
    deviation: float
    """The standard deviation between seeds; 0 for one seed."""
    seeds: int

    def __str__(self) -> str:
        return number(self.mean) + (f" ± {number(self.deviation)}" if self.seeds > 1 else "")


class Side(NamedTuple):
    """A score of a system in an experiment."""

    experiment: str
    system: str
    score: str

    @property
    def label(self) -> str:
        """The system, and the part of its experiment's name that follows a comma."""
        variant = self.experiment.partition(", ")[2]
        return f"{self.system}, {variant}" if variant else self.system


class Results:
    """The records of finished runs, by experiment and system, and the costs of contexts."""

    def __init__(self, runs: Mapping[str, Iterable[Run]], costs: Sequence[Cost] = ()) -> None:
        self.costs = costs
        self.tasks: dict[str, Task] = {}
        self.records: dict[str, dict[str, list[dict[str, Any]]]] = {}
        self._references: dict[str, dict[str, float]] = {}
        for name, each in runs.items():
            for run in each:
                record = finished(run)
                if record is not None:
                    self.tasks.setdefault(name, run.task)
                    self.records.setdefault(name, {}).setdefault(run.system, []).append(record)

    @staticmethod
    def sign(score: str) -> int:
        """Return 1 if higher values of a score are better, else -1."""
        return -1 if score.startswith(LOWER) else 1

    def every(self) -> list[dict[str, Any]]:
        """Return all records."""
        return [record for systems in self.records.values() for records in systems.values() for record in records]

    def scores(self, experiment: str, system: str, score: str) -> list[float]:
        """Return a score for each seed. A `KeyError` says which run is missing."""
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

    def steps(self, side: Side) -> int:
        """Return the number of steps for which a side was trained."""
        return int(self.records[side.experiment][side.system][0]["steps"])

    def references(self, experiment: str) -> dict[str, float]:
        """Return the scores of the task that need no model."""
        if experiment not in self._references:
            self._references[experiment] = self.tasks[experiment].references()
        return self._references[experiment]

    def baselines(self, ours: Side, theirs: Side) -> dict[str, Spread]:
        """Return by name the values of a score for methods that should be worst: the `BASELINES` that are not compared,
        and references without a model."""
        systems, known = self.records[theirs.experiment], self.references(theirs.experiment)
        found = {
            name: self.spread(theirs.experiment, name, theirs.score)
            for name in BASELINES
            if name in systems and name not in (ours.system, theirs.system)
        }
        scores = next(iter(systems.values()))[0]["scores"]
        of_score = {name: value for name, value in known.items() if theirs.score in _nearest(name, scores)}
        return found | {
            name.replace("_", " "): Spread(value, 0.0, 1)
            for name, value in of_score.items()
            if not name.startswith(CEILINGS)
        }


def _nearest(reference: str, scores: Iterable[str]) -> list[str]:
    """Return the scores whose names share the largest number of final words with the name of a reference:
    "pixel_mean_seen" belongs to "..._seen"."""
    shared = {score: _shared(reference.split("_"), score.split("_")) for score in scores}
    return [score for score, words in shared.items() if words == max(shared.values())]


def _shared(one: list[str], other: list[str]) -> int:
    """Return the number of words that two lists share at their ends."""
    pairs = list(zip(reversed(one), reversed(other), strict=False))
    return next((i for i, (word, same) in enumerate(pairs) if word != same), len(pairs))


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation of values."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def number(value: float) -> str:
    """Return the value as text: with three decimals, or with two digits if three decimals would show little."""
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.01 else f"{value:.1e}"


def table(results: Results, experiment: str) -> str:
    """Return the scores of all systems in Markdown, with one row per system, and below them the scores that need no
    model."""
    systems = results.records[experiment]
    scores = list(dict.fromkeys(score for records in systems.values() for score in records[0]["scores"]))
    lines = ["| | " + " | ".join(score.replace("_", " ") for score in scores) + " | seeds | steps | CPU s | wall s |"]
    lines.append("|---|" + "---:|" * (len(scores) + 4))
    for system, records in systems.items():
        cells = [
            str(results.spread(experiment, system, score)) if score in records[0]["scores"] else "" for score in scores
        ]
        seconds = (results.seconds(experiment, system, kind) for kind in ("cpu_seconds", "wall_seconds"))
        cells += [str(len(records)), f"{records[0]['steps']:,}", *(f"{each:.0f}" for each in seconds)]
        lines.append(f"| {system} | " + " | ".join(cells) + " |")
    known = [f"{name.replace('_', ' ')} {number(value)}" for name, value in results.references(experiment).items()]
    return "\n".join([*lines, "", f"Without a model: {', '.join(known)}."])
