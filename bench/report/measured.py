"""docs/measured.md, the headline table of the README and the plots: `python -m bench.report.measured [RUN.json]` writes them.

The page is measured.md, beside this file, in which each {group} has given way to the figures of that group. An operator that is measured
alone has a run of its own in bench/results/alone, for the tables that the run of all operators has no row of.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cmab_kernels.measure import readable

from ..runs import BadRun, Row, Run, Spread, beyond_results, load
from . import plots
from .marks import put

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "measured.md"
PLOT = ROOT / "docs" / "measured.png"
ALONE = {"prefix_attention_states": ROOT / "docs" / "prefixes.png"}
"""Operators that are measured alone -> the plot of each."""
BEGIN, END = "<!-- headline table: begin -->", "<!-- headline table: end -->"
"""The marks in the README between which the headline table stands."""

INTRODUCTION, *TABLES = re.split(r"(?m)^(?=## )", Path(__file__).with_suffix(".md").read_text(encoding="utf-8"))
"""The text of the page: what stands before the first heading, and a table under each. The first is the headline of the README."""

PLACE = re.compile(r"\{([^}]+)\}")
NARROW = RESULTS / "avx2.json"
"""The quick run of which the headline shows ratios beside those of the newest full run: both sides held to AVX2."""


def newest_run(results: Path = RESULTS) -> Run | None:
    """The committed full run of the latest date; None if there is none."""
    runs = []
    for path in results.glob("*.json"):
        with contextlib.suppress(BadRun):  # the record of another check
            runs.append(load(path))
    return max((run for run in runs if not run.quick), key=lambda run: run.when, default=None)


def runs_alone(results: Path = RESULTS) -> list[Run]:
    """The committed runs of single operators."""
    return [load(results / "alone" / f"{operator}.json") for operator in ALONE]


def page(run: Run, alone: Sequence[Run], narrow: Run) -> str:
    """The text of docs/measured.md."""
    found = (next(filter(None, (filled(table, of, narrow) for of in (run, *alone))), "") for table in TABLES)
    return INTRODUCTION + "\n".join(filter(None, found))


def headline(run: Run, narrow: Run) -> str:
    """The table of the README, without its heading."""
    return filled(TABLES[0], run, narrow).partition("\n")[2].strip()


def filled(table: str, run: Run, narrow: Run | None = None) -> str:
    """A table with its figures and a line that says where it was measured; without the rows that the run has not, empty if it has none.

    {narrow} in a row gives way to the ratio of the run `narrow`, {where narrow} to where that was.
    """
    lines, threads = [], set()
    for line in table.rstrip().split("\n"):
        place = PLACE.search(line)
        if place and not place[1].startswith("where"):
            pair = _pair(run.groups.get(place[1], ()))
            if pair is None:
                continue
            ours, theirs = pair
            threads.add(ours.threads)
            line = line.replace(place[0], f"{_figures(theirs)} | {_figures(ours)} | {_ratios(ours.ratio)}")
            if narrow is not None:
                line = line.replace("{narrow}", _narrow_ratio(narrow.groups.get(place[1], ())))
        line = line.replace("{where}", _where(run, sorted(threads)))
        lines.append(line if narrow is None else line.replace("{where narrow}", _where(narrow, sorted(threads))))
    return "\n".join(lines) + "\n" if threads else ""


def _pair(group: Sequence[Row]) -> tuple[Row, Row] | None:
    """Ours and the fastest baseline of a group."""
    ours = next((row for row in group if row.ours), None)
    theirs = next((row for row in group if ours and row.implementation == ours.baseline), None)
    return (ours, theirs) if ours and theirs else None


def _narrow_ratio(group: Sequence[Row]) -> str:
    pair = _pair(group)
    return _ratio(pair[0].ratio.median) if pair and pair[0].ratio else ""


def _figures(row: Row) -> str:
    return f"{readable(row.seconds.median)}, {beyond_results(row)}"


def _ratios(ratio: Spread | None) -> str:
    assert ratio is not None
    return f"**{_ratio(ratio.median)}** ({_ratio(ratio.low)} to {_ratio(ratio.high)})"


def _ratio(ratio: float) -> str:
    """Two digits of what is small, two places of the rest; of what is tiny, how many times it is less."""
    if ratio < 0.001:
        return f"1 / {float(f'{1 / ratio:.2g}'):,.0f}"
    return f"{ratio:.2g}" if ratio < 0.1 else f"{ratio:.2f}"


def _where(run: Run, threads: Sequence[int]) -> str:
    """The machine and the day; the commit stands in the file."""
    count = f"{' or '.join(map(str, threads))} thread{'' if threads == [1] else 's'}"
    machine = f"{run.processor} ({run.machine['native_instruction_set']}), {count}, torch {run.versions['torch']}"
    return f"{machine}, {run.when[:10]}, `{run.path.name}`."


def insert(text: str, new: str) -> str:
    """`text` with what stands between the two marks replaced."""
    return put(text, new, BEGIN, END, "README.md")


def main() -> None:
    run = load(Path(sys.argv[1])) if len(sys.argv) > 1 else newest_run()
    if run is None:
        raise SystemExit("there is no full run in bench/results: put the run.json of python -m cmab_kernels bench there")
    alone, narrow = runs_alone(), load(NARROW)
    README.write_text(insert(README.read_text(), headline(run, narrow)))
    PAGE.write_text(page(run, alone, narrow))
    plots.picture(run, plots.FIRST, PLOT)
    for of, (operator, plot) in zip(alone, ALONE.items(), strict=True):
        plots.picture(of, operator, plot)
    written = (README, PAGE, PLOT, *ALONE.values())
    print(f"{', '.join(str(path.relative_to(ROOT)) for path in written)}: from {', '.join(of.path.name for of in (run, *alone, narrow))}")


if __name__ == "__main__":
    main()
