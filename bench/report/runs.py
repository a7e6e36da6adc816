"""A run's file: read, judged, and given as rows. All that shows or compares runs takes them from here."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..harness import KERNELS, ratio

FORMAT = 1
"""What `cmab_kernels_bench` says in a file that this code writes and reads."""

LENGTHS = ("N", "n")
"""Axes that matter most: keys, or tokens of a window."""

DEFINITION = "reference"
"""What ours is tested against: it is slow, and no peer."""

IMPLEMENTATIONS = frozenset(name for names in KERNELS.values() for name in names)
"""What an operator's own kernels are called."""

FAULTS = ("wrong", "failed")
"""What reasons begin with that are none of a machine or an installation."""

POINTS = 3
"""Fewer are no curve."""

Value = int | str


class BadRun(Exception):
    """A file that is no run: which one, what was found, what to do."""


@dataclass(frozen=True)
class Row:
    """One implementation of a group: what was measured of it. Times in seconds, memory in bytes."""

    group: str
    implementation: str
    ours: bool
    scan: str
    parameters: Mapping[str, Value]
    median: float
    low: float
    """First quartile of the samples; `high` is the third."""
    high: float
    samples: tuple[float, ...]
    info: Mapping[str, Any]
    """All of the row's extra_info, as it stands in the file."""

    @property
    def kernel(self) -> bool:
        """One of ours that is meant to be fast."""
        return self.ours and self.implementation != DEFINITION

    @property
    def peer(self) -> bool:
        """Nothing of ours: its time changes only with the machine and the software around it."""
        return not self.ours and self.implementation != DEFINITION

    @property
    def spread(self) -> float:
        """Interquartile range over median."""
        return (self.high - self.low) / self.median

    @property
    def extra_memory(self) -> int:
        """Peak beyond the inputs, results included."""
        return int(self.info["extra_memory"])

    @property
    def scratch(self) -> int:
        """Peak beyond inputs and results: what an implementation can do something about."""
        return self.extra_memory - int(self.info["result_memory"])

    @property
    def error(self) -> float:
        return float(self.info["error"])

    @property
    def threads(self) -> int:
        return int(self.info["threads"])

    @property
    def share(self) -> float | None:
        """Of the median, that the floor takes."""
        return self.info.get("share")

    @property
    def ratio(self) -> float | None:
        """To the fastest baseline of the group."""
        return self.info.get("ratio")

    @property
    def ratio_quartiles(self) -> tuple[float, float] | None:
        return tuple(self.info["ratio_quartiles"]) if self.ratio is not None else None

    @property
    def baseline(self) -> str | None:
        return self.info.get("baseline")


@dataclass(frozen=True)
class Run:
    """One file of results."""

    path: Path
    raw: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def quick(self) -> bool:
        return bool(self.raw["quick"])

    @property
    def threads(self) -> int:
        return int(self.raw["threads"])

    @property
    def device(self) -> str:
        return str(self.raw["device"])

    @property
    def machine(self) -> Mapping[str, Any]:
        return self.raw["machine_info"]

    @property
    def processor(self) -> str:
        """What measured: the GPU's name, or the CPU's."""
        return self.rows[0].info["provenance"]["device"] if self.rows else self.machine["cpu"]["brand_raw"]

    @property
    def versions(self) -> Mapping[str, str | None]:
        return self.machine["versions"]

    @property
    def commit(self) -> str:
        """Ten digits of it, or that there is none; `+` where the tree had changes that it does not hold."""
        name = str(self.raw["commit_info"].get("id"))
        digits = name[:10] if len(name) == 40 else name
        return digits + ("+" if self.raw["commit_info"].get("dirty") else "")

    @property
    def date(self) -> str:
        return str(self.raw["datetime"])[:16].replace("T", " ")

    @property
    def not_measured(self) -> Mapping[str, str]:
        """GROUP-IMPLEMENTATION -> why."""
        return self.raw["not_measured"]

    @property
    def wrong(self) -> Mapping[str, str]:
        """Of those, whatever should have run and did not, or not to a right result."""
        return {name: why for name, why in self.not_measured.items() if why.startswith(FAULTS)}

    @cached_property
    def groups(self) -> Mapping[str, tuple[Row, ...]]:
        names = dict.fromkeys(row.group for row in self.rows)
        return {name: tuple(row for row in self.rows if row.group == name) for name in names}

    @cached_property
    def scans(self) -> Mapping[str, tuple[Row, ...]]:
        names = dict.fromkeys(row.scan for row in self.rows)
        return {name: tuple(row for row in self.rows if row.scan == name) for name in names}

    @cached_property
    def kernels(self) -> frozenset[str]:
        """Names of ours."""
        return frozenset(row.implementation for row in self.rows if row.kernel)

    def called(self, implementation: str) -> str:
        """For readers who do not know that `native` is ours."""
        ours = implementation in self.kernels and not implementation.startswith("cmab_kernels")
        return f"cmab_kernels, {implementation}" if ours else implementation

    @cached_property
    def implementations(self) -> tuple[str, ...]:
        """Ours first, the definition last, peers by how often they appear."""
        count = Counter(row.implementation for row in self.rows)
        return tuple(sorted(count, key=lambda name: (name not in self.kernels, name == DEFINITION, -count[name], name)))


# ---- reading ---------------------------------------------------------------------------------------------------------------------------

TOP: dict[str, type | tuple[type, ...]] = {
    "quick": bool,
    "threads": int,
    "device": str,
    "datetime": str,
    "machine_info": dict,
    "commit_info": dict,
    "not_measured": dict,
    "figures": dict,
    "benchmarks": list,
}
INFO: dict[str, type | tuple[type, ...]] = {
    "implementation": str,
    "ours": bool,
    "scan": str,
    "parameters": dict,
    "extra_memory": int,
    "result_memory": int,
    "flops": int,
    "bytes": int,
    "error": (int, float),
    "threads": int,
    "repeats": int,
    "gflops": (int, float),
    "provenance": dict,
}


def load(path: Path) -> Run:
    """The run of a file, or BadRun."""
    raw = _json(path)
    version = raw.get("cmab_kernels_bench") if isinstance(raw, dict) else None
    if version is None:
        kind = "of pytest-benchmark, but an older one or another project's" if isinstance(raw, dict) and "benchmarks" in raw else "foreign"
        raise BadRun(f"{path}: no run of these benchmarks ({kind}: there is no cmab_kernels_bench in it); give a file that they wrote")
    if version != FORMAT:
        raise BadRun(
            f"{path}: a run in format {version!r}, and this code reads format {FORMAT}; use the version that wrote it, or measure anew"
        )
    if fault := _fault(raw, TOP):
        raise BadRun(f"{path}: {fault}; the file is damaged: measure anew, or take another")
    rows = tuple(_row(path, number, row) for number, row in enumerate(raw["benchmarks"]))
    run = Run(path, raw, rows)
    for group, members in run.groups.items():
        if len({len(row.samples) for row in members}) > 1:
            raise BadRun(f"{path}: rows of {group} took turns, and have not as many samples each; the file is damaged: measure anew")
    return run


def _json(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadRun(f"{path}: cannot be read ({error.strerror}); give the JSON of a run") from None
    except UnicodeDecodeError:
        raise BadRun(f"{path}: no text; give the JSON of a run") from None
    if not text.strip():
        raise BadRun(f"{path}: empty; give the JSON of a run")
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else "nested without end"
        raise BadRun(f"{path}: no JSON, or cut short ({where}); give the whole JSON of a run") from None


def _fault(found: Any, fields: Mapping[str, type | tuple[type, ...]]) -> str | None:
    """What is missing from a mapping, or of the wrong kind."""
    if not isinstance(found, dict):
        return f"{found!r:.40} where a mapping is due"
    for name, kind in fields.items():
        if name not in found:
            return f"{name} is missing"
        if not isinstance(found[name], kind) or (isinstance(found[name], bool) and kind is not bool):
            return f"{name} is {found[name]!r:.40}"
    return None


def _row(path: Path, number: int, raw: Any) -> Row:
    fault = _fault(raw, {"group": str, "stats": dict, "extra_info": dict}) or _fault(raw["extra_info"], INFO)
    fault = fault or _statistics_fault(raw["stats"]) or _optional_fault(raw["extra_info"])
    if fault:
        group = raw.get("group") if isinstance(raw, dict) else None
        raise BadRun(f"{path}: row {number + 1} ({group}): {fault}; the file is damaged: measure anew, or take another")
    info, stats = raw["extra_info"], raw["stats"]
    samples = tuple(map(float, stats["data"]))
    return Row(
        raw["group"],
        info["implementation"],
        info["ours"],
        info["scan"],
        info["parameters"],
        float(stats["median"]),
        *_quartiles(samples),
        samples,
        info,
    )


def _statistics_fault(stats: Mapping[str, Any]) -> str | None:
    if not _positive(stats.get("median")):
        return f"median is {stats.get('median')!r:.40}"
    data = stats.get("data")
    return None if isinstance(data, list) and len(data) > 1 and all(map(_positive, data)) else "data holds no samples in seconds"


def _optional_fault(info: Mapping[str, Any]) -> str | None:
    """What only some rows have is a number, and comes with what belongs to it."""
    for name in ("floor", "share", "ratio"):
        if info.get(name) is not None and not _positive(info[name]):
            return f"{name} is {info[name]!r:.40}"
    if info.get("ratio") is None:
        return None
    quartiles = info.get("ratio_quartiles")
    if not (isinstance(quartiles, list) and len(quartiles) == 2 and all(map(_positive, quartiles))):
        return f"ratio_quartiles is {quartiles!r:.40}"
    return None if isinstance(info.get("baseline"), str) else "a ratio is there, and no baseline"


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _quartiles(samples: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


# ---- curves ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Groups of a scan that differ in one parameter only."""

    scan: str
    axis: str
    fixed: Mapping[str, Value]
    lines: Mapping[str, tuple[Row, ...]]
    """implementation -> its rows along the axis"""

    @property
    def values(self) -> list[Value]:
        return _ordered({row.parameters[self.axis] for rows in self.lines.values() for row in rows})

    @property
    def numeric(self) -> bool:
        return all(isinstance(value, int) for value in self.values)


def axes(run: Run, scan: str) -> list[str]:
    """Parameters of a scan along which it has curves; the longest first, and N or n before all."""
    names = dict.fromkeys(name for row in run.scans[scan] for name in row.parameters)
    points = {name: max((len(one.values) for one in series(run, scan, name)), default=0) for name in names}
    return sorted((name for name in names if points[name]), key=lambda name: (name not in LENGTHS, -points[name]))


def series(run: Run, scan: str, axis: str) -> list[Series]:
    """The curves along `axis`: of each set of groups that differ in it alone, implementations with three points or more."""
    sets: dict[tuple[tuple[str, Value], ...], list[Row]] = {}
    for row in run.scans[scan]:
        if axis in row.parameters:
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
            lines[name] = tuple(along[value] for value in _ordered(along))
    return lines


def _ordered(values: Iterable[Value]) -> list[Value]:
    """Numbers by size, before words by the alphabet."""
    return sorted(values, key=lambda value: (isinstance(value, str), value))


# ---- words -----------------------------------------------------------------------------------------------------------------------------

BARE = ("pass", "dtype")
"""Parameters whose values need no name beside them."""


def words(parameters: Mapping[str, Value]) -> str:
    """As a reader would say them.

    >>> from bench.report.runs import words
    >>> words({"pass": "forward", "N": 100_000, "landmarks": "fixed"})
    'forward, N = 100,000, fixed landmarks'
    """
    return ", ".join(_say(name, value) for name, value in parameters.items())


def _say(name: str, value: Value) -> str:
    if isinstance(value, int):
        return f"{name} = {value:,}"
    return value if name in BARE else f"{value} {name}"


def labels(rows: Sequence[Row]) -> tuple[str, dict[str, str]]:
    """What is said once of a set of rows, and what of each group: its pass and its length, and where it is not like most."""
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
    return f"{'where not said otherwise, ' if varied - told and once else ''}{once}", each


def speed_up(ours: Row, peer: Row) -> tuple[float, float, float]:
    """How many times as long the peer takes: of the medians, and the quartiles of the rounds."""
    of = ratio(peer.samples, ours.samples)
    return of["ratio"], *of["ratio_quartiles"]


def fastest(rows: Iterable[Row]) -> Row | None:
    """Of our kernels in a group: of the operator's own, if there are; what else is ours computes something else."""
    ours = [row for row in rows if row.kernel]
    named = [row for row in ours if row.implementation in IMPLEMENTATIONS]
    return min(named or ours, key=lambda row: row.median, default=None)
