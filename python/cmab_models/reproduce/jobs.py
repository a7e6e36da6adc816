"""The experiments as tables of systems, seeds and settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import presets
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

    def runs(self, folder: Path, preset: str | None = None, device: str = "cpu") -> Iterator[Run]:
        """Yield the runs seed by seed, with the systems in the listed order, the slowest first.

        The settings, and the number of seeds if it has one, are those of the preset, if given; `self.settings` override
        them.
        """
        seeds = None if preset is None else presets.training_seeds(preset, self.task)
        for seed in self.seeds if seeds is None else seeds:
            for system in self.systems:
                settings = {} if preset is None else presets.settings(preset, self.task, system)
                numbers, model = _split(settings | self.settings)
                task = TASKS[self.task].for_system(system).changed(numbers)
                yield Run(system, task, folder / self.name / f"{system}-{seed}", seed, device, model)


def _split(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the task, and the arguments of the model."""
    model = {name.removeprefix("model."): value for name, value in settings.items() if name.startswith("model.")}
    return {name: value for name, value in settings.items() if not name.startswith("model.")}, model
