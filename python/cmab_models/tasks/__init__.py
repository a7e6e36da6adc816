"""The tasks, with their data and scores."""

from . import (
    bandit,
    classes,
    events,
    gp,
    images,
    patches,
    published_classes,
    published_events,
    published_streams,
    series,
    sets,
)
from .base import TASKS, Task, seeded

__all__ = [
    "TASKS",
    "Task",
    "bandit",
    "classes",
    "events",
    "gp",
    "images",
    "patches",
    "published_classes",
    "published_events",
    "published_streams",
    "seeded",
    "series",
    "sets",
]
