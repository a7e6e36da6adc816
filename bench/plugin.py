"""The pytest plugin of `pytest bench`: its options, how rows come about, and what it writes.

pytest-benchmark runs one row after the other. Rows that are to be compared must take turns, so the first row of a group measures the whole
group (harness.measure), and each row then replays its own samples to pytest-benchmark on a clock that moves by exactly one sample a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from . import provenance
from .devices import measure_on
from .harness import Group, measure
from .report.table import brief, table
from .runs import Run, save
from .scans import scans
from .scans.case import Case

RESULTS = Path(__file__).with_name("results")
SCRATCH = "latest"
BUDGET = {True: 1.0, False: 1.5}
"""Seconds of timing a group, for a quick run and for a full one."""


@dataclass
class Session:
    """What a run has come to so far."""

    path: Path
    replaces: bool
    versions: dict[str, str | None]
    groups: dict[str, Group] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def problems(self) -> dict[str, dict[str, str]]:
        return {name: group.problems for name, group in self.groups.items() if group.problems}


SESSION = pytest.StashKey[Session]()


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


# ---- what is asked for -----------------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cmab_kernels")
    group.addoption("--quick", action="store_true", help="the cases that matter most, in five minutes")
    group.addoption("--scan", action="append", metavar="NAME", help="only this operator or module (may be repeated)")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    group.addoption("--save", metavar="NAME", default=SCRATCH, help="write results/NAME.json (default: %(default)s, which git ignores)")
    group.addoption("--json", metavar="PATH", type=Path, help="write this file instead")
    group.addoption("--force", action="store_true", help="let --save or --json replace a file")
    threads = min(2, torch.get_num_threads())
    group.addoption("--threads", type=int, default=threads, help="where a case does not say (default: %(default)s)")


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if option.device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: there is no GPU that torch can use; leave it out to measure the CPU")
    measure_on(option.device)
    if unknown := sorted(set(option.scan or ()) - scans().keys()):
        raise pytest.UsageError(f"--scan {unknown[0]}: there is no such scan; there are {', '.join(sorted(scans()))}")
    path = option.json or RESULTS / f"{option.save}.json"
    if path.exists() and path != RESULTS / f"{SCRATCH}.json" and not option.force:
        raise pytest.UsageError(f"{path} is there already: save under another name, or replace it with --force")
    config.stash[SESSION] = Session(path, path.exists(), provenance.versions())
    torch.set_num_threads(option.threads)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [item for item in items if _wanted(item, config)]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted
    for item in items:
        if case := _case(item):
            item.add_marker(pytest.mark.benchmark(timer=CLOCK, group=case.name))


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
    """None for what is no row."""
    return item.callspec.params["case"] if hasattr(item, "callspec") else None


# ---- rows ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def replay(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> Callable[[Case, str], None]:
    """Takes a row's measurement to pytest-benchmark; what could not run is skipped with its reason, what is wrong fails."""

    def row(case: Case, implementation: str) -> None:
        groups = request.config.stash[SESSION].groups
        if case.name not in groups:
            names = [item.callspec.params["implementation"] for item in request.session.items if str(_case(item)) == case.name]
            groups[case.name] = measure(case, names, BUDGET[request.config.option.quick])
            _tell_progress(request, case.name)
        group = groups[case.name]
        if implementation in group.problems:
            benchmark.skipped = True
            give_up = pytest.fail if group.at_fault(implementation) else pytest.skip
            give_up(f"{case}-{implementation}: {group.problems[implementation]}")
        benchmark.extra_info.update(scan=case.scan, parameters=dict(case.parameters), implementation=implementation)
        samples = iter(group.samples[implementation])
        benchmark.pedantic(lambda: CLOCK.advance(next(samples)), setup=CLOCK.reset, rounds=len(group.samples[implementation]))

    return row


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Keeps a figure that is no time for the end of the run, and for its file."""
    return request.config.stash[SESSION].figures.__setitem__


def _tell_progress(request: pytest.FixtureRequest, name: str) -> None:
    """A line for each group: how far the run is, and what came out."""
    session = request.config.stash[SESSION]
    done, group = len(session.groups), session.groups[name]
    total = len({case.name for item in request.session.items if (case := _case(item))})
    left = (time.monotonic() - session.started) / done * (total - done)
    came = brief(tuple(group.rows.values()), group.problems)
    plugins = request.config.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        plugins.get_plugin("terminalreporter").write_line(f"[{done:>{len(str(total))}}/{total}] {name:<66} {came:<36}  {_left(left)}")


def _left(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """No dots between the lines of progress."""
    if report.skipped:
        return "skipped", "", "SKIPPED"
    return ("passed", "", "PASSED") if report.when == "call" and report.passed else None


# ---- what is written -------------------------------------------------------------------------------------------------------------------


def pytest_sessionfinish(session: pytest.Session) -> None:
    so_far = session.config.stash[SESSION]
    if any(group.rows for group in so_far.groups.values()):
        save(run_of(so_far, session.config.option), so_far.path)


def run_of(session: Session, option: object) -> Run:
    """The run, with what holds for all of it."""
    rows = tuple(row for group in session.groups.values() for row in group.rows.values())
    return Run(
        date=provenance.now(),
        commit=provenance.commit(),
        dirty=provenance.dirty(),
        quick=option.quick,
        threads=option.threads,
        device=option.device,
        processor=provenance.processor(option.device),
        machine=provenance.machine(),
        versions=session.versions,
        rates=provenance.rates(option.device, {row.threads for row in rows}),
        figures=session.figures,
        notes=[],
        not_measured={f"{group}-{name}": why for group, found in session.problems.items() for name, why in found.items()},
        rows=rows,
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    session = config.stash[SESSION]
    groups = {name: tuple(group.rows.values()) for name, group in session.groups.items()}
    for line in table(groups, session.problems):
        terminalreporter.write_line(line)
    for name, figure in session.figures.items():
        terminalreporter.write_line(f"\n{name}: {figure:.1e}")
    if not config.option.json and any(groups.values()):
        terminalreporter.write_line(f"{session.path} {'replaced' if session.replaces else 'written'}")
