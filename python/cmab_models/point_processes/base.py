"""The common part of all point processes: events are observed one by one, or all at once, and the next event is
predicted."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels.runtime.checks import check_count, check_dense, check_number, kind_of, mismatch
from cmab_kernels.runtime.dtypes import state_dtype
from cmab_kernels.runtime.tracing import has_values

from ..choices import largest
from ..pretrained import Pretrained
from .events import Events
from .mixture import SHORTEST
from .parts import EventEmbedding, EventHead, LogGaps, NextEvent

if TYPE_CHECKING:
    from typing import Self


_FAR = 2.0
"""If the mean of the standardised logarithms of gaps is further from 0 than this, a model warns."""


class LogProb(NamedTuple):
    """Log-likelihoods of sequences of events. The sum of the first three fields is the log-likelihood of the
    sequences."""

    time: Tensor
    """(B, N): the log-density of each event's time, given the events before; 0 at padding"""
    mark: Tensor
    """(B, N): the log-probability of each event's mark, given the events before; 0 at padding"""
    survival: Tensor
    """(B,): the log-probability that no event comes between the last event and the end of the observation; 0 if no end
    is given"""
    correct: Tensor
    """(B, N) bool: whether the most likely mark was the right one; False at padding"""


class Continuation(NamedTuple):
    """Events that follow a history. Sequences may have different numbers of events, and are padded to the largest
    number."""

    times: Tensor
    """(B, N) float64, in order; 0 at padding"""
    marks: Tensor
    """(B, N) int64; 0 at padding"""
    there: Tensor
    """(B, N) bool: True at events, False at padding"""


class PointProcess(Pretrained):
    """Base class of models that predict the time and the mark of the next event from the events so far.

    `observe` reads an event into a state, and `next_event` predicts the next event from the state. The state before the
    first event is None. `log_prob` predicts every event of sequences from the events before it. It does so for all
    events at once, with the results of predicting them one by one.

    Shapes: times (B, N), positive and in order, and marks (B, N) int64, smaller than `num_marks`. Other values raise a
    `ValueError`, and an argument that is not a tensor raises a `TypeError`. A time that is NaN or infinite raises a
    `ValueError` too. All this is checked on a GPU as well, where the program waits for the values. Keep times in
    float64, whatever the model's dtype, because differences between late times lose digits in float32. Likelihoods are
    float64 in a float64 model and otherwise float32. They are finite even if events have equal times. In training, a
    `RuntimeWarning` warns if the unit of the times is not the model's: see `for_events`.

    >>> model = cmab_models.CMHP(num_marks=5, dim=16, num_latents=4, num_heads=2).eval()
    >>> times, marks = torch.rand(3, 20).cumsum(1), torch.randint(5, (3, 20))
    >>> with torch.no_grad():
    ...     at_once, state = model.log_prob(times, marks), None
    ...     for time, mark in zip(times.T, marks.T):
    ...         before, state = model.next_event(state), model.observe(state, time, mark)
    >>> torch.allclose(before.mark.log_prob(marks[:, -1]), at_once.mark[:, -1], atol=1e-5)
    True
    """

    state_type: ClassVar[type[tuple[Any, ...]]]
    """The type of the state that `observe` returns."""
    num_marks: int
    embedding: EventEmbedding
    head: EventHead

    @classmethod
    def for_events(cls, events: Events, *, period: float | None = None, **options: Any) -> Self:
        """Return a new model that suits training data: `num_marks`, `log_gap_mean`, `log_gap_std` and `period` are
        those of the events.

        With the defaults of the constructor, which suit gaps of about 1, a model of data in other units has a wrong
        time scale, and learns slowly or not at all.

        Args:
            events: sequences of events.
            period: a time after which patterns recur, in the unit of the times, such as 24.0 for hours. None means the
                typical gap, exp(`log_gap_mean`).
            options: other arguments of the constructor, and arguments that should not come from the events.

        >>> events = cmab_models.Events.pad([[0.1, 0.4, 0.5], [0.2, 0.9]], [[0, 1, 2], [1, 1]], [1.0, 1.0])
        >>> model = cmab_models.CMHP.for_events(events, dim=16, num_latents=4, num_heads=2)
        >>> model.num_marks, round(model.embedding.period, 2)
        (3, 0.21)
        """
        return cls(**(arguments_for(events, period) | options))

    @abstractmethod
    def _read(self, state: Any, time: Tensor, embedded: Tensor) -> Any:
        """Return the state after one more event, which is given as its embedding (B, 1, dim). The state has the event's
        `time` (B,) float64 as an attribute."""

    @abstractmethod
    def _summary(self, state: Any) -> Tensor:
        """Return features (B, features) of the events in `state`; (1, features) for None."""

    @abstractmethod
    def _summaries(self, embedded: Tensor, there: Tensor) -> Tensor:
        """Return features (B, N + 1, features) of the first 0, 1, ..., N events, which are given as embeddings (B, N,
        dim).

        `there` (B, N) is False at padding, which follows the events of a sequence. Features after padding may have any
        value.
        """

    def observe(self, state: Any, time: Tensor, mark: Tensor) -> Any:
        """Return the state after one more event of each sequence: time (B,), not earlier than the event before, and
        mark (B,) int64."""
        self._check(time=time, mark=mark)
        if time.dim() != 1 or mark.shape != time.shape:
            raise ValueError(
                mismatch("time, mark", f"shapes {tuple(time.shape)}, {tuple(mark.shape)}", "(batch,) for both")
            )
        if state is not None and self._known(state).time.shape != time.shape:
            raise ValueError(mismatch("time", f"batch {len(time)}", f"batch {len(state.time)}, that of the state"))
        time = time.to(torch.float64, copy=True)  # a copy, because a clock may change the caller's tensor in place
        gap = _checked("time", time if state is None else time - state.time)
        self._check_marks("mark", mark)
        return self._read(state, time, self.embedding(*(part.unsqueeze(1) for part in (time, gap, mark))))

    def next_event(self, state: Any) -> NextEvent:
        """Return the prediction after the events in `state`. None means before any event; the batch is then 1."""
        result: NextEvent = self.head(self._summary(None if state is None else self._known(state)))
        return result

    @torch.no_grad()
    def sample(
        self, state: Any, until: float | Tensor, generator: torch.Generator | None = None, *, max_events: int = 10_000
    ) -> Continuation:
        """Return a random continuation of each history in `state`: all events after its last one, up to the time
        `until`.

        The gap to the next event, and its mark, are drawn from the prediction after the events so far, and the event is
        observed. This is repeated until each sequence has passed `until`.

        Args:
            state: the result of `observe`, which is not changed, or None for sequences that start at time 0.
            until: a number, or (B,), one time for each sequence, not before its last event. With a state of None, B is
                the number of sequences.
            generator: the source of the random numbers, on the device of the model; None: torch's own generator.
            max_events: if a sequence has more events than this, a `RuntimeError` is raised. Then `until` is far away,
                compared with the gaps that the model predicts.

        >>> model = cmab_models.CMHP(num_marks=5, dim=16, num_latents=4, num_heads=2).eval()
        >>> state = model.observe(None, torch.tensor([0.7, 0.9]), torch.tensor([4, 1]))
        >>> times, marks, there = model.sample(state, until=5.0, generator=torch.Generator().manual_seed(0))
        >>> times.shape == marks.shape == there.shape, bool((times[there] <= 5).all())
        (True, True)
        """
        max_events = check_count("max_events", max_events)
        last, until = self._span(state, until)
        running = torch.ones_like(last, dtype=torch.bool)
        none = last.new_zeros(len(last), 0)
        times, marks, there = [none], [none.long()], [none.bool()]
        while True:
            predicted: NextEvent = self.head(self._summary(state).expand(len(until), -1))
            last = last + predicted.time.draw(generator)
            mark = torch.multinomial(predicted.mark.probs, 1, generator=generator).squeeze(1)
            if last.isnan().any():
                raise RuntimeError(
                    mismatch("sample", "a NaN as the predicted time of an event", "a model with finite weights")
                )
            running = running & (last <= until)
            if not running.any():
                break
            if len(times) > max_events:
                raise RuntimeError(
                    mismatch("until", f"a time before which more than {max_events} events come", "an earlier one")
                )
            last = last.where(running, until)  # a sequence that has ended waits for the others
            for column, part in zip((times, marks, there), (last, mark, running), strict=True):
                column.append(part.unsqueeze(1))
            state = self.observe(state, last, mark)
        events = Continuation(*(torch.cat(column, 1) for column in (times, marks, there)))
        return Continuation(events.times.where(events.there, 0.0), events.marks.where(events.there, 0), events.there)

    def log_prob(
        self, times: Tensor, marks: Tensor, lengths: Tensor | None = None, end: Tensor | None = None
    ) -> LogProb:
        """Return the log-likelihood of every event of sequences, given the events before it, in one pass.

        Args:
            times, marks: (B, N). The first event is predicted too, from no events; its gap is counted from time 0.
            lengths: (B,) int64, the number of events of each sequence; padding may have any value. None: N for all.
            end: (B,), the end of each sequence's observation, not before its last event; None: its last event.
        """
        self._check(times=times, marks=marks, **({} if end is None else {"end": end}))
        if end is not None and end.shape != times.shape[:1]:
            raise ValueError(mismatch("end", f"shape {tuple(end.shape)}", f"(batch,) = {tuple(times.shape[:1])}"))
        events, features = self._read_all(times, marks, lengths)
        there, predicted = events.there, self.head(_before(features, events.there))

        def padded(values: Tensor) -> Tensor:
            return values.new_zeros(there.shape).masked_scatter(there, values)

        dtype = state_dtype(features.dtype)
        survival = features.new_zeros(len(there), dtype=dtype)
        if end is not None:
            wait = _checked("end", end.double() - F.pad(events.times, (1, 0)).amax(1))  # counted from 0 without events
            rows = torch.arange(len(there), device=there.device)
            survival = self.head(features[rows, there.sum(1)]).time.log_survival(wait.to(dtype))
            survival = survival.where(wait > SHORTEST, 0.0)  # a sequence that ends with its last event
        time = predicted.time.log_prob(events.gaps[there].to(dtype))
        came, likely = events.marks[there], largest(predicted.mark.logits)
        return LogProb(padded(time), padded(predicted.mark.log_prob(came)), survival, padded(likely == came))

    def next_events(self, times: Tensor, marks: Tensor, lengths: Tensor | None = None) -> NextEvent:
        """Return the prediction of every event of sequences, given the events before it, in one pass.

        Arguments are those of `log_prob`. The distributions have the batch shape (E,). The E events are in the order of
        `times[there]`: one sequence after the other, without padding.
        """
        self._check(times=times, marks=marks)
        events, features = self._read_all(times, marks, lengths)
        result: NextEvent = self.head(_before(features, events.there))
        return result

    def _read_all(self, times: Tensor, marks: Tensor, lengths: Tensor | None) -> tuple[_Sequences, Tensor]:
        """Check sequences of events. Return them with zeros at padding, and the features (B, N + 1, features) of their
        first 0, 1, ..., N events."""
        if times.dim() != 2 or marks.shape != times.shape:
            raise ValueError(
                mismatch(
                    "times, marks", f"shapes {tuple(times.shape)}, {tuple(marks.shape)}", "(batch, events) for both"
                )
            )
        batch, longest = times.shape
        lengths = torch.full((batch,), longest, device=times.device) if lengths is None else lengths
        _check_lengths(lengths, batch, longest)
        there = torch.arange(longest, device=times.device) < lengths.unsqueeze(1)
        times, marks = times.double().where(there, 0.0), marks.where(there, 0)
        gaps = _checked("times", times.diff(dim=1, prepend=torch.zeros_like(times[:, :1])).where(there, 1.0))
        self._check_marks("marks", marks)
        if self.training:
            self._check_scale(gaps, there)
        return _Sequences(times, marks, gaps, there), self._summaries(self.embedding(times, gaps, marks), there)

    def intensity(self, times: Tensor, marks: Tensor, at: Tensor) -> Tensor:
        """Return the intensity (M,) of any event at each of the times `at` (M,), given the earlier events of times,
        marks (N,)."""
        self._check(times=times, marks=marks, at=at)
        if times.dim() != 1 or marks.shape != times.shape or at.dim() != 1:
            shapes = ", ".join(str(tuple(each.shape)) for each in (times, marks, at))
            raise ValueError(mismatch("times, marks, at", f"shapes {shapes}", "(events,), (events,) and (any,)"))
        times, at = times.double(), at.double()
        starts = torch.cat([times.new_zeros(1), times])
        gaps = _checked("times", starts.diff()).unsqueeze(0)
        self._check_marks("marks", marks)
        features = self._summaries(self.embedding(times.unsqueeze(0), gaps, marks.unsqueeze(0)), gaps > 0)
        before = torch.searchsorted(times, at)
        result: Tensor = self.head(features[0, before]).time.intensity(
            _checked("at", at - starts[before]).to(state_dtype(features.dtype))
        )
        return result

    def _span(self, state: Any, until: float | Tensor) -> tuple[Tensor, Tensor]:
        """Return the time of the last event in `state`, and `until`, both (B,) float64."""
        device = self.embedding.mark.weight.device
        if not isinstance(until, Tensor):
            check_number("until", until)
            until = torch.tensor(until, dtype=torch.float64, device=device)
        self._check(until=until)
        start = torch.zeros(until.shape, device=device) if state is None else self._known(state).time
        if until.dim() > 1 or (state is not None and until.dim() and until.shape != start.shape):
            expected = (
                "a number, or (batch,)" if state is None else f"a number, or ({len(start)},), the batch of the state"
            )
            raise ValueError(mismatch("until", f"shape {tuple(until.shape)}", expected))
        start, end = (part.reshape(-1) for part in torch.broadcast_tensors(start.double(), until.double()))
        _checked("until", end - start)
        return start, end

    def _known(self, state: Any) -> Any:
        """Return the state; raise `TypeError` if `observe` cannot have returned it."""
        if not isinstance(state, self.state_type):
            raise TypeError(
                mismatch("state", kind_of(state), f"None, or what `observe` returns, a {self.state_type.__name__}")
            )
        return state

    def _check(self, **given: Tensor) -> None:
        """Raise unless these are dense tensors of real numbers on the device of the model."""
        device = self.embedding.mark.weight.device
        for name, each in given.items():
            if not isinstance(each, Tensor):
                raise TypeError(mismatch(name, kind_of(each), "a torch.Tensor"))
            check_dense(name, each)
            if each.is_complex() or each.dtype == torch.bool:
                raise TypeError(mismatch(name, each.dtype, "a torch.Tensor of real numbers"))
            if each.device != device:
                raise ValueError(
                    mismatch(name, f"device {each.device}", f"{device}, the device of the model; move them together")
                )

    def _check_scale(self, gaps: Tensor, there: Tensor) -> None:
        """Warn if the model was made for times in another unit: it would learn slowly, and predict other times."""
        if not has_values(gaps):
            return
        gaps = gaps[there & (gaps > SHORTEST)]
        if len(gaps) and abs(self.embedding.log_gaps.standardise(gaps).mean()) > _FAR:
            mean, std = self.embedding.log_gaps
            given = f"{mean:.4g}, {std:.4g}, far from the times between these events"
            expected = "mean and deviation of their logarithms, as `for_events` finds them"
            warnings.warn(mismatch("log_gap_mean, log_gap_std", given, expected), RuntimeWarning, stacklevel=4)

    def _check_marks(self, name: str, marks: Tensor) -> None:
        inside = marks.dtype == torch.int64
        values = ""
        if marks.numel() and has_values(marks):
            least, most = marks.min().item(), marks.max().item()
            inside, values = inside and 0 <= least <= most < self.num_marks, f" from {least} to {most}"
        if not inside:
            raise ValueError(mismatch(name, f"{marks.dtype}{values}", f"torch.int64 from 0 to {self.num_marks - 1}"))


def arguments_for(events: Events, period: float | None = None) -> dict[str, Any]:
    """Return the arguments of a model's constructor that follow from its training data: see
    `PointProcess.for_events`."""
    if not isinstance(events, Events):
        raise TypeError(mismatch("events", kind_of(events), "Events, as Events.pad returns them"))
    log_gaps, marks = LogGaps.of(events.gaps()[events.there]), events.marks[events.there]
    num_marks = int(marks.max()) + 1 if len(marks) else 1
    period = math.exp(log_gaps.mean) if period is None else period
    return {"num_marks": num_marks, "log_gap_mean": log_gaps.mean, "log_gap_std": log_gaps.std, "period": period}


class _Sequences(NamedTuple):
    """Padded sequences of events, each tensor (B, N)."""

    times: Tensor
    marks: Tensor
    gaps: Tensor
    """the time since the event before, at least `SHORTEST`"""
    there: Tensor
    """False at padding"""


def _before(features: Tensor, there: Tensor) -> Tensor:
    """Return the features (E, features) from which each event is predicted: the features of the events before it.
    Computing heads on padding would only cost time."""
    rows = F.pad(there, (0, 1)).flatten().nonzero().squeeze(1)
    return features.flatten(0, 1).index_select(0, rows)


def _check_lengths(lengths: Tensor, batch: int, longest: int) -> None:
    if not isinstance(lengths, Tensor):
        raise TypeError(mismatch("lengths", kind_of(lengths), "a torch.Tensor of int64"))
    check_dense("lengths", lengths)
    fits = lengths.shape == (batch,) and lengths.dtype in (torch.int32, torch.int64)
    if not fits or (batch and has_values(lengths) and not 0 <= lengths.min() <= lengths.max() <= longest):
        values = f" from {lengths.min()} to {lengths.max()}" if fits else ""
        given = f"{lengths.dtype} {tuple(lengths.shape)}{values}"
        raise ValueError(
            mismatch("lengths", given, f"torch.int64 ({batch},) from 0 to {longest}, the number of events")
        )


def _checked(name: str, gaps: Tensor) -> Tensor:
    """Return times between events, each at least `SHORTEST`; raise unless all are finite and not negative."""
    if gaps.numel() and has_values(gaps) and not 0 <= gaps.min() <= gaps.max() < math.inf:
        given = "a time that is negative, before the one before it, infinite or NaN"
        raise ValueError(mismatch(name, given, "finite times >= 0 in order"))
    return gaps.clamp(min=SHORTEST)
