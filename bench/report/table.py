"""What a run shows on the terminal: a line a group on the way, and the table at its end."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from cmab_kernels.measure import readable

from ..harness import Row, is_ours
from .runs import Run


def table(groups: Mapping[str, Mapping[str, Row]]) -> Iterator[str]:
    """One block a group: time, its spread, ratio, memory beyond the results, speed, error."""
    for group, rows in groups.items():
        yield ""
        yield f"{group:<64}{'median':>10}{'spread':>8}{'ratio':>24}{'memory':>12}{'GFLOP/s':>9}{'error':>9}"
        for name, row in rows.items():
            yield f"  {name:<62}{f'-- {row.problem}' if row.problem else _figures(row)}"


def rows_of(run: Run) -> dict[str, dict[str, Row]]:
    """Of a saved run, as they were when it was measured."""
    return {
        group: {row.implementation: Row(samples=list(row.samples), info=dict(row.info)) for row in members}
        for group, members in run.groups.items()
    }


def brief(rows: Mapping[str, Row]) -> str:
    """Of one group: our median and its ratio to the baseline, or the first problem."""
    ours = next((row for name, row in rows.items() if is_ours(name) and row.samples), None)
    if ours is None:
        return next((row.problem for row in rows.values() if row.problem), "")
    ratio = f", {ours.info['ratio']:.3g} of {ours.info['baseline']}" if "ratio" in ours.info else ""
    return f"{readable(statistics.median(ours.samples))}{ratio}"


def _figures(row: Row) -> str:
    info, median = row.info, statistics.median(row.samples)
    low, _, high = statistics.quantiles(row.samples, n=4, method="inclusive")
    within = "[{:.3g}, {:.3g}]".format(*info["ratio_quartiles"]) if "ratio" in info else ""
    ratio = f"{info['ratio']:.3g} {within}" if "ratio" in info else "--"
    memory = f"{(info['extra_memory'] - info['result_memory']) / 2**20:+.1f} MiB"
    return f"{readable(median):>10}{(high - low) / median:>8.0%}{ratio:>24}{memory:>12}{info['gflops']:>9.1f}{info['error']:>9.0e}"
