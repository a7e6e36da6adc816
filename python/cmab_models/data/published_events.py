"""Events in the published formats of Mooc and Reddit. The data comes with no package; it must be downloaded.

Mooc (411,749 actions of 7,047 students of an online course) and Reddit (posts of its 10,000 most active users) are from
Kumar et al., KDD 2019, the project JODIE at Stanford (https://snap.stanford.edu/jodie). That page gives the terms of
use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cmab_kernels.runtime.checks import mismatch

from ..point_processes import Events
from .pickled_arrays import STAND_INS, plain

DAY = 86_400.0
"""Seconds in a day."""

_HEADERS = {
    "user_id,item_id,timestamp,state_label": (",", (0, 1, 2)),
    "ACTIONID\tUSERID\tTARGETID\tTIMESTAMP": ("\t", (1, 2, 3)),
}
"""Start of a file's first line -> the separator of columns, and the columns of user, item and time."""


class Interactions(NamedTuple):
    """Interactions of users with items."""

    users: list[tuple[Tensor, Tensor]]
    """times (N,) float64, in order and in seconds, and items (N,) float64 of each user"""
    end: float
    """the last time of all users, the end of their observation"""


def read_interactions(path: str | Path) -> Interactions:
    """Return the interactions of a file. Items can be the marks of events.

    The first line of a file tells its format. `mooc.csv` and `reddit.csv` of JODIE have features after the fourth
    column, which are not read. `mooc_actions.tsv` is the form of Mooc in Stanford's collection of networks. Any other
    first line raises a `ValueError`.
    """
    with open(path, encoding="utf-8") as file:
        first = file.readline().strip()
    form = next((form for start, form in _HEADERS.items() if first.startswith(start)), None)
    if form is None:
        raise ValueError(
            mismatch(
                str(path),
                f"the first line {first[:60]!r}",
                f"one that starts with one of {', '.join(map(repr, _HEADERS))}",
            )
        )
    separator, columns = form
    users, items, times = np.loadtxt(path, delimiter=separator, skiprows=1, usecols=columns, unpack=True, ndmin=2)
    if not len(times):
        raise ValueError(mismatch(str(path), "no interactions below its first line", "at least one"))
    order = np.lexsort((times, users))
    _, lengths = np.unique(users, return_counts=True)
    by_user = (torch.from_numpy(part[order]).split(lengths.tolist()) for part in (times, items))
    return Interactions(list(zip(*by_user, strict=True)), float(times.max()))


def read_sequences(path: str | Path) -> Events:
    """Return the sequences of a file of `torch.save`, in the format of Intensity-Free Learning of Temporal Point
    Processes (Shchur et al.).

    The file holds {"sequences": [{"arrival_times": [...], "marks": [...], "t_start": 0.0, "t_end": 10.0}, ...]}, with
    lists, arrays or tensors. Without "marks" all marks are 0. Only data is read: a file that would execute code raises
    an error. Any other content raises a `ValueError`.
    """
    with torch.serialization.safe_globals([(each, name) for name, each in STAND_INS.items()]):
        found: Any = plain(torch.load(path, weights_only=True))
    try:
        sequences = found["sequences"]
        starts = [float(each.get("t_start", 0.0)) for each in sequences]
        given = [torch.as_tensor(each["arrival_times"], dtype=torch.float64) for each in sequences]
        times = [time - start for time, start in zip(given, starts, strict=True)]
        marks = [_marks(each, len(time)) for each, time in zip(sequences, times, strict=True)]
        ends = [float(each["t_end"]) - start for each, start in zip(sequences, starts, strict=True)]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            mismatch(str(path), f"other contents ({error!r})", "sequences with arrival_times and t_end")
        ) from error
    return Events.pad(times, marks, ends)


def _marks(sequence: dict[str, Any], events: int) -> Tensor:
    return torch.as_tensor(sequence.get("marks", torch.zeros(events)))
