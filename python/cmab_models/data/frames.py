"""Events from a table of pandas or polars: a column of times, a column of marks, and a column that tells the sequences
apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from fractions import Fraction
from numbers import Real
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch

from cmab_kernels.runtime.checks import kind_of, mismatch

from ..point_processes import Events
from ..pretrained import python_value


class FrameEvents(NamedTuple):
    """The events of a table, and the meaning of its numbers."""

    events: Events
    """times in `unit` since `start`; marks are indices into `marks`"""
    marks: tuple[Hashable, ...]
    """the labels, in order; () without a column of marks"""
    sequences: tuple[Hashable, ...]
    """the values that tell the sequences apart, in order; () without such a column"""
    start: Any
    """the time that counts as 0, in the type of the table"""
    unit: str
    """the unit of `times`"""


def events_from_frame(
    frame: Any,
    time: str,
    mark: str | None = None,
    sequence: str | None = None,
    *,
    unit: str = "h",
    start: Any = None,
    end: Any = None,
    marks: Iterable[Hashable] | None = None,
    resolution: float = 0.0,
) -> FrameEvents:
    """Return the rows of a table as sequences of events.

    Args:
        frame: a `pandas.DataFrame`, or another table that has `to_pandas`, such as a table of polars. Rows may be in
            any order.
        time: the column of times: numbers, or timestamps, with or without a time zone.
        mark: the column of labels, of any type that can be sorted; None: all marks are 0.
        sequence: the column that tells sequences apart, such as a user; None: one sequence.
        unit: the unit to which timestamps are converted: "D", "h", "m" or "s". Numbers keep their unit.
        start, end: the start and end of the observation of all sequences, in the type of the column of times. A time
            without a time zone has the time zone of the column. None: the first and the last time in the table. An
            event at the start has a gap of 0.
        marks: the labels in the order of their numbers, such as the `marks` of the table with which a model was
            trained, so that a label has the same number in both tables. None: the labels of this table, sorted.
        resolution: the step of the clock of the table, in `unit`, such as 1 / 60 for minutes in a table of hours. Each
            time is moved to a random place within its step, the same on each call. Times in coarse steps, and events at
            equal times, have no density. Without a resolution, the likelihood mostly measures how well a model has
            learned the steps.

    Raises a `ValueError` for a column that does not exist or occurs twice, for missing values (the message counts
    them), for an empty table, for a time before the start or after the end, and for a label that is not among `marks`.
    Raises a `TypeError` for labels that cannot be sorted or counted, such as lists.

    >>> import pandas
    >>> table = pandas.DataFrame({
    ...     "when": pandas.to_datetime(["2026-01-01 08:00", "2026-01-01 12:30", "2026-01-01 09:00"]),
    ...     "what": ["rain", "sun", "rain"],
    ... })
    >>> found = cmab_models.events_from_frame(table, "when", "what", start="2026-01-01", end="2026-01-02")
    >>> found.events.times, found.marks, found.events.end
    (tensor([[ 8.0000,  9.0000, 12.5000]], dtype=torch.float64), ('rain', 'sun'), tensor([24.], dtype=torch.float64))
    """
    import pandas

    if unit not in _UNITS:
        raise ValueError(mismatch("unit", repr(unit), f"one of {', '.join(_UNITS)}"))
    table = frame.to_pandas() if hasattr(frame, "to_pandas") else frame
    if not isinstance(table, pandas.DataFrame):
        raise TypeError(mismatch("frame", kind_of(frame), "a pandas.DataFrame, or a table that has to_pandas"))
    columns = {
        name: _column(table, name, label)
        for name, label in (("time", time), ("mark", mark), ("sequence", sequence))
        if label is not None
    }
    since_start, length, start = _clock(columns["time"], unit, start, end)
    if not (isinstance(resolution, Real) and 0 <= resolution < math.inf):
        raise ValueError(mismatch("resolution", repr(resolution), "a finite number >= 0"))
    since_start = since_start + np.random.default_rng(0).uniform(0.0, float(resolution), len(table))
    length = max(length, float(since_start.max()))  # the last event may have moved beyond the end
    if marks is not None and mark is None:
        raise ValueError(mismatch("mark", None, "the column of the labels `marks`"))
    numbers, labels = _numbered(columns, "mark", marks)
    groups, names = _numbered(columns, "sequence")
    order = np.lexsort((since_start, groups))
    lengths = np.bincount(groups).tolist()
    times, of_events = (torch.from_numpy(part[order]).split(lengths) for part in (since_start, numbers))
    events = Events.pad(times, of_events, [length] * len(lengths))
    return FrameEvents(events, labels, names, start, unit)


_UNITS = ("D", "h", "m", "s")


def _column(table: Any, name: str, label: str) -> Any:
    if not isinstance(label, Hashable) or label not in table.columns:
        raise ValueError(mismatch(name, repr(label), f"one of the columns {', '.join(map(str, table.columns))}"))
    column = table[label]
    if column.ndim != 1:
        raise ValueError(mismatch(name, f"{label!r}, the name of {column.shape[1]} columns", "the name of one"))
    if not len(column):
        raise ValueError(mismatch("frame", "no row", "at least one"))
    if column.isna().any():
        raise ValueError(
            mismatch(name, f"{int(column.isna().sum())} missing values in {label!r}", "none; drop their rows")
        )
    return column


def _numbered(
    columns: dict[str, Any], name: str, known: Iterable[Hashable] | None = None
) -> tuple[np.ndarray, tuple[Hashable, ...]]:
    """Return the number of the label in each row, and the labels; zeros and () without such a column."""
    import pandas

    if name not in columns:
        return np.zeros(len(columns["time"]), int), ()
    try:
        numbers, labels = pandas.factorize(columns[name], sort=True)
    except TypeError as error:
        raise TypeError(mismatch(name, f"a column of labels with {error}", "labels such as text or numbers")) from error
    if known is None:
        return numbers, tuple(map(python_value, labels.tolist()))
    known = tuple(known)
    twice = [label for label, count in Counter(known).items() if count > 1]
    if twice:
        raise ValueError(mismatch("marks", f"{twice[0]!r} more than once", "different labels"))
    place = {label: number for number, label in enumerate(known)}
    strange = [label for label in labels if label not in place]
    if strange:
        given = f"{len(strange)} labels that `marks` lacks, such as {strange[0]!r}"
        raise ValueError(mismatch(name, given, f"only {shorten(', '.join(map(repr, known)), 60)}"))
    return np.array([place[label] for label in labels])[numbers], known


def _clock(column: Any, unit: str, start: Any, end: Any) -> tuple[np.ndarray, float, Any]:
    """Return the times since the start, the end as a time since the start, and the start."""
    import pandas

    if pandas.api.types.is_numeric_dtype(column.dtype) and column.dtype.kind in "iuf":
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            raise ValueError(mismatch("time", "an infinity", "finite numbers"))
        bounds = [None if each is None else _number(name, each) for name, each in (("start", start), ("end", end))]
        kind = float if column.dtype.kind == "f" else int  # Python compares its ints with a float exactly
        found = kind(column.min()), kind(column.max())
        first, last = _bounds(bounds, found)
        return _since(column, first), float(Fraction(last) - Fraction(first)), first
    if not pandas.api.types.is_datetime64_any_dtype(column.dtype):
        raise TypeError(
            mismatch(
                "time",
                f"a column of {column.dtype}",
                "numbers or timestamps; pandas.to_datetime makes timestamps of text",
            )
        )
    one = pandas.Timedelta(1, unit)
    bounds = [None if each is None else _time(name, each, column) for name, each in (("start", start), ("end", end))]
    first, last = _bounds(bounds, (column.min(), column.max()))
    return ((column - first) / one).to_numpy(np.float64), float((last - first) / one), first


def _bounds(given: Iterable[Any], found: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the start and the end: those that are given, or the first and the last time."""
    first, last = (found[i] if each is None else each for i, each in enumerate(given))
    for name, bound, beyond in (("start", first, found[0] < first), ("end", last, found[1] > last)):
        if beyond:
            raise ValueError(mismatch(name, bound, f"times from {found[0]} to {found[1]} inside"))
    return first, last


def _since(column: Any, start: Any) -> np.ndarray:
    """Return numbers minus the start. Nanoseconds since 1970 have more digits than a float64, so they are subtracted as
    ints; differences of narrow types would leave their range."""
    if column.dtype.kind == "f":
        found: np.ndarray = column.to_numpy(np.float64) - float(start)
        return found
    whole = math.floor(start)
    fits = all(abs(each) < 2**62 for each in (int(column.min()), int(column.max()), whole))
    ints = column.to_numpy(np.int64 if fits else object)
    return (ints - whole).astype(np.float64) - float(start - whole)


def _number(name: str, given: Any) -> Any:
    if not isinstance(given, Real) or not math.isfinite(given):
        raise ValueError(mismatch(name, repr(given), "a finite number, as the times are"))
    return given


def _time(name: str, given: Any, column: Any) -> Any:
    """Return a time in the type of the column; a time without a time zone has the time zone of the column."""
    import pandas

    zone = column.dt.tz
    try:
        time = pandas.Timestamp(given)
    except (ValueError, TypeError) as error:
        raise ValueError(mismatch(name, f"{given!r} ({error})", "a time")) from None
    if time is pandas.NaT or (zone is None and time.tz is not None):
        raise ValueError(
            mismatch(
                name, repr(given), "a time" if time is pandas.NaT else "a time without a time zone, as in the column"
            )
        )
    try:
        return time if zone is None else time.tz_localize(zone) if time.tz is None else time.tz_convert(zone)
    except Exception as error:  # pandas raises other classes in each version
        given = f"{time}, which is not one time in {zone}, as clocks change"
        raise ValueError(mismatch(name, given, "a time with a time zone, such as an offset from UTC")) from error
