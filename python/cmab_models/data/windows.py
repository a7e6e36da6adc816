"""Long streams of events, cut into windows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cmab_kernels.runtime.checks import mismatch

from ..point_processes import Events


def windows(streams: list[tuple[Tensor, Tensor]], end: float, day: float, window: int, shortest: int) -> Events:
    """Cut streams into runs of up to `window` consecutive events, and return these as sequences. If a run has fewer
    than `shortest` events, it is left out.

    Raises a `ValueError` if no run is left.

    Args:
        streams: times and marks (N,) of each stream, the times in order.
        end: the end of the observation of all streams, and therefore of the last run of each stream. Any other run
            counts as observed until its last event.
        day: the length of a day. The clock of a run starts at the midnight before its first event.
    """
    times, marks, ends = [], [], []
    for stream_times, stream_marks in streams:
        runs = list(zip(stream_times.double().split(window), stream_marks.split(window), strict=True))
        for number, (time, mark) in enumerate(runs, 1):
            if len(time) < shortest:
                continue
            midnight = (math.ceil(time[0] / day) - 1) * day  # an event exactly at midnight belongs to the day before
            times.append(time - midnight)
            marks.append(mark)
            ends.append((end if number == len(runs) else float(time[-1])) - midnight)
    if not times:
        raise ValueError(mismatch("shortest", shortest, "a smaller number, as no stream has a run of so many events"))
    return Events.pad(times, marks, torch.tensor(ends, dtype=torch.float64))
