"""A run: all requested cases one after the other, with a line for each case while it runs and a table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping

import torch

from . import provenance
from .devices import measure_on
from .harness import Group, measure
from .load import NOISY, others
from .report.table import brief, table
from .runs import DEFINITION, Row, Run
from .scans import all_cases
from .scans.intention_state import errors_of_additions

BUDGET = {True: 1.0, False: 1.5}
"""Seconds of timing a group, for a quick run and for a full one."""

LOOK = 0.5
"""Seconds for which a run observes the machine before it begins."""

THREADS = 2
"""The number of threads if neither a case nor the caller sets it, provided that torch has as many."""


def measured(
    scans: Collection[str] = (),
    quick: bool = False,
    device: str = "cpu",
    threads: int | None = None,
    groups: Collection[str] = (),
) -> Run:
    """Measures the cases of these scans and the cases of these names, or all.

    The definition is left out, because it is not a peer, and takes longer than everything else.
    """
    versions = provenance.versions()
    measure_on(device)
    torch.set_num_threads(threads or min(THREADS, torch.get_num_threads()))
    every = not scans and not groups
    cases = [
        case
        for case in all_cases()
        if (every or case.scan in scans or case.name in groups) and (case.quick or not quick)
    ]
    found: dict[str, Group] = {}
    _warn_of_others()
    start = time.monotonic()
    for case in cases:
        found[case.name] = measure(case, [name for name in case.implementations if name != DEFINITION], BUDGET[quick])
        left = (time.monotonic() - start) * (len(cases) / len(found) - 1)
        _tell_progress(case.name, found[case.name], f"{len(found):>{len(str(len(cases)))}}/{len(cases)}", left)
    figures = _errors_of_a_million_additions() if every and not quick else {}
    rows = tuple(row for group in found.values() for row in group.rows.values())
    run = Run(
        date=provenance.now(),
        commit=provenance.commit(),
        dirty=provenance.dirty(),
        quick=quick,
        threads=torch.get_num_threads(),
        device=device,
        processor=provenance.processor(device),
        machine=provenance.machine(),
        versions=versions,
        rates=provenance.rates(device, {row.threads for row in rows}),
        figures=figures,
        notes=_notes(rows),
        not_measured={f"{name}-{which}": why for name, group in found.items() for which, why in group.problems.items()},
        rows=rows,
    )
    _tell_results(run, found)
    return run


def _errors_of_a_million_additions() -> Mapping[str, float]:
    """The relative errors of a million additions, which show why sums are float64."""
    found = errors_of_additions(1_000_000)
    return {
        f"relative error of K'K after 1,000,000 additions of one key, {name}": error for name, error in found.items()
    }


def _warn_of_others() -> None:
    """Before any measurement, report if the machine is busy."""
    share = others(LOOK)
    if share is not None and share > NOISY:
        print(
            f"Other programs take {share:.0%} of this machine's processors. Times that are measured meanwhile "
            "are marked as noisy, and count neither as gain nor as loss. End these programs, and measure again.",
            file=sys.stderr,
            flush=True,
        )


def _notes(rows: Collection[Row]) -> list[str]:
    """Caveats about the run."""
    noisy = {row.group for row in rows if row.noisy}
    told = (
        f"{len(noisy)} of {len({row.group for row in rows})} groups were timed while other programs took more than "
        f"{NOISY:.0%}"
    )
    return (
        [f"{told} of the machine's processors: they are noisy, and count neither as gain nor as loss."] if noisy else []
    )


def _tell_progress(name: str, group: Group, done: str, left: float) -> None:
    """A line for a group: the progress of the run, and the result."""
    waiting = f"about {left / 60:.0f} min left" if left > 90 else f"about {left:.0f} s left"
    print(f"[{done}] {name:<66} {brief(tuple(group.rows.values()), group.problems):<36}  {waiting}", flush=True)


def _tell_results(run: Run, groups: Mapping[str, Group]) -> None:
    print(*table(run.groups, {name: group.problems for name, group in groups.items() if group.problems}), sep="\n")
    for name, figure in run.figures.items():
        print(f"\n{name}: {figure:.1e}")
    for note in run.notes:
        print(f"\n{note}")
