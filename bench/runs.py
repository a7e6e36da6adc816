"""Runs and their files: one JSON file per run, with common fields at its top,
then a line for each group and each row."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from .load import NOISY

FORMAT = 2
"""The number under `cmab_kernels_bench` in the files that this code writes and reads."""

KERNELS = {"cpu": ("native",), "cuda": ("triton", "cuda")}
"""Device -> names of this package's kernels for it."""

AUTO = "auto"
"""The implementation of a call without `impl`: one of the kernels."""

DEFINITION = "reference"
"""The implementation that ours are tested against: it is slow, and not a peer."""

FAULTS = ("wrong", "failed")
"""First words of the reasons that are faults of this package, and not of a machine, an installation or a peer."""

Value = int | str


class BadRun(Exception):
    """A file that is not a run: its name, the reason, and the remedy."""


def is_ours(implementation: str) -> bool:
    """True for kernels and modules of this package; the definition is not among them."""
    name = implementation.split(",")[0]
    return name == AUTO or any(name in names for names in KERNELS.values()) or implementation.startswith("cmab_kernels")


def of_this_package(implementation: str) -> bool:
    """True for all implementations whose faults are ours: kernels, modules and the definition."""
    return is_ours(implementation) or implementation == DEFINITION


class Spread(NamedTuple):
    """A median, and the quartiles around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """The measurement of one implementation of a group. Memory is in bytes."""

    group: str
    implementation: str
    scan: str
    """The measured public operator or module."""
    parameters: Mapping[str, Value]
    """Sizes and choices, by the letters of the formulas."""
    seconds: Spread
    """The time of one call, or of one step if a call does several steps."""
    rounds: int
    """The number of samples."""
    repeats: int
    """The number of calls in a sample; the sample is their mean."""
    extra_memory: int
    """Peak beyond the inputs, results included."""
    result_memory: int
    flops: int
    bytes: int
    error: float
    """Relative root mean square of the difference to the float64 oracle."""
    baseline: str | None = None
    """The implementation to which ratios of this group refer."""
    ratio: Spread | None = None
    """The ratio to the time of the baseline: that of the medians, and the quartiles of the ratios in each round."""
    speed_up: Spread | None = None
    """The time of a peer divided by that of our fastest kernel; None for other rows."""
    floor: float | None = None
    """The least number of seconds that the machine needs."""
    bound: str | None = None
    """The kind of work that takes the floor's time: exponentials, matrix or memory."""
    others: float | None = None
    """The share of all processors that other programs took while the group was timed;
    None if the system does not report it."""

    @property
    def ours(self) -> bool:
        return is_ours(self.implementation)

    @property
    def peer(self) -> bool:
        """Whether the implementation uses nothing from this package. Its time then changes only with the machine and
        other software."""
        return not self.ours and self.implementation != DEFINITION

    @property
    def noisy(self) -> bool:
        """Whether other programs took so much of the machine that the ratio is not conclusive."""
        return self.others is not None and self.others > NOISY

    @property
    def threads(self) -> int:
        return int(self.parameters["threads"])

    @property
    def spread(self) -> float:
        """Interquartile range of the time divided by its median."""
        return (self.seconds.high - self.seconds.low) / self.seconds.median

    @property
    def scratch(self) -> int:
        """Peak of memory beyond inputs and results, in bytes: the part that an implementation can influence."""
        return self.extra_memory - self.result_memory

    @property
    def gflops(self) -> float:
        """Billions of floating-point operations a second."""
        return self.flops / self.seconds.median / 1e9

    @property
    def share(self) -> float | None:
        """The floor as a share of the median time."""
        return self.floor / self.seconds.median if self.floor else None


@dataclass(frozen=True)
class Run:
    """All measurements of one session, and their circumstances."""

    date: str
    commit: str
    dirty: bool
    """The tree had uncommitted changes."""
    quick: bool
    threads: int
    device: str
    processor: str
    """The name of the measured CPU or GPU."""
    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    rates: Mapping[str, Any]
    """The rates from which floors are computed, by number of threads or by device."""
    figures: Mapping[str, float]
    notes: Sequence[str]
    """Caveats about this run."""
    not_measured: Mapping[str, str]
    """GROUP-IMPLEMENTATION -> why there is no row."""
    rows: tuple[Row, ...] = ()
    path: Path = field(default=Path("run.json"), compare=False)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def when(self) -> str:
        """Day and minute."""
        return self.date[:16].replace("T", " ")

    @property
    def revision(self) -> str:
        """Ten digits of the commit, and `+` if the tree had uncommitted changes."""
        return (self.commit[:10] if len(self.commit) == 40 else self.commit) + ("+" if self.dirty else "")

    @property
    def wrong(self) -> Mapping[str, str]:
        """The entries of `not_measured` that are faults of this package."""
        return {name: why for name, why in self.not_measured.items() if why.startswith(FAULTS)}

    @cached_property
    def groups(self) -> Mapping[str, tuple[Row, ...]]:
        return _by("group", self.rows)

    @cached_property
    def scans(self) -> Mapping[str, tuple[Row, ...]]:
        return _by("scan", self.rows)

    @cached_property
    def implementations(self) -> tuple[str, ...]:
        """Our implementations first, then peers by their number of rows, and the definition last."""
        count = Counter(row.implementation for row in self.rows)
        return tuple(sorted(count, key=lambda name: (not is_ours(name), name == DEFINITION, -count[name], name)))


def _by(name: str, rows: Iterable[Row]) -> dict[str, tuple[Row, ...]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(getattr(row, name), []).append(row)
    return {key: tuple(members) for key, members in found.items()}


def called(implementation: str) -> str:
    """The name for readers who do not know that `native` is our kernel."""
    return (
        f"cmab_kernels, {implementation}"
        if is_ours(implementation) and "cmab_kernels" not in implementation
        else implementation
    )


def fastest(rows: Iterable[Row]) -> Row | None:
    """Our kernel of a group: if there are several, the kernel that "auto" takes.

    A variant (`native, exact`) counts only if there is no other kernel of ours, because it may compute something else.
    """
    ours = [row for row in rows if row.ours]
    auto = [row for row in ours if row.implementation == AUTO]
    named = [row for row in ours if any(row.implementation in names for names in KERNELS.values())]
    return min(auto or named or ours, key=lambda row: row.seconds.median, default=None)


def beyond_results(row: Row) -> str:
    """Memory beyond inputs and results, as text; small negative values become 0."""
    size = round(row.scratch / 2**20, 1)
    return f"{size:+.1f} MiB" if size else "0.0 MiB"


# ---- writing ---------------------------------------------------------------------------------------------------------

HEAD = tuple(one.name for one in fields(Run) if one.name not in ("rows", "path"))
"""Fields at the top of a file."""
OF_GROUP = ("group", "scan", "parameters", "baseline", "others")
"""Fields that the rows of a group share, and that are stored in the group's line."""


def save(run: Run, path: Path) -> None:
    head = {name: getattr(run, name) for name in HEAD}
    groups = [{name: getattr(rows[0], name) for name in OF_GROUP} for rows in run.groups.values()]
    write_json(path, {"cmab_kernels_bench": FORMAT, **head, "groups": groups, "rows": list(map(told, run.rows))})


def told(row: Row, whole: bool = False) -> dict[str, Any]:
    """A row as JSON, without None and, unless `whole`, without the fields of its group."""
    shared = () if whole else OF_GROUP[1:]
    return {name: _digits(value) for name, value in asdict(row).items() if name not in shared and value is not None}


def _digits(value: Any) -> Any:
    """Floats with six digits; a timing has three significant digits."""
    if isinstance(value, (list, tuple)):
        return [_digits(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file in one step, so that an interrupted process leaves the old file or the new one."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(_lines(content) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def _lines(content: Any) -> str:
    """JSON with a line for each row, so that a difference between two files shows the row."""
    if isinstance(content, Mapping) and any(map(_has_rows, content.values())):
        return "{\n" + ",\n".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in content.items()) + "\n}"
    if isinstance(content, list) and content and isinstance(content[0], Mapping):
        return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in content) + "\n]"
    return json.dumps(content, ensure_ascii=False)


def _has_rows(content: Any) -> bool:
    if isinstance(content, Mapping):
        return any(map(_has_rows, content.values()))
    return isinstance(content, list) and bool(content) and isinstance(content[0], Mapping)


# ---- reading ---------------------------------------------------------------------------------------------------------

IN_JSON = {Mapping: dict, Sequence: list, Spread: list, float: (int, float)}
"""Type of a field -> its type in a file, if it is another."""
SPREADS = ("seconds", "ratio", "speed_up")

Kinds = Mapping[str, tuple[Any, ...]]
"""Name of a field -> its types in a file."""


def _kinds(record: type, names: Iterable[str]) -> Kinds:
    """The types of these fields of a record; with None for those that a file may leave out."""
    found, hints = {}, get_type_hints(record)
    for name in names:
        parts = get_args(hints[name]) if type(None) in get_args(hints[name]) else (hints[name],)
        found[name] = tuple(IN_JSON.get(get_origin(part) or part, part) for part in parts)
    return found


TOP = {**_kinds(Run, HEAD), "groups": (list,), "rows": (list,)}
GROUP = _kinds(Row, OF_GROUP)
ROW = _kinds(Row, ("group", *(one.name for one in fields(Row) if one.name not in OF_GROUP)))


def load(path: Path) -> Run:
    """The run of a file, or BadRun."""
    raw = _json(path)
    version = raw.get("cmab_kernels_bench") if isinstance(raw, dict) else None
    if version is None:
        raise BadRun(
            f"{path}: not a run of these benchmarks (it has no cmab_kernels_bench); give a file that they wrote"
        )
    if version != FORMAT:
        raise BadRun(
            f"{path}: a run in format {version!r}, and this code reads format {FORMAT}; use the version that wrote "
            "it, or measure again"
        )
    try:
        _check(raw, TOP)
        groups = {_check(group, GROUP)["group"]: group for group in raw["groups"]}
        rows = tuple(_row(number, row, groups) for number, row in enumerate(raw["rows"]))
    except _Damage as damage:
        raise BadRun(f"{path}: {damage}; the file is damaged: measure again, or take another") from None
    return Run(rows=rows, path=path, **{name: raw[name] for name in HEAD})


class _Damage(Exception):
    """The faults in a file."""


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRun(f"{path}: cannot be read ({error.strerror}); give the JSON of a run") from None
    except UnicodeDecodeError:
        raise BadRun(f"{path}: not a text file; give the JSON of a run") from None
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise BadRun(f"{path}: not JSON, or cut short ({where}); give the whole JSON of a run") from None


def _check(found: Any, kinds: Kinds) -> dict[str, Any]:
    """`found`, if every field has its type; a field that may be None may be absent."""
    if not isinstance(found, dict):
        raise _Damage(f"{found!r:.40} where a mapping is expected")
    for name, kind in kinds.items():
        if name not in found and type(None) not in kind:
            raise _Damage(f"{name} is missing")
        if not isinstance(value := found.get(name), kind) or (isinstance(value, bool) and bool not in kind):
            raise _Damage(f"{name} is {value!r:.40}")
    return found


def _row(number: int, raw: Any, groups: Mapping[str, Any]) -> Row:
    try:
        _check(raw, ROW)
        if raw["group"] not in groups:
            raise _Damage(f"{raw['group']} is not a group of this file")
        spreads = {name: _spread(name, raw[name]) for name in SPREADS if name in raw}
        if "floor" in raw and not _positive(raw["floor"]):
            raise _Damage(f"floor is {raw['floor']!r:.40}")
        return Row(**{**raw, **groups[raw["group"]], **spreads})
    except (_Damage, TypeError) as damage:
        raise _Damage(f"row {number + 1} ({raw.get('group') if isinstance(raw, dict) else None}): {damage}") from None


def _spread(name: str, found: Any) -> Spread:
    if not (isinstance(found, list) and len(found) == 3 and all(map(_positive, found))):
        raise _Damage(f"{name} is {found!r:.40}")
    return Spread(*found)


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
