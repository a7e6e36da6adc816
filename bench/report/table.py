"""The terminal output of a run: a line for each group while it runs, and the table at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cmab_kernels.measure import readable

from ..runs import Row, Run, beyond_results


def table(groups: Mapping[str, Sequence[Row]], problems: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """One block for each group: time, its spread, ratio, memory beyond the results, speed and error; and the reasons if
    some of them are missing."""
    for group in dict.fromkeys((*groups, *problems)):
        yield ""
        yield f"{group:<64}{'median':>10}{'spread':>8}{'ratio':>24}{'memory':>12}{'GFLOP/s':>9}{'error':>9}"
        rows = groups.get(group, ())
        if any(row.noisy for row in rows):
            yield f"  noisy: other programs took {rows[0].others:.0%} of the processors"
        for row in rows:
            yield f"  {row.implementation:<62}{_figures(row)}"
        for name, problem in problems.get(group, {}).items():
            yield f"  {name:<62}-- {problem}"


def of_run(run: Run) -> Iterator[str]:
    """The table of a saved run."""
    yield from table(run.groups, {})
    if run.not_measured:
        yield ""
        yield from (f"{name} -- {why}" for name, why in run.not_measured.items())


def brief(rows: Sequence[Row], problems: Mapping[str, str]) -> str:
    """One group in a few words: our median and its ratio to the baseline, or the first problem."""
    ours = next((row for row in rows if row.ours), None)
    if ours is None:
        return next(iter(problems.values()), "")
    ratio = f", {ours.ratio.median:.3g} of {ours.baseline}" if ours.ratio else ""
    return f"{readable(ours.seconds.median)}{ratio}{', noisy' if ours.noisy else ''}"


def _figures(row: Row) -> str:
    ratio = f"{row.ratio.median:.3g} [{row.ratio.low:.3g}, {row.ratio.high:.3g}]" if row.ratio else "--"
    return (
        f"{readable(row.seconds.median):>10}{row.spread:>8.0%}{ratio:>24}{beyond_results(row):>12}"
        f"{row.gflops:>9.1f}{row.error:>9.0e}"
    )
