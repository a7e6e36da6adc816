"""The experiments as tables of systems, seeds and settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..tasks import TASKS
from ..training import Run


@dataclass(frozen=True)
class Experiment:
    """Systems that learn one task, with several seeds."""

    name: str
    """The name in tables and claims."""
    task: str
    systems: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the task that replace those of each system, and `model.NAME`, arguments of the models."""

    def runs(self, folder: Path) -> Iterator[Run]:
        """Yield the runs seed by seed, with the systems in the listed order, the slowest first."""
        numbers = {name: value for name, value in self.settings.items() if not name.startswith("model.")}
        model = {name.removeprefix("model."): value for name, value in self.settings.items() if name not in numbers}
        for seed in self.seeds:
            for system in self.systems:
                task = TASKS[self.task].for_system(system).changed(numbers)
                yield Run(system, task, folder / self.name / f"{system}-{seed}", seed, model_settings=model)
