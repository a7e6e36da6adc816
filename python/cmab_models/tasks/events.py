"""Tasks on streams of events: predict the time and the mark of the next event."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ..data.departures import DAY, departures
from ..data.hawkes import Hawkes
from ..point_processes import Events, PointProcess
from ..point_processes.base import arguments_for
from ..point_processes.cmhp import QUERIES
from ..point_processes.scoring import likelihoods, trivial_likelihoods
from .base import BySystem, Task, every_tenth, seeded


@dataclass(frozen=True)
class EventTask(Task):
    """Base class of tasks on events. Scores are log-likelihoods per event, in nats, and the share of marks that were
    predicted correctly.

    The score of times includes the likelihood that no event came between the last event and the end of the observation.
    """

    systems: ClassVar[tuple[str, ...]] = ("cmhp", "thp")
    period: ClassVar[float]
    """A time after which patterns of events recur: see `EventEmbedding`."""

    batch_size: int = 16
    """Sequences in a training batch."""
    queries: str = QUERIES[0]
    """Either "newest" or "latents". Only the system cmhp reads this."""

    def __post_init__(self) -> None:
        """Raise an error for an unknown word here, because thp never reads it."""
        super().__post_init__()
        self._check_word("queries", QUERIES)

    @property
    @abstractmethod
    def num_marks(self) -> int:
        """Return the number of marks."""

    @abstractmethod
    def events(self, part: str) -> Events:
        """Return the sequences of one part of the data, "train" or "test"."""

    def sizes(self, system: str) -> dict[str, Any]:
        sizes = arguments_for(self.events("train"), period=self.period) | {"num_marks": self.num_marks, "dim": 32}
        if system == "thp":
            return sizes | {"depth": 2}
        return sizes | {
            "num_latents": 8,
            "output_latents": 4,
            "num_heads": 1,
            "ff_dim": 32,
            "depth": 1,
            "queries": self.queries,
        }

    def batch(self, generator: torch.Generator) -> Events:
        rows = self._rows(checked=False)
        return self.events("train").take(rows[torch.randint(len(rows), (self.batch_size,), generator=generator)])

    def validation(self) -> Iterator[Events]:
        """Yield training sequences that no batch has; all of the training's if there are few."""
        return map(self.events("train").take, self._rows(checked=True).split(self.batch_size))

    def _rows(self, checked: bool) -> Tensor:
        """Return the numbers of the training sequences of batches, or of those that are checked."""
        out = every_tenth(len(self.events("train").lengths))
        every = not self.patience or not out.any()
        return torch.arange(len(out)) if every else (out == checked).nonzero().flatten()

    def loss(self, model: nn.Module, batch: Events) -> Tensor:
        found = cast("PointProcess", model).log_prob(*batch)
        events = batch.lengths.sum().clamp(
            min=1
        )  # a batch without events also has a likelihood: the probability that no event comes
        return -(found.time.sum() + found.mark.sum() + found.survival.sum()) / events

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return likelihoods(cast("PointProcess", model), self.events("test"))

    def references(self) -> dict[str, float]:
        """Return scores from counts in the training data: see `trivial_event_scores`."""
        return trivial_likelihoods(self.events("train"), self.events("test"), self.num_marks)

    def shown(self) -> tuple[Tensor, Tensor]:
        """Return times and marks (N,) of the held-out sequence that is streamed and drawn: the longest of the first
        hundred."""
        test = self.events("test")
        row = int(test.lengths[:100].argmax())
        return test.times[row, : test.lengths[row]], test.marks[row, : test.lengths[row]]

    @torch.no_grad()
    def stream(self, model: nn.Module) -> Iterator[dict[str, float]]:
        """Yield each event of one held-out sequence, with its prediction and the actual event."""
        process, state, last = cast("PointProcess", model), None, 0.0
        times, marks = (part.to(next(model.parameters()).device) for part in self.shown())
        for time, mark in zip(times, marks, strict=True):
            predicted = process.next_event(state)
            gap = time - last
            yield {
                "time": float(time),
                "mark": float(mark),
                "time_log_prob": float(predicted.time.log_prob(gap)),
                "mark_log_prob": float(predicted.mark.log_prob(mark)),
            }
            state, last = process.observe(state, time.unsqueeze(0), mark.unsqueeze(0)), time


@dataclass(frozen=True)
class HawkesTask(EventTask):
    """A Hawkes process of three marks, with a known exact likelihood: see `cmab_models.data.hawkes.Hawkes`."""

    name: ClassVar[str] = "hawkes"
    period: ClassVar[float] = 1.0

    of_system: ClassVar[BySystem] = {"thp": {"steps": 1200}}
    steps: int = 1100
    sequences: int = 2000
    """Training sequences."""
    end: float = 80.0
    """The time for which each sequence is observed: about 120 events."""

    @property
    def num_marks(self) -> int:
        return len(Hawkes().base)

    def events(self, part: str) -> Events:
        return _simulated(self.sequences if part == "train" else 256, self.end, 1 if part == "train" else 2)

    def references(self) -> dict[str, float]:
        """Return the scores from counts, and the exact scores. Only a model whose mark depends on its time can reach
        `exact_mark`."""
        test = self.events("test")
        exact, events = Hawkes().log_prob(test), test.lengths.sum()
        return super().references() | {
            "exact_time": float((exact.time.sum() + exact.survival.sum()) / events),
            "exact_mark": float(exact.mark.sum() / events),
            "exact_mark_alone": float(exact.mark_alone.sum() / events),
        }


@lru_cache
def _simulated(sequences: int, end: float, seed: int) -> Events:
    return Hawkes().simulate(sequences, end, seeded(seed))


@dataclass(frozen=True)
class DeparturesTask(EventTask):
    """Departures of aircraft from New York, in minutes, with their destinations: see `cmab_models.data.departures`."""

    name: ClassVar[str] = "departures"
    period: ClassVar[float] = DAY

    of_system: ClassVar[BySystem] = {"thp": {"steps": 2400}}
    steps: int = 2000

    @property
    def num_marks(self) -> int:
        return len(departures().destinations)

    def events(self, part: str) -> Events:
        found: Events = getattr(departures(), part)
        return found
