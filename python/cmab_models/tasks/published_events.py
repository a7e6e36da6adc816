"""Events that must be downloaded: actions of students in an online course, and posts of users of Reddit.
`cmab_models.data.published_events` describes the files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from cmab_kernels.runtime.checks import mismatch

from ..data.published_events import DAY, read_interactions, read_sequences
from ..data.windows import windows
from ..point_processes import Events, PointProcess, event_scores
from ..point_processes.scoring import trivial_errors
from .events import EventTask


@dataclass(frozen=True)
class PublishedEvents(EventTask):
    """Base class of tasks on published events. Three fifths of the sequences, or of the users, are for training. A
    fifth is held out. The split depends only on their number.

    The scores are those of `event_scores`, with the errors of times that the papers report. The streams of users are
    cut into `windows` of up to 128 events.
    """

    period: ClassVar[float] = DAY

    folder: str = ""
    """The folder of the file."""

    @property
    def num_marks(self) -> int:
        return 1 + max(int(part.marks.max()) for part in _parts(self.name, self.folder))

    def events(self, part: str) -> Events:
        if part not in ("train", "test"):
            raise ValueError(mismatch("part", repr(part), "'train' or 'test'"))
        train, test = _parts(self.name, self.folder)
        return train if part == "train" else test

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return event_scores(cast("PointProcess", model), self.events("train"), self.events("test"))

    def references(self) -> dict[str, float]:
        return super().references() | trivial_errors(self.events("train"), self.events("test"))


@dataclass(frozen=True)
class Mooc(PublishedEvents):
    """Actions of students in an online course, in seconds. The mark is the kind of action."""

    name: ClassVar[str] = "mooc"


@dataclass(frozen=True)
class Reddit(PublishedEvents):
    """Posts of the most active users of Reddit, in seconds. The mark is the part of the site."""

    name: ClassVar[str] = "reddit"


@cache
def _parts(name: str, folder: str) -> tuple[Events, Events]:
    """Return the training events and the held-out events of the first of these files that exists in the folder.

    No user has events in both parts, because windows of one stream resemble each other.
    """
    files = (f"{name}.pkl", f"{name}.csv", f"{name}_actions.tsv")
    path = next((path for file in files if (path := Path(folder) / file).is_file()), None)
    if path is None:
        expected = f"a folder with one of {', '.join(files)}; see cmab_models.data.published_events"
        raise ValueError(mismatch("folder", repr(folder), expected))
    if path.suffix == ".pkl":
        events = read_sequences(path)
        train, test = (events.take(rows) for rows in _split(folder, len(events.lengths)))
    else:
        users, end = read_interactions(path)
        train, test = (
            windows([users[i] for i in rows.tolist()], end, DAY, window=128, shortest=16)
            for rows in _split(folder, len(users))
        )
    return train, test


def _split(folder: str, sequences: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of the sequences, or of the users, of both parts."""
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(5))
    if sequences < 5:
        raise ValueError(mismatch("folder", f"{folder!r}, with {sequences} sequences", "at least 5"))
    return order[: sequences * 3 // 5], order[-(sequences // 5) :]
