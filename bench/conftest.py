"""How the rows of `pytest bench` come about.

pytest-benchmark runs one row after the other. Rows that are to be compared must take turns, so the first row of a group measures the whole
group (harness.measure), and each row then replays its own samples to pytest-benchmark on a clock that moves by exactly one sample a call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from .harness import Case, Row, measure
from .provenance import processor, software
from .report import table

RESULTS = Path(__file__).with_name("results")
SCRATCH = "latest"
BUDGET = {True: 2.0, False: 10.0}
"""Seconds of timing a group, for a quick run and for a full one."""

GROUPS = pytest.StashKey[dict[str, dict[str, Row]]]()
FIGURES = pytest.StashKey[dict[str, float]]()
REPLACES = pytest.StashKey[bool]()
SOFTWARE = pytest.StashKey[dict[str, Any]]()


class ReplayClock:
    """Shows the samples that it is told to, one a round."""

    __name__ = "interleaved"
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def reset(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


CLOCK = ReplayClock()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cmab_kernels")
    group.addoption("--quick", action="store_true", help="the cases that matter most, in four minutes")
    group.addoption("--save", metavar="NAME", default=SCRATCH, help="write results/NAME.json (default: %(default)s, which git ignores)")
    group.addoption("--force", action="store_true", help="let --save replace a file")
    group.addoption(
        "--threads",
        type=int,
        default=min(2, torch.get_num_threads()),
        help="where a case does not say (default: %(default)s)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[GROUPS], config.stash[FIGURES] = {}, {}
    config.stash[SOFTWARE] = software()  # if anything is amiss, before measuring and not after
    torch.set_num_threads(config.option.threads)
    path = RESULTS / f"{config.option.save}.json"
    config.stash[REPLACES] = path.exists()
    if path.exists() and config.option.save != SCRATCH and not config.option.force:
        raise pytest.UsageError(f"{path.name} is in bench/results already: save under another name, or replace it with --force")
    if not config.option.collectonly:
        config.option.benchmark_json = path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.quick:
        config.hook.pytest_deselected(items=[item for item in items if not _matters(item)])
        items[:] = [item for item in items if _matters(item)]
    for item in items:
        if case := _case(item):
            item.add_marker(pytest.mark.benchmark(timer=CLOCK, group=str(case)))


def _matters(item: pytest.Item) -> bool:
    """For a quick run: the definition, which is slow, is no peer."""
    case = _case(item)
    return case is not None and case.quick and item.callspec.params["implementation"] != "reference"  # type: ignore[attr-defined]


def _case(item: pytest.Item) -> Case | None:
    """None of what is no row."""
    return item.callspec.params["case"] if hasattr(item, "callspec") else None


@pytest.fixture
def replay(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> Callable[[Case, str], None]:
    """Takes a row's measurement to pytest-benchmark; what could not run is skipped with its reason, what is wrong fails."""

    def row(case: Case, implementation: str) -> None:
        groups = request.config.stash[GROUPS]
        if str(case) not in groups:
            names = [item.callspec.params["implementation"] for item in request.session.items if str(_case(item)) == str(case)]
            groups[str(case)] = measure(case, names, BUDGET[request.config.option.quick])
        measured = groups[str(case)][implementation]
        if measured.problem:
            benchmark.skipped = True
            (pytest.fail if measured.wrong else pytest.skip)(f"{case}-{implementation}: {measured.problem}")
        benchmark.extra_info.update(implementation=implementation, **measured.info)
        samples = iter(measured.samples)
        benchmark.pedantic(lambda: CLOCK.advance(next(samples)), setup=CLOCK.reset, rounds=len(measured.samples))

    return row


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Keeps a figure that is no time for the end of the run, and for its file."""
    return request.config.stash[FIGURES].__setitem__


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    cpu = machine_info["cpu"]
    machine_info.clear()  # of what tells whose machine it was
    machine_info.update(cpu=processor(cpu), **config.stash[SOFTWARE])


def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    commit_info.pop("project", None)


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    groups = config.stash[GROUPS]
    output_json["quick"] = config.option.quick
    output_json["threads"] = config.option.threads
    output_json["figures"] = config.stash[FIGURES]
    output_json["not_measured"] = {
        f"{group}-{name}": row.problem for group, rows in groups.items() for name, row in rows.items() if row.problem
    }


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in table(config.stash[GROUPS]):
        terminalreporter.write_line(line)
    for name, figure in config.stash[FIGURES].items():
        terminalreporter.write_line(f"\n{name}: {figure:.1e}")
    if any(row.samples for rows in config.stash[GROUPS].values() for row in rows.values()):
        terminalreporter.write_line(f"bench/results/{config.option.save}.json {'replaced' if config.stash[REPLACES] else 'written'}")
