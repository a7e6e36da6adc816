"""Scores of predictions of events, and scores of predictions that need no model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels.runtime.checks import kind_of, mismatch

from .base import PointProcess
from .events import Events
from .mixture import SHORTEST, LogNormalMixture
from .parts import LOG_SCALES, LogGaps

_ROWS = 32
"""Sequences that are scored at once."""
_PRIOR = 10.0
"""When marks are predicted from the mark before, the overall frequencies of marks count as this number of events."""
_COMPONENTS, _FITTED = 16, 20_000
"""The number of components in the mixture of `renewal_time`, which is the models' default, and the largest number of
events to which it is fitted."""


def event_scores(process: PointProcess, train: Events, test: Events) -> dict[str, float]:
    """Return the scores of a point process on held-out events. `trivial_event_scores` has scores to compare them with.

    - `time`, `mark`: log-likelihoods per event, in nats. `time` includes the likelihood that no event came between the
      last event and the end of the observation.
    - `accuracy`: the share of marks that were predicted correctly.
    - `rmse`: the root mean squared error of the expected time to the next event, as papers report it. A heavy tail of a
      prediction makes it large or infinite.
    - `rmse_limited`: the same for an expectation in which no time is longer than the longest in `train`.
    - `rmse_median`: the same for the median.

    >>> some = cmab_models.Events.pad([[0.1, 0.4, 0.5], [0.2, 0.9]], [[0, 1, 2], [1, 1]], [1.0, 1.0])
    >>> process = cmab_models.CMHP.for_events(some, dim=16, num_latents=4, num_heads=2)
    >>> list(cmab_models.event_scores(process, train=some, test=some))
    ['time', 'mark', 'accuracy', 'rmse', 'rmse_limited', 'rmse_median']
    """
    _check(train, test)
    return likelihoods(process, test) | errors(process, train, test)


def trivial_event_scores(train: Events, test: Events) -> dict[str, float]:
    """Return the scores on `test` of predictions from counts in `train`. The last word of a name is the score of
    `event_scores` to which it belongs.

    - `exponential_time`: a Poisson process of one rate.
    - `renewal_time`: one mixture of log-normal distributions for all gaps, without the history. Compare `time` with
      this score. Where a clock has coarse steps, or events come at equal times, it is far above `exponential_time`.
    - `frequency_mark`, `frequency_accuracy`: the frequencies of marks, and the most frequent mark.
    - `last_mark`, `last_accuracy`: the same given the mark before.
    - `mean_gap_rmse`, `mean_gap_rmse_limited`, `median_gap_rmse_median`: the mean gap, and the median gap.

    >>> some = cmab_models.Events.pad([[0.1, 0.4, 0.5], [0.2, 0.9]], [[0, 1, 2], [1, 1]], [1.0, 1.0])
    >>> found = cmab_models.trivial_event_scores(train=some, test=some)
    >>> found["frequency_accuracy"], round(found["exponential_time"], 3), found["renewal_time"] > 0
    (0.6, -0.084, True)
    """
    _check(train, test)
    num_marks = 1 + max(int(part.marks.max()) for part in (train, test))
    return trivial_likelihoods(train, test, num_marks) | trivial_errors(train, test)


def _check(train: Events, test: Events) -> None:
    for name, events in (("train", train), ("test", test)):
        if not isinstance(events, Events):
            raise TypeError(mismatch(name, kind_of(events), "Events, as Events.pad returns them"))
        if not events.lengths.sum() or not events.end.sum():
            raise ValueError(mismatch(name, "no event, or events observed for no time", "events and a time above 0"))


@torch.no_grad()
def likelihoods(process: PointProcess, test: Events) -> dict[str, float]:
    """Return `time`, `mark` and `accuracy` of `event_scores`."""
    total, device = torch.zeros(3, dtype=torch.float64), next(process.parameters()).device
    for rows in torch.arange(len(test.lengths)).split(_ROWS):
        found = process.log_prob(*(part.to(device) for part in test.take(rows)))
        total += torch.stack([found.time.sum() + found.survival.sum(), found.mark.sum(), found.correct.sum()]).cpu()
    return dict(zip(("time", "mark", "accuracy"), (total / test.lengths.sum()).tolist(), strict=True))


@torch.no_grad()
def errors(process: PointProcess, train: Events, test: Events) -> dict[str, float]:
    """Return `rmse`, `rmse_limited` and `rmse_median` of `event_scores`."""
    total, device = torch.zeros(3, dtype=torch.float64), next(process.parameters()).device
    longest = train.gaps().max().clamp(min=SHORTEST).to(device)
    for rows in torch.arange(len(test.lengths)).split(_ROWS):
        some = test.take(rows)
        predicted = process.next_events(*(part.to(device) for part in some[:3])).time
        guesses = torch.stack([predicted.mean, predicted.limited_mean(longest), predicted.median]).cpu().double()
        total += ((guesses - some.gaps()[some.there]) ** 2).sum(1)
    names = ("rmse", "rmse_limited", "rmse_median")
    return dict(zip(names, (total / test.lengths.sum()).sqrt().tolist(), strict=True))


def trivial_likelihoods(train: Events, test: Events, num_marks: int) -> dict[str, float]:
    """Return the likelihoods and accuracies of `trivial_event_scores`."""
    rate, events = train.lengths.sum() / train.end.sum(), test.lengths.sum()
    before, mark = _pairs(train, num_marks)
    counts = torch.zeros(num_marks + 1, num_marks, dtype=torch.float64)
    counts.index_put_((before, mark), torch.ones((), dtype=torch.float64), accumulate=True)
    often = (counts.sum(0) + 1) / (counts.sum() + num_marks)
    after = (counts + _PRIOR * often) / (counts.sum(1, keepdim=True) + _PRIOR)
    before, mark = _pairs(test, num_marks)
    return {
        "exponential_time": float(rate.log() - rate * test.end.sum() / events),
        "renewal_time": float(_renewal(train, test) / events),
        "frequency_mark": float(often[mark].log().mean()),
        "frequency_accuracy": float((mark == often.argmax()).double().mean()),
        "last_mark": float(after[before, mark].log().mean()),
        "last_accuracy": float((mark == after.argmax(1)[before]).double().mean()),
    }


def trivial_errors(train: Events, test: Events) -> dict[str, float]:
    """Return the errors of `trivial_event_scores`."""
    known, gaps = (part.gaps()[part.there] for part in (train, test))
    mean, median = (float((guess - gaps).square().mean().sqrt()) for guess in (known.mean(), known.median()))
    return {"mean_gap_rmse": mean, "mean_gap_rmse_limited": mean, "median_gap_rmse_median": median}


def _pairs(events: Events, first: int) -> tuple[Tensor, Tensor]:
    """Return for each event the mark before it, `first` if there is none, and its own mark."""
    before = torch.cat([torch.full_like(events.marks[:, :1], first), events.marks[:, :-1]], 1)
    return before[events.there], events.marks[events.there]


def _renewal(train: Events, test: Events) -> Tensor:
    """Return the log-likelihood of the times of `test` under one mixture of log-normal distributions for all gaps. The
    mixture is that of the models' heads, fitted to `train` by its likelihood."""
    order = torch.randperm(len(train.lengths), generator=torch.Generator().manual_seed(0))
    some = train.take(order[: 1 + int((train.lengths[order].cumsum(0) < _FITTED).sum())])
    gaps = some.gaps()[some.there]
    log_gaps = LogGaps.of(gaps)
    # An event at the time of the one before it has no logarithm, but the mixture counts it as a very short gap.
    levels = (torch.arange(_COMPONENTS, dtype=torch.float64) + 0.5) / _COMPONENTS
    starts = log_gaps.standardise(gaps.clamp(min=SHORTEST)).quantile(levels)
    logits, loc, log_scale = (torch.nn.Parameter(each) for each in (0 * levels, starts, 0 * levels - 1))

    def likelihood(events: Events) -> Tensor:
        scale = log_scale.clamp(*LOG_SCALES).exp()
        mixture = LogNormalMixture(logits, log_gaps.mean + log_gaps.std * loc, log_gaps.std * scale)
        last = F.pad(events.times, (1, 0)).amax(1)
        return mixture.log_prob(events.gaps()[events.there]).sum() + mixture.log_survival(events.end - last).sum()

    optimiser = torch.optim.LBFGS([logits, loc, log_scale], max_iter=100, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimiser.zero_grad()
        loss = -likelihood(some) / some.lengths.sum().clamp(min=1)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(step)
    with torch.no_grad():
        return likelihood(test)
