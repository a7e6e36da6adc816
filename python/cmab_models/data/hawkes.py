"""Hawkes processes: events that make further events more likely, simulated exactly, with their exact likelihood.

The data is synthetic: nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cmab_kernels.runtime.checks import check_count, mismatch

from ..point_processes import Events


class Exact(NamedTuple):
    """The exact log-likelihoods of events, 0 at padding."""

    time: Tensor
    """(B, N), for each event's time, given the events before"""
    mark: Tensor
    """(B, N), for its mark, given the events before and its time"""
    mark_alone: Tensor
    """(B, N), for its mark, given the events before: the best possible value for a model whose mark does not depend on
    the time"""
    survival: Tensor
    """(B,), for no event between the last event and the end"""
    compensator: Tensor
    """(B, N), the integral of all intensities from one event to the next. These are independent exponential numbers of
    mean 1"""


@dataclass(frozen=True)
class Hawkes:
    """A process of K marks with the intensities base_k + the sum over events i before of excitation_k,m_i exp(-decay (t
    - t_i)).

    All marks share one decay, so the sum of the excitations decays with it. The time to the next event is the smaller
    of two independent times: one for the base intensities and one for the excitations. Both are drawn by inverting
    their survival functions.

    By default there are three marks. Each event has 0.6 children on average, all with the next mark in turn, and 1.5
    events come per unit of time.
    """

    base: tuple[float, ...] = (0.2, 0.2, 0.2)
    excitation: tuple[tuple[float, ...], ...] = ((0.0, 0.0, 1.2), (1.2, 0.0, 0.0), (0.0, 1.2, 0.0))
    decay: float = 2.0

    def simulate(self, sequences: int, end: float, generator: torch.Generator) -> Events:
        """Return sequences of all events from time 0 until `end`. There are no events before time 0."""
        check_count("sequences", sequences)
        base, excitation = self._parameters
        now = torch.zeros(sequences, dtype=torch.float64)
        above = torch.zeros(sequences, len(base), dtype=torch.float64)
        times, marks = [], []
        while bool((now < end).any()):
            of_base, of_above = -torch.rand(2, sequences, dtype=torch.float64, generator=generator).log()
            # 0: the excitations have died out and cause no event.
            left = (1 - self.decay * of_above / above.sum(1)).clamp(min=0)
            gap = torch.minimum(of_base / base.sum(), -left.log() / self.decay)
            now, above = now + gap, above * (-self.decay * gap).exp().unsqueeze(1)
            mark = torch.multinomial(base + above, 1, generator=generator).squeeze(1)
            above = above + excitation.T[mark]
            times.append(now)
            marks.append(mark)
        there = torch.stack(times, 1) < end
        lengths = there.sum(1)
        longest = int(lengths.max())
        if not longest:
            raise ValueError(mismatch("end", end, "a time after the first event; give a larger one"))
        all_times, all_marks = (torch.stack(each, 1).where(there, 0)[:, :longest] for each in (times, marks))
        return Events(all_times, all_marks, lengths, torch.full((sequences,), end, dtype=torch.float64))

    def log_prob(self, events: Events) -> Exact:
        """Return the exact log-likelihoods of sequences that start at time 0 without earlier events."""
        base, _ = self._parameters
        there, gaps, above = events.there, events.gaps(), self._above(events)
        at_events = base + above[:, :-1] * (-self.decay * gaps).exp().unsqueeze(-1)
        total = at_events.sum(-1)
        chosen = events.marks.unsqueeze(-1)
        compensator = self._compensator(above[:, :-1], gaps)
        mark = at_events.gather(-1, chosen).squeeze(-1).log() - total.log()
        mark_alone = self._next_mark(above[:, :-1]).gather(-1, chosen).squeeze(-1).log()
        last = above[torch.arange(len(there)), events.lengths]
        # In a sequence without events, the time is counted from 0.
        survival = -self._compensator(last, events.end - F.pad(events.times, (1, 0)).amax(1))
        time, mark, mark_alone = (each.where(there, 0.0) for each in (total.log() - compensator, mark, mark_alone))
        return Exact(time, mark, mark_alone, survival, compensator)

    def intensity(self, times: Tensor, marks: Tensor, at: Tensor) -> Tensor:
        """Return the intensities (M, K) just before each of the times `at` (M,), after events at times (N,)."""
        base, excitation = self._parameters
        since = at.unsqueeze(1) - times
        return base + torch.exp(-self.decay * since).where(since > 0, 0.0) @ excitation.T[marks]

    @property
    def _parameters(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.base, dtype=torch.float64), torch.tensor(self.excitation, dtype=torch.float64)

    def _above(self, events: Events) -> Tensor:
        """Return the excitations, the intensities above the bases, just after 0, 1, ..., N events, (B, N + 1, K)."""
        base, excitation = self._parameters
        every = [torch.zeros(len(events.lengths), len(base), dtype=torch.float64)]
        for gap, mark in zip(events.gaps().T, events.marks.T, strict=True):
            every.append(every[-1] * (-self.decay * gap).exp().unsqueeze(1) + excitation.T[mark])
        return torch.stack(every, 1)

    def _compensator(self, above: Tensor, gap: Tensor) -> Tensor:
        """Return the integral of all intensities over a `gap` (...) without events. It starts with the excitations
        `above` (..., K)."""
        return sum(self.base) * gap - above.sum(-1) * torch.expm1(-self.decay * gap) / self.decay

    def _next_mark(self, above: Tensor) -> Tensor:
        """Return the probabilities (..., K) of the next event's mark, independent of its time.

        They are base J0 + above J1. J0 is the integral of S(t), and J1 the integral of exp(-decay t) S(t), over all t.
        Let B be the sum of the bases, and v = exp(-B t). Then J0 is the integral of exp(-A (1 - v^(decay / B)) / decay)
        / B over v from 0 to 1. 64 Gauss-Legendre points suffice for it. J1 follows from B J0 + A J1 = 1, because a next
        event comes with probability 1.
        """
        base, _ = self._parameters
        nodes, weights = (torch.from_numpy(each) for each in np.polynomial.legendre.leggauss(64))
        total = above.sum(-1, keepdim=True)
        decayed = 1 - ((nodes + 1) / 2) ** (self.decay / base.sum())
        survived = (-total * decayed / self.decay).exp() @ weights.unsqueeze(1) / 2
        return base / base.sum() * survived + above / total.clamp(min=1e-300) * (1 - survived)
