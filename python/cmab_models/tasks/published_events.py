"""Events that must be downloaded: actions of students in an online course, and posts of users of Reddit.
`cmab_models.data.published_events` describes the files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import nn

from cmab_kernels.runtime.checks import mismatch

from ..data.published_events import DAY, read_interactions, read_sequences
from ..point_processes import Events, PointProcess
from .events import EventTask


@dataclass(frozen=True)
class PublishedEvents(EventTask):
    """Base class of tasks on published events. Three fifths of the sequences are for training, the last fifth is held
    out; which ones they are follows from their number.

    Besides the scores of `EventTask`, `rmse` is the root mean squared error of the expected time to the next event, as
    the papers report it, and `rmse_median` that of the median, which a heavy tail does not spoil.
    """

    period: ClassVar[float] = DAY

    folder: str = ""
    """The folder of the file."""

    @property
    def num_marks(self) -> int:
        return int(_read(self.name, self.folder).marks.max()) + 1

    def events(self, part: str) -> Events:
        if part not in ("train", "test"):
            raise ValueError(mismatch("part", repr(part), "'train' or 'test'"))
        return _part(self.name, self.folder, part)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        test, errors, device = self.events("test"), torch.zeros(2, dtype=torch.float64), next(model.parameters()).device
        for rows in torch.arange(len(test.lengths)).split(32):
            some = test.take(rows)
            predicted = cast("PointProcess", model).next_events(*(part.to(device) for part in some[:3])).time
            gaps = some.gaps()[some.there]
            errors += torch.stack(
                [((guess.cpu().double() - gaps) ** 2).sum() for guess in (predicted.mean, predicted.median)]
            )
        rmse, of_median = (errors / test.lengths.sum()).sqrt().tolist()
        return super().evaluate(model) | {"rmse": rmse, "rmse_median": of_median}


@dataclass(frozen=True)
class Mooc(PublishedEvents):
    """Actions of students in an online course, in seconds. The mark is the kind of action."""

    name: ClassVar[str] = "mooc"


@dataclass(frozen=True)
class Reddit(PublishedEvents):
    """Posts of the most active users of Reddit, in seconds. The mark is the part of the site."""

    name: ClassVar[str] = "reddit"


@cache
def _read(name: str, folder: str) -> Events:
    """Return the sequences of the first of these files that exists in the folder."""
    readers = {
        f"{name}.pkl": read_sequences,
        f"{name}.csv": read_interactions,
        f"{name}_actions.tsv": read_interactions,
    }
    found = next((file for file in readers if (Path(folder) / file).is_file()), None)
    if found is None:
        raise ValueError(
            mismatch(
                "folder",
                repr(folder),
                f"a folder with one of {', '.join(readers)}; see cmab_models.data.published_events",
            )
        )
    return readers[found](Path(folder) / found)


@cache
def _part(name: str, folder: str, part: str) -> Events:
    events = _read(name, folder)
    order = torch.randperm(len(events.lengths), generator=torch.Generator().manual_seed(5))
    count = len(order) * 3 // 5, len(order) // 5
    if not min(count):
        raise ValueError(mismatch("folder", f"{folder!r}, with {len(order)} sequences", "at least 5"))
    return events.take(order[: count[0]] if part == "train" else order[-count[1] :])
