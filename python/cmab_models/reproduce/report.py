"""The page that `make reproduce` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..tasks import Task
from ..training import Run, provenance
from .claims import CLAIMS
from .judging import judged
from .results import Results, table

WORDS = {True: "held", False: "did not hold", None: "not judged"}


def write(path: Path, results: Results, pictures: Sequence[tuple[str, Path]], failed: Sequence[Run], share: float) -> None:
    """Write tables, verdicts and pictures as Markdown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [*_head(results, share), _claims(results), *_tables(results), *_pictures(pictures, path), *_failures(failed)]
    path.write_text("\n\n".join(parts) + "\n")


def _head(results: Results, share: float) -> list[str]:
    where = provenance()
    versions = ", ".join(f"{name} {where[name]}" for name in ("cmab_kernels", "torch", "python"))
    told = [
        "# Results",
        "Written by `make reproduce`: every system and its closest baseline on the same data, one thread each, two side by side. Small "
        "models and few steps, so that it takes an hour on two cores; the papers' sizes are the models' defaults. A score with ± is a "
        "mean over seeds and the standard deviation between them; seconds are those of one run.",
        f"{versions}, {where['machine']}, {where['time']}. {_spent(results.every())}",
    ]
    if share != 1.0:
        told.append(f"**Only {100 * share:g}% of all steps were taken: these numbers show that the command works, nothing else.**")
    return told


def _spent(records: Sequence[Mapping[str, Any]]) -> str:
    """Say what all runs took, and of which commits they are: runs that were finished before are not run again."""
    cpu, wall = (sum(record[kind] for record in records) / 60 for kind in ("cpu_seconds", "wall_seconds"))
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(str(record["commit"])[:7] for record in records))
    took = f"{len(records)} runs took {cpu:.0f} minutes of CPU time, {wall:.0f} on the clock if one after the other"
    return f"{took}; their commits: {commits}."


def _claims(results: Results) -> str:
    lines = ["## Published claims", "", "| claim | source | here | because |", "|---|---|---|---|"]
    for claim in CLAIMS:
        verdict = judged(claim, results)
        lines.append(f"| {claim.text} | {claim.source} | **{WORDS[verdict.held]}** | {verdict.reason} |")
    return "\n".join(lines)


def _tables(results: Results) -> list[str]:
    return [f"## {name}\n\n{_summary(results.tasks[name])}{_settings(results, name)}\n\n{table(results, name)}" for name in results.records]


def _summary(task: Task) -> str:
    """Return the first paragraph of the task's docstring."""
    return " ".join((task.__doc__ or "").split("\n\n")[0].split())


def _settings(results: Results, experiment: str) -> str:
    """Say what all runs have changed of the task's own numbers, besides the steps, which are in the table."""
    records = [record for each in results.records[experiment].values() for record in each]
    own = {each.name: each.default for each in fields(results.tasks[experiment]) if each.name != "steps"}
    changed = [name for name, value in own.items() if all(record[name] == records[0][name] != value for record in records)]
    return f" Here `{'`, `'.join(f'{name}={records[0][name]}' for name in changed)}`." if changed else ""


def _pictures(pictures: Sequence[tuple[str, Path]], page: Path) -> list[str]:
    shown = [f"**{title}**\n\n![{title}]({picture.relative_to(page.parent).as_posix()})" for title, picture in pictures]
    return ["## Pictures", *shown]


def _failures(failed: Sequence[Run]) -> list[str]:
    if not failed:
        return []
    return ["## Runs that failed", "\n".join(f"- {run.system} on {run.task.name}, seed {run.seed}" for run in failed)]
