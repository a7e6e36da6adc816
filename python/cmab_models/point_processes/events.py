"""Sequences of events, padded to one length."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cmab_kernels.runtime.checks import is_dense, kind_of, mismatch


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
    def pad(times: Iterable[Any], marks: Iterable[Any], end: Iterable[float] | Tensor) -> Events:
        """Return sequences of any lengths as one batch.

        A sequence of times or marks is a tensor (events,), or an array or a list that `torch.as_tensor` accepts. Marks
        are whole numbers from 0 on, in any dtype. `end` has one finite number for each sequence.

        Raises a `ValueError` if there are no sequences, if the number of marks or ends differs from the number of
        sequences, or if a sequence is invalid; the message names this sequence.
        """
        times, marks = _sequences("times", times), _sequences("marks", marks)
        if not times:
            raise ValueError(mismatch("times", "no sequence", "at least one"))
        if len(marks) != len(times):
            raise ValueError(mismatch("marks", f"{len(marks)} sequences", f"{len(times)}, as many as times has"))
        end = _as_tensor("end", end, torch.float64).clone()
        if end.shape != (len(times),):
            raise ValueError(
                mismatch("end", f"shape {tuple(end.shape)}", f"({len(times)},), a number for each sequence")
            )
        if not end.isfinite().all():
            raise ValueError(mismatch("end", float(end[~end.isfinite()][0]), "finite numbers"))
        times = [_as_tensor(f"times[{i}]", each, torch.float64) for i, each in enumerate(times)]
        marks = [_as_tensor(f"marks[{i}]", each) for i, each in enumerate(marks)]
        for i, (time, mark) in enumerate(zip(times, marks, strict=True)):
            if time.dim() != 1 or mark.shape != time.shape:
                raise ValueError(
                    mismatch(
                        f"times[{i}], marks[{i}]",
                        f"shapes {tuple(time.shape)}, {tuple(mark.shape)}",
                        "(events,) for both",
                    )
                )
            if not time.isfinite().all():
                raise ValueError(mismatch(f"times[{i}]", "a NaN or an infinity", "finite numbers"))
            if not ((mark >= 0) & (mark == mark.long())).all():
                raise ValueError(mismatch(f"marks[{i}]", shorten(str(mark.tolist()), 60), "whole numbers from 0 on"))
        lengths = torch.tensor([len(each) for each in times])
        padded = pad_sequence(times, batch_first=True)
        events = Events(padded, pad_sequence([each.long() for each in marks], batch_first=True), lengths, end)
        sound = (events.gaps() >= 0).all(1) & (events.times <= events.end.unsqueeze(1)).all(1)
        if not sound.all():
            given = "a time before the one before it, before 0 or after the end"
            raise ValueError(
                mismatch(f"times[{int(sound.long().argmin())}]", given, "times from 0 to the end in order")
            )
        return events

    def take(self, rows: Tensor) -> Events:
        """Return the sequences `rows` (R,) int64, cut to the longest of them. Without rows, the shapes are (0, 0) and
        (0,). Raises a `ValueError` for a number, or for rows that do not exist."""
        lengths = None
        with suppress(IndexError, TypeError):
            lengths = self.lengths[rows]
        if lengths is None or lengths.dim() != 1:
            raise ValueError(
                mismatch(
                    "rows", shorten(repr(rows), 60), f"(R,) int64 below {len(self.lengths)}, the number of sequences"
                )
            )
        longest = int(lengths.max()) if len(lengths) else 0
        return Events(self.times[rows, :longest], self.marks[rows, :longest], lengths, self.end[rows])

    @property
    def there(self) -> Tensor:
        """(B, N) bool: True at events, False at padding."""
        return torch.arange(self.times.shape[1], device=self.lengths.device) < self.lengths.unsqueeze(1)

    def gaps(self) -> Tensor:
        """Return the times (B, N) from one event to the next, the first counted from time 0; 0 at padding."""
        return self.times.diff(dim=1, prepend=torch.zeros_like(self.times[:, :1])).where(self.there, 0.0)


def _sequences(name: str, given: Iterable[Any]) -> list[Any]:
    try:
        return list(given)
    except (TypeError, RuntimeError) as error:
        raise ValueError(mismatch(name, kind_of(given), "a list of sequences")) from error


def _as_tensor(name: str, given: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return the given object as a tensor of real numbers, with ints as int64 by default; a `ValueError` names it if it
    cannot be converted."""
    try:
        # A dtype would silently drop the imaginary part of an array. Without a dtype, the digits of a list are kept.
        if not isinstance(given, Tensor) and hasattr(given, "__array__"):
            tensor = torch.from_numpy(_readable(given))
        else:
            tensor = torch.as_tensor(given, dtype=None if isinstance(given, Tensor) else dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(mismatch(name, shorten(repr(given), 60), "numbers")) from error
    if not is_dense(tensor) or tensor.is_complex() or tensor.is_quantized or tensor.is_meta:
        raise ValueError(mismatch(name, shorten(repr(given), 60), "a dense tensor of real numbers"))
    return tensor.to(dtype or (tensor.dtype if tensor.is_floating_point() else torch.int64))


def _readable(given: Any) -> np.ndarray:
    """Return an array, or a column of pandas in its own order, in a layout that torch reads. torch itself would look up
    the places of a column in its index."""
    found = np.asarray(given)
    return np.array(found, found.dtype.newbyteorder("="), order="C")
