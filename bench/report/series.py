"""A run as curves, and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..runs import Row, Run, Value

LENGTHS = ("N", "n")
"""The axes that matter most: keys, or tokens of a window."""

POINTS = 3
"""With fewer points, no curve is drawn."""

# ---- curves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Groups of a scan that differ in only one parameter."""

    scan: str
    axis: str
    fixed: Mapping[str, Value]
    lines: Mapping[str, tuple[Row, ...]]
    """implementation -> its rows along the axis"""

    @property
    def values(self) -> list[int]:
        return sorted({int(row.parameters[self.axis]) for rows in self.lines.values() for row in rows})


def axes(run: Run, scan: str) -> list[str]:
    """Parameters of a scan along which it has curves; the longest first, and N or n before all others."""
    names = dict.fromkeys(name for row in run.scans[scan] for name in row.parameters)
    points = {name: max((len(one.values) for one in series(run, scan, name)), default=0) for name in names}
    return sorted((name for name in names if points[name]), key=lambda name: (name not in LENGTHS, -points[name]))


def series(run: Run, scan: str, axis: str) -> list[Series]:
    """The curves along `axis`: for each set of groups that differ only in `axis`, the implementations with three points
    or more."""
    sets: dict[tuple[tuple[str, Value], ...], list[Row]] = {}
    for row in run.scans[scan]:
        if isinstance(row.parameters.get(axis), int):  # the table of rows covers words
            sets.setdefault(tuple(sorted(_without(row.parameters, axis).items())), []).append(row)
    found = [Series(scan, axis, _without(rows[0].parameters, axis), _lines(rows, axis)) for rows in sets.values()]
    return [one for one in found if one.lines]


def _without(parameters: Mapping[str, Value], axis: str) -> dict[str, Value]:
    return {name: value for name, value in parameters.items() if name != axis}


def _lines(rows: Sequence[Row], axis: str) -> dict[str, tuple[Row, ...]]:
    lines = {}
    for name in dict.fromkeys(row.implementation for row in rows):
        along = {row.parameters[axis]: row for row in rows if row.implementation == name}
        if len(along) >= POINTS:
            lines[name] = tuple(along[value] for value in sorted(along))
    return lines


# ---- words -----------------------------------------------------------------------------------------------------------

BARE = ("pass", "dtype")
"""Parameters whose values need no name beside them."""

COUNTED = {
    **{"N": ("key", "keys"), "L": ("query", "queries"), "H": ("head", "heads"), "m": ("landmark", "landmarks")},
    **{"t": ("token a call", "tokens a call"), "threads": ("thread", "threads"), "states": ("state", "states")},
}
"""Parameters that are counts -> the singular and the plural of the counted thing."""

SIZED = {"B": "batch of", "n": "window of", "D": "width", "d": "width", "C": "model width", "E": "value width"}
"""Parameters that are sizes -> the words before the number."""


def words(parameters: Mapping[str, Value]) -> str:
    """Parameters in the words of a reader.

    >>> from bench.report.series import words
    >>> words({"pass": "forward", "N": 100_000, "landmarks": "fixed"})
    'forward, 100,000 keys, fixed landmarks'
    """
    return ", ".join(_say(name, value) for name, value in parameters.items())


def _say(name: str, value: Value) -> str:
    if isinstance(value, int):
        return f"{value:,} {COUNTED[name][value != 1]}" if name in COUNTED else f"{SIZED.get(name, name)} {value:,}"
    return value if name in BARE else f"{value} {name}"


def labels(rows: Sequence[Row]) -> tuple[str, dict[str, str]]:
    """The common description of a set of rows, and a label for each group:
    its pass, its length, and its differences."""
    counts: dict[str, Counter[Value]] = {}
    for row in rows:
        for name, value in row.parameters.items():
            counts.setdefault(name, Counter())[value] += 1
    usual = {name: found.most_common(1)[0][0] for name, found in counts.items()}
    varied = {name for name, found in counts.items() if len(found) > 1}
    told = varied & {"pass", *LENGTHS}
    each = {}
    for row in rows:
        unlike = {name for name, value in row.parameters.items() if name in told or value != usual[name]}
        each[row.group] = words({n: v for n, v in row.parameters.items() if n in (unlike or varied)}) or row.group
    once = words({name: value for name, value in usual.items() if name not in told})
    return f"{'unless stated otherwise, ' if varied - told and once else ''}{once}", each
