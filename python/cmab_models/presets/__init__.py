"""Presets: files with settings of tasks and models, one file for each task, with the source of each number.

A file has the tables `paper`, `small` and `smoke`. A table holds settings of the task. Its `model` holds arguments of
the constructors of models. Its tables with the names of systems hold what differs for these systems. `training_seeds`
is the number of models of each system whose scores the paper averages.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from pathlib import Path
from typing import Any

from cmab_kernels.runtime.checks import mismatch

from ..systems import SYSTEMS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PRESETS = ("paper", "small", "smoke")


def settings(preset: str, task: str, system: str) -> dict[str, Any]:
    """Return the settings of a preset, with names as for `--set`.

    An argument of models that the system does not have is left out. Raises a `ValueError` for an unknown preset.

    >>> settings("paper", "gp-rbf", "cnp")["learning_rate"]
    0.0005
    """
    if preset not in PRESETS:
        raise ValueError(mismatch("preset", repr(preset), f"one of {', '.join(PRESETS)}"))
    table = _tables(task)[preset]
    of_systems = {name: value for name, value in table.items() if isinstance(value, dict) and name != "model"}
    found: dict[str, Any] = {}
    for part in (table, *(value for names, value in of_systems.items() if system in names.split())):
        found |= {name: value for name, value in part.items() if name not in (*of_systems, "model", "training_seeds")}
        models = part.get("model", {}).items()
        found |= {f"model.{name}": value for name, value in models if name in known(system)}
    return found


def training_seeds(preset: str, task: str) -> tuple[int, ...] | None:
    """Return the seeds of the models whose scores a preset averages; None if it does not say.

    >>> training_seeds("paper", "wheel")
    (0, 1, 2, 3, 4)
    """
    count = _tables(task)[preset].get("training_seeds")
    return None if count is None else tuple(range(count))


def known(system: str) -> list[str]:
    """Return the names of the arguments of a system's constructor."""
    return list(inspect.signature(SYSTEMS[system].__init__).parameters)[1:]


@cache
def _tables(task: str) -> dict[str, Any]:
    path = Path(__file__).parent / f"{task}.toml"
    if not path.exists():
        raise ValueError(mismatch("preset", f"one for the task {task}", "none, as the task has no file of presets"))
    tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return tables
