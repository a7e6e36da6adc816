"""Sequences of events, padded to one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class Events(NamedTuple):
    """Sequences of events, each with a time and a mark. Each sequence was observed from time 0 until `end`."""

    times: Tensor
    """(B, N) float64: positive and in order; 0 beyond a sequence's length"""
    marks: Tensor
    """(B, N) int64, with the same lengths"""
    lengths: Tensor
    """(B,) int64: the number of events of each sequence"""
    end: Tensor
    """(B,) float64, not before the last event"""

    @staticmethod
    def pad(times: Sequence[Any], marks: Sequence[Any], end: Sequence[float] | Tensor) -> Events:
        """Return sequences of any lengths as one batch; `ValueError` for no sequence, and for an invalid sequence,
        which it names.

        A sequence of times or marks is a tensor (events,), or an array or a list that `torch.as_tensor` accepts.
        """
        if not len(times):
            raise ValueError("times is empty; at least one sequence is needed")
        times = [torch.as_tensor(each, dtype=torch.float64) for each in times]
        marks = [torch.as_tensor(each) for each in marks]
        for i, (time, mark) in enumerate(zip(times, marks, strict=True)):
            if time.dim() != 1 or mark.shape != time.shape:
                raise ValueError(f"sequence {i} has times {tuple(time.shape)} and marks {tuple(mark.shape)}; both must be (events,)")
        lengths = torch.tensor([len(each) for each in times])
        padded = pad_sequence(times, batch_first=True)
        padded_marks = pad_sequence([each.long() for each in marks], batch_first=True)
        events = Events(padded, padded_marks, lengths, torch.as_tensor(end, dtype=torch.float64))
        sound = (events.gaps() >= 0).all(1) & (events.times <= events.end.unsqueeze(1)).all(1)
        if not sound.all():
            raise ValueError(f"sequence {int(sound.long().argmin())} has an event before the one before it, before time 0 or after its end")
        return events

    def take(self, rows: Tensor) -> Events:
        """Return the sequences `rows` (R,) int64, cut to the longest of them."""
        lengths = self.lengths[rows]
        longest = int(lengths.max())
        return Events(self.times[rows, :longest], self.marks[rows, :longest], lengths, self.end[rows])

    @property
    def there(self) -> Tensor:
        """(B, N) bool: True at events, False at padding."""
        return torch.arange(self.times.shape[1], device=self.lengths.device) < self.lengths.unsqueeze(1)

    def gaps(self) -> Tensor:
        """Return the times (B, N) from one event to the next, the first counted from time 0; 0 at padding."""
        return self.times.diff(dim=1, prepend=torch.zeros_like(self.times[:, :1])).where(self.there, 0.0)
