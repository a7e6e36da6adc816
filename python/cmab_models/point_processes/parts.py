"""The parts that both models share: the embedding of an event, and the head that predicts the next event."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from cmab_kernels.runtime.checks import mismatch

from ..precision import in_single
from .mixture import LogNormalMixture

LOG_SCALES = (-5.0, 3.0)
"""The range of the logarithm of a component's scale, in standard deviations of the logarithm of a gap."""
_ROUNDING = 1e-6
"""A smaller standard deviation of logarithms of gaps comes from the rounding of times."""
_SHORT = 1e-7
"""Models need mean gaps of this length or more, because they do not tell gaps below `mixture.SHORTEST`, 1e-10, from
0."""


class NextEvent(NamedTuple):
    """The prediction of the next event."""

    time: LogNormalMixture
    """the distribution of the time from the last event to the next, from time 0 before the first event; batch shape
    (B,)"""
    mark: Categorical
    """the distribution of its mark; batch shape (B,)"""


class LogGaps(NamedTuple):
    """Mean and standard deviation of the logarithms of the times between events. Models standardise gaps with them."""

    mean: float
    std: float

    @classmethod
    def of(cls, gaps: Tensor) -> LogGaps:
        """Return the mean and standard deviation for gaps (N,). Gaps of 0, between events at equal times, are left out.
        If all other gaps are equal, up to the rounding of float32 times, the standard deviation is 1."""
        logs = gaps[gaps > 0].double().log()
        std = float(logs.std()) if len(logs) > 1 else 0.0
        return cls(float(logs.mean()) if len(logs) else 0.0, std if std > _ROUNDING else 1.0)

    def standardise(self, gaps: Tensor) -> Tensor:
        return (gaps.log() - self.mean) / self.std


class EventEmbedding(nn.Module):
    """Embeds events: a vector for the mark, plus a temporal encoding of the time and of the time since the previous
    event.

    The time is encoded by sines and cosines with dim / 2 periods in all: `period` times 1/8, 1/4, 1/2, 1, 2, 4, ... So
    events that recur with the period have similar encodings, and the longest periods distinguish early events from late
    events. Raises a `ValueError` for an odd dim, and for a `period` or a standard deviation of gaps that is not
    positive.

    The periods stay float64 when the weights are cast: float16 cannot hold them, and bfloat16 shifts late events by
    whole periods. The periods follow from the arguments and are not saved. A module on the meta device gets its periods
    together with its weights.
    """

    periods: Tensor

    def __init__(self, num_marks: int, dim: int, log_gaps: LogGaps, period: float) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(mismatch("dim", dim, "an even number, as each period has a sine and a cosine"))
        for name, value in (("log_gap_std", log_gaps.std), ("period", period)):
            if not value > 0:
                raise ValueError(mismatch(name, value, "a number > 0"))
        if log_gaps.mean < math.log(_SHORT):
            expected = f"at least {math.log(_SHORT):.1f}, gaps of {_SHORT:g}; use a smaller unit of time"
            raise ValueError(mismatch("log_gap_mean", f"{log_gaps.mean:.4g}", expected))
        self.mark = nn.Embedding(num_marks, dim)
        self.gap = nn.Linear(1, dim)
        self.log_gaps = log_gaps
        self.period = period
        self.register_buffer("periods", self._periods(self.gap.weight.device), persistent=False)
        self.register_load_state_dict_post_hook(_with_periods)

    def _periods(self, device: torch.device) -> Tensor:
        """Return the periods (dim / 2,) float64, with the same bits on every device."""
        powers = torch.arange(-3, self.gap.out_features // 2 - 3, dtype=torch.float64, device="cpu")
        return (self.period * 2.0**powers).to(device)

    def _apply(self, fn: Callable, recurse: bool = True) -> EventEmbedding:
        """Cast or move the module, and recompute the periods. A cast rounds them, and `to_empty` gives memory without
        values."""
        before = self.periods
        super()._apply(fn, recurse)
        if self.periods is not before:
            self.periods = self._periods(self.periods.device)
        return self

    def forward(self, times: Tensor, gaps: Tensor, marks: Tensor) -> Tensor:
        """Return features (B, N, dim) of events at times (B, N) float64, with gaps (B, N) since the event before and
        marks (B, N) int64."""
        dtype = self.mark.weight.dtype  # read from the embedding, which dynamic quantisation does not change
        phases = (2 * math.pi * (times.unsqueeze(-1) / self.periods).frac()).to(dtype)
        gap = self.gap(self.log_gaps.standardise(gaps).to(dtype).unsqueeze(-1))
        result: Tensor = self.mark(marks) + gap + torch.cat([phases.sin(), phases.cos()], -1)
        return result


def _with_periods(embedding: EventEmbedding, _: Any) -> None:
    """Move the periods to the device of weights that were loaded with `assign=True`. After such a load, weights are no
    longer on the meta device."""
    if embedding.periods.device != embedding.mark.weight.device:
        embedding.periods = embedding._periods(embedding.mark.weight.device)


class EventHead(nn.Module):
    """Predicts the next event from features (..., features): a log-normal mixture for its time, a categorical
    distribution for its mark."""

    def __init__(self, features: int, num_marks: int, log_gaps: LogGaps, components: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.time = nn.Linear(features, 3 * components)
        self.mark = nn.Linear(features, num_marks)
        self.log_gaps = log_gaps

    def forward(self, features: Tensor) -> NextEvent:
        features = self.norm(features)
        logits, loc, log_scale = in_single(self.time(features)).chunk(3, -1)
        mean, std = self.log_gaps
        time = LogNormalMixture(logits, mean + std * loc, std * log_scale.clamp(*LOG_SCALES).exp())
        return NextEvent(time, Categorical(logits=in_single(self.mark(features)), validate_args=False))
