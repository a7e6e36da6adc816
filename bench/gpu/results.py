"""The JSON of a check: it is written completely or not at all, and continued by a later run of the same GPU, sources
and day."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.runs import write_json

from .sections import Outcome, Row

FORMAT = 4
SAME = ("gpu", "commit", "sources")
"""The fields that must be equal to continue a file; the day is part of the file's name."""


@dataclass
class Report:
    path: Path
    machine: dict[str, Any]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def save(self) -> None:
        sections = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        write_json(self.path, {"gpu_check": FORMAT, "machine": self.machine, "sections": sections})

    def rows(self, section: str) -> list[Row]:
        return self.outcomes.get(section, Outcome()).rows

    def complete(self, section: str) -> bool:
        return self.outcomes.get(section, Outcome()).complete


def file_name(machine: dict[str, Any]) -> str:
    gpu = re.sub(r"[^A-Za-z0-9]+", "-", machine["gpu"]).strip("-").lower()
    return f"gpu_check_{gpu}_{machine['date'][:10]}.json"


def opened(folder: Path, machine: dict[str, Any], force: bool) -> Report:
    """Return a new report, or the existing one to continue. Raises a `ValueError` for the file of another check, unless
    `force`."""
    path = folder / file_name(machine)
    if force or not path.exists():
        return Report(path, machine)
    try:
        content = json.loads(path.read_text())
        if content["gpu_check"] != FORMAT:
            raise ValueError("another format")
        outcomes = {name: Outcome(**section) for name, section in content["sections"].items()}
        for outcome in outcomes.values():
            [row["key"] for row in outcome.rows]
        there = {name: content["machine"][name] for name in SAME}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a result of this check ({error}): move it away, or give --force to replace it"
        ) from None
    if other := [name for name in SAME if there[name] != machine[name]]:
        raise ValueError(
            f"{path} comes from another {' and '.join(other)}: give --output another folder, or --force to replace it"
        )
    return Report(path, machine, outcomes)
