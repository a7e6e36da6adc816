"""Long streams of events, cut into windows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..point_processes import Events


def windows(streams: list[tuple[Tensor, Tensor]], end: float, day: float, window: int, shortest: int) -> Events:
    """Return all runs of up to `window` consecutive events of streams, as sequences; runs of fewer than `shortest` are left out.

    `ValueError` if none is left.

    Args:
        streams: times and marks (N,) of each stream, the times in order.
        end: until when all streams were observed, and with them their last runs; others count as observed until their last event.
        day: the length of a day. The clock of a run starts at the midnight before its first event.
    """
    times, marks, ends = [], [], []
    for stream_times, stream_marks in streams:
        runs = list(zip(stream_times.double().split(window), stream_marks.split(window), strict=True))
        for number, (time, mark) in enumerate(runs, 1):
            if len(time) < shortest:
                continue
            midnight = (math.ceil(time[0] / day) - 1) * day  # for an event at midnight sharp, a day before it
            times.append(time - midnight)
            marks.append(mark)
            ends.append((end if number == len(runs) else float(time[-1])) - midnight)
    if not times:
        raise ValueError(f"no stream has a run of {shortest} events, the shortest that is asked for")
    return Events.pad(times, marks, torch.tensor(ends, dtype=torch.float64))
