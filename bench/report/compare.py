"""Two runs side by side: which of our rows changed by more than the noise.

Peers are used as a control. Their code is the same in both runs, so their changes show only changes of the machine. The
median of these changes is the drift of the whole machine, which is removed. The rest is the noise between runs: the
usual noise of all peers, or more if the peers of the same group changed more, because a few groups are disturbed and
most are not. The quartiles of the samples are the noise within a run. If the machine, the threads or torch differ,
times say nothing about our code. Then ratios to the baseline are compared instead, but such ratios say little.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cmab_kernels.measure import readable

from ..runs import FAULTS, Row, Run

BOUND = 4.0
"""The number of standard deviations beyond which a row counts as changed; the standard deviations themselves are known
to a fifth.

For some hundred rows without a change, at most one in ten such comparisons reports a single row as faster or slower.
"""

ORDINARY = 2.0
"""The number of standard deviations by which a peer of a group may be off before the group counts as noisy."""

CONTROLS = 8
"""With fewer rows of peers, the noise between runs is unknown."""

UNKNOWN = 0.05
"""The standard deviation between runs if there are too few peers to determine it: 5 %, as observed on a shared
machine."""

MEMORY_BYTES, MEMORY_SHARE = 2**19, 0.02
"""A peak counts as changed if it changed by more than both limits."""

LESS_EXACT = 3.0
"""The factor of the error that another order of sums cannot explain."""

ROUNDING = 1e-15
"""Errors below this are treated as none."""

QUARTILES = 1.349
"""Interquartile range of a normal distribution of standard deviation 1."""

Verdict = Literal["faster", "slower", "same within noise", "new", "gone", "not comparable"]
By = Literal["time", "ratio"]


@dataclass(frozen=True)
class Change:
    """The verdict on one row of ours.

    `change` is new divided by old without the machine's drift. If it differs from 1 by no more than `noise`, it counts
    as no change.
    """

    group: str
    implementation: str
    scan: str
    old: Row | None
    new: Row | None
    verdict: Verdict
    change: float | None = None
    noise: float | None = None
    """Factor: 1.06 is 6 %."""
    why: str = ""

    @property
    def memory(self) -> str:
        """Return more, less, or nothing."""
        if not (self.old and self.new):
            return ""
        before, after = self.old.extra_memory, self.new.extra_memory
        if abs(after - before) <= max(MEMORY_BYTES, MEMORY_SHARE * before):
            return ""
        return "more" if after > before else "less"

    @property
    def less_exact(self) -> bool:
        return bool(self.old and self.new) and self.new.error > LESS_EXACT * max(self.old.error, ROUNDING)

    @property
    def wrong(self) -> bool:
        """The row had a right result before, and does not now."""
        return self.verdict == "gone" and self.why.startswith(FAULTS)

    @property
    def notable(self) -> bool:
        return self.verdict not in ("same within noise", "not comparable") or bool(self.memory) or self.less_exact


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side, with the basis of the verdicts."""

    old: Run
    new: Run
    by: By
    different: tuple[str, ...]
    """The reasons why times cannot be compared; empty if they are compared."""
    drift: float
    """The factor by which peers were slower, due to the machine and not to our code."""
    between: float
    """Standard deviation between runs, of the logarithm."""
    controls: int
    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def counts(self) -> Counter[str]:
        return Counter(change.verdict for change in self.changes)


def compare(old: Run, new: Run) -> Comparison:
    """Every row of ours in scans that both runs have."""
    different = tuple(_different(old, new))
    by: By = "ratio" if different else "time"
    before, after = ({(row.group, row.implementation): row for row in run.rows} for run in (old, new))
    moved = {key: _moved(before[key], row, by) for key, row in after.items() if row.peer and key in before}
    known = [move for move in moved.values() if move is not None]
    drift = statistics.median(known) if len(known) >= CONTROLS and by == "time" else 0.0
    between = _deviation([move - drift for move in known]) if len(known) >= CONTROLS else UNKNOWN
    scans = old.scans.keys() & new.scans.keys()
    keys = [key for key, row in {**before, **after}.items() if row.ours and row.scan in scans]
    beside: dict[str, float] = defaultdict(float)
    for (group, _), move in moved.items():
        beside[group] = max(beside[group], abs(move - drift) if move is not None else 0.0)
    changes = [
        _change(
            before.get(key),
            after.get(key),
            by,
            Noise(drift, between, beside[key[0]]),
            new.not_measured.get("-".join(key), ""),
        )
        for key in keys
    ]
    expected = (
        changes
        if new.quick == old.quick
        else [change for change in changes if (change.old and change.new) or change.why]
    )
    notes = tuple(_notes(old, new, len(known), len(changes) - len(expected)))
    return Comparison(old, new, by, different, math.exp(drift), between, len(known), tuple(expected), notes)


def _different(old: Run, new: Run) -> Iterator[str]:
    told = {
        "processor": [run.processor for run in (old, new)],
        "device": [run.device for run in (old, new)],
        "cores": [run.machine.get("cores") for run in (old, new)],
        "threads": [run.threads for run in (old, new)],
        "torch": [run.versions.get("torch") for run in (old, new)],
    }
    for name, (before, after) in told.items():
        if before != after:
            yield f"{name}: {before}, now {after}"


def _moved(old: Row, new: Row, by: By) -> float | None:
    """The logarithm of new over old for the compared figure; None if there is nothing to compare."""
    if by == "time":
        return math.log(new.seconds.median / old.seconds.median) if new.threads == old.threads else None
    if old.ratio is None or new.ratio is None or old.baseline != new.baseline or new.implementation == new.baseline:
        return None
    return math.log(new.ratio.median / old.ratio.median)


def _within(row: Row, by: By) -> float:
    """The standard deviation of the logarithm within a run."""
    compared = row.seconds if by == "time" or row.ratio is None else row.ratio
    return math.log(compared.high / compared.low) / QUARTILES


def _deviation(moves: Sequence[float]) -> float:
    """The standard deviation that follows from half of the changes, so that disturbed rows do not affect it."""
    return 2 * statistics.median(abs(move) for move in moves) / QUARTILES


class Noise(NamedTuple):
    """The noise between two runs, as logarithms of factors."""

    drift: float
    between: float
    beside: float
    """The largest change of a peer of the same group, without the drift."""


def _change(old: Row | None, new: Row | None, by: By, runs: Noise, why: str) -> Change:
    row = new or old
    assert row is not None
    name = (row.group, row.implementation, row.scan)
    if not (old and new):
        return Change(*name, old, new, "new" if new else "gone", why=why)
    moved = _moved(old, new, by)
    if moved is None:
        return Change(*name, old, new, "not comparable", why="other threads" if by == "time" else "no common baseline")
    change, within = moved - runs.drift, (_within(row, by) / math.sqrt(row.rounds) for row in (old, new))
    noise = BOUND * math.hypot(max(runs.between, runs.beside / ORDINARY), *within)
    verdict: Verdict = "same within noise" if abs(change) <= noise else "slower" if change > 0 else "faster"
    return Change(*name, old, new, verdict, math.exp(change), math.exp(noise))


def _notes(old: Run, new: Run, controls: int, left_out: int) -> Iterator[str]:
    """Caveats for a reader."""
    for run, other in ((old, new), (new, old)):
        if only := sorted(run.scans.keys() - other.scans.keys()):
            yield f"only in the {'old' if run is old else 'new'} run: {', '.join(only)}"
    if left_out:
        yield f"one of the runs is quick: {left_out} rows that only the other has are left out"
    if controls < CONTROLS:
        yield (
            f"only {controls} rows of peers are in both runs: noise between runs is assumed to be {UNKNOWN:.0%}, "
            "and drift is not removed"
        )


# ---- on the terminal -------------------------------------------------------------------------------------------------


def basis(comparison: Comparison) -> list[str]:
    """The basis of the verdicts, in sentences."""
    old, new = comparison.old, comparison.new
    lines = []
    if old.processor != new.processor:
        lines.append(f"THE RUNS COME FROM DIFFERENT PROCESSORS: {old.processor}, and now {new.processor}.")
    lines.append(
        f"{new.name} ({new.when}, commit {new.revision}) compared with {old.name} ({old.when}, commit {old.revision})"
    )
    if comparison.by == "ratio":
        lines.append(
            f"Times cannot be compared ({'; '.join(comparison.different)}). Ratios to the baseline are compared "
            "instead. These ratios also differ between machines and versions of torch."
        )
    elif comparison.controls >= CONTROLS:
        lines.append(
            f"{comparison.controls} rows of peers, whose code is the same, took {comparison.drift:.3f} times as long. "
            "This drift of the machine is removed from all changes. The remaining changes of peers have a standard "
            f"deviation of {comparison.between:.1%}."
        )
    lines.append(
        f"A change counts if it exceeds {BOUND:.0f} standard deviations of the noise between and within the runs. The "
        "limit is larger if the peers of its group changed by more."
    )
    return [*lines, *(f"{note[0].upper()}{note[1:]}." for note in comparison.notes)]


def table(comparison: Comparison) -> Iterator[str]:
    """A line per row, with changed rows first; for unchanged rows, only their number."""
    yield from basis(comparison)
    yield ""
    yield f"{'group, implementation':<72}{'old':>10}{'new':>10}{'change':>9}{'noise':>8}  verdict"
    for change in ordered(comparison):
        name = f"{change.group}, {change.implementation}"
        yield (
            f"{name:<72}{shown(change.old, comparison.by):>10}{shown(change.new, comparison.by):>10}"
            f"{percent(change.change):>9}{percent(change.noise):>8}  {spoken(change)}"
        )
    yield ""
    yield (
        "; ".join(f"{count} {verdict}" for verdict, count in comparison.counts.most_common())
        or "no row of ours is in both runs"
    )


def ordered(comparison: Comparison) -> list[Change]:
    """The worst change comes first."""
    return sorted(
        comparison.changes,
        key=lambda change: (not change.wrong, not change.less_exact, not change.notable, -(change.change or 1)),
    )


def shown(row: Row | None, by: By) -> str:
    """The compared figure of a row, as text."""
    if row is None:
        return "--"
    if by == "time":
        return readable(row.seconds.median)
    return f"{row.ratio.median:.3g}" if row.ratio else "--"


def percent(factor: float | None) -> str:
    """A change as +20%, a large one as 3.1x."""
    if factor is None:
        return "--"
    return f"{factor - 1:+.1%}" if 0.5 < factor < 2 else f"{factor:.2g}x"


def spoken(change: Change) -> str:
    """The verdict, and changes other than time."""
    said = [f"{change.verdict}{f' ({change.why})' if change.why else ''}"]
    if change.wrong:
        said = [f"NO RIGHT RESULT ANY MORE ({change.why})"]
    if change.memory and change.old and change.new:
        before, after = (row.extra_memory / 2**20 for row in (change.old, change.new))
        said.append(f"{change.memory} memory: {before:.1f} to {after:.1f} MiB")
    if change.less_exact and change.old and change.new:
        said.append(f"LESS EXACT: error {change.old.error:.1e} to {change.new.error:.1e}")
    return "; ".join(said)
