"""How the rows of `pytest bench` come about.

pytest-benchmark runs one row after the other. Rows that are to be compared must take turns, so the first row of a group measures the whole
group (harness.measure), and each row then replays its own samples to pytest-benchmark on a clock that moves by exactly one sample a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from .harness import Case, Row, is_ours, measure, measure_on
from .provenance import of_row, processor, rates, software
from .report.runs import FORMAT
from .report.table import brief, table
from .scans import scans

RESULTS = Path(__file__).with_name("results")
SCRATCH = "latest"
BUDGET = {True: 1.0, False: 1.5}
"""Seconds of timing a group, for a quick run and for a full one."""

GROUPS = pytest.StashKey[dict[str, dict[str, Row]]]()
FIGURES = pytest.StashKey[dict[str, float]]()
REPLACES = pytest.StashKey[bool]()
SOFTWARE = pytest.StashKey[dict[str, Any]]()
STARTED = pytest.StashKey[float]()


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
    group.addoption("--quick", action="store_true", help="the cases that matter most, in five minutes")
    group.addoption("--scan", action="append", metavar="NAME", help="only this operator or module (may be repeated)")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    group.addoption("--save", metavar="NAME", default=SCRATCH, help="write results/NAME.json (default: %(default)s, which git ignores)")
    group.addoption("--json", metavar="PATH", type=Path, help="write this file instead")
    group.addoption("--force", action="store_true", help="let --save or --json replace a file")
    group.addoption(
        "--threads",
        type=int,
        default=min(2, torch.get_num_threads()),
        help="where a case does not say (default: %(default)s)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if unknown := sorted(set(option.scan or ()) - scans().keys()):
        raise pytest.UsageError(f"--scan {unknown[0]}: there is no such scan; there are {', '.join(sorted(scans()))}")
    if option.device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: there is no GPU that torch can use; leave it out to measure the CPU")
    path = _path(config)
    config.stash[REPLACES] = path.exists()
    if path.exists() and path != RESULTS / f"{SCRATCH}.json" and not option.force:
        raise pytest.UsageError(f"{path} is there already: save under another name, or replace it with --force")
    config.stash[GROUPS], config.stash[FIGURES] = {}, {}
    config.stash[SOFTWARE] = software()  # if anything is amiss, before measuring and not after
    config.stash[STARTED] = time.monotonic()
    torch.set_num_threads(option.threads)
    measure_on(option.device)
    if not option.collectonly:
        option.benchmark_json = path


def _path(config: pytest.Config) -> Path:
    return config.option.json or RESULTS / f"{config.option.save}.json"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [item for item in items if _wanted(item, config)]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted
    for item in items:
        if case := _case(item):
            item.add_marker(pytest.mark.benchmark(timer=CLOCK, group=str(case)))


def _wanted(item: pytest.Item, config: pytest.Config) -> bool:
    case = _case(item)
    if case is None:
        return not config.option.quick and not config.option.scan
    if config.option.scan and case.scan not in config.option.scan:
        return False
    if item.callspec.params["implementation"] == "reference":
        return False  # the definition is no peer: it says what is right, and takes longer than all else
    return case.quick or not config.option.quick


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
            _tell_progress(request, str(case))
        measured = groups[str(case)][implementation]
        if measured.problem:
            benchmark.skipped = True
            (pytest.fail if measured.wrong else pytest.skip)(f"{case}-{implementation}: {measured.problem}")
        parameters = {**case.parameters, "threads": measured.info["threads"]}
        benchmark.extra_info.update(
            implementation=implementation, ours=is_ours(implementation), scan=case.scan, parameters=parameters, **measured.info
        )
        samples = iter(measured.samples)
        benchmark.pedantic(lambda: CLOCK.advance(next(samples)), setup=CLOCK.reset, rounds=len(measured.samples))

    return row


def _tell_progress(request: pytest.FixtureRequest, group: str) -> None:
    """A line for each group: how far it is, and what came out."""
    groups = request.config.stash[GROUPS]
    total = len({str(case) for item in request.session.items if (case := _case(item))})
    elapsed = time.monotonic() - request.config.stash[STARTED]
    left = elapsed / len(groups) * (total - len(groups))
    plugins = request.config.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        plugins.get_plugin("terminalreporter").write_line(
            f"[{len(groups):>{len(str(total))}}/{total}] {group:<66} {brief(groups[group]):<36}  {_left(left)}"
        )


def _left(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """No dots between the lines of progress."""
    if report.skipped:
        return "skipped", "", "SKIPPED"
    return ("passed", "", "PASSED") if report.when == "call" and report.passed else None


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
    output_json["cmab_kernels_bench"] = FORMAT
    output_json["quick"] = config.option.quick
    output_json["threads"] = config.option.threads
    output_json["device"] = config.option.device
    output_json["rates"] = rates(
        config.option.device, {row.info["threads"] for rows in groups.values() for row in rows.values() if row.info}
    )
    output_json["figures"] = config.stash[FIGURES]
    output_json["not_measured"] = {
        f"{group}-{name}": row.problem for group, rows in groups.items() for name, row in rows.items() if row.problem
    }
    for row in output_json["benchmarks"]:
        row["extra_info"]["provenance"] = of_row(row, output_json)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in table(config.stash[GROUPS]):
        terminalreporter.write_line(line)
    for name, figure in config.stash[FIGURES].items():
        terminalreporter.write_line(f"\n{name}: {figure:.1e}")
    if not config.option.json and any(row.samples for rows in config.stash[GROUPS].values() for row in rows.values()):
        terminalreporter.write_line(f"{_path(config)} {'replaced' if config.stash[REPLACES] else 'written'}")
