"""The package's own tests on the GPU, as a section: a row for each test that `pytest -m gpu` selects.

Every worker collects the tests in its own pytest session and runs those that it takes. So if a test hangs or crashes,
only its row is lost, and a later call continues with the tests that have not passed.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from bench.provenance import ROOT

from .sections import Perform, Row, Task

TESTS = ROOT / "tests"
OF_TILES = "accuracy or same_bits or masks or layouts"
"""The tests that block sizes can affect."""


def tasks(device: str, before: Mapping[str, list[Row]]) -> Callable[[Perform], None]:
    return partial(run_tests, [str(TESTS)])


def tuned_tasks(device: str, before: Mapping[str, list[Row]]) -> Callable[[Perform], None] | list[Task]:
    """The tests of accuracy again, if tiles were tuned in the meantime."""
    return (
        partial(run_tests, [str(TESTS), "-k", OF_TILES])
        if any(row.get("written") for row in before.get("tune", []))
        else []
    )


def run_tests(arguments: Sequence[str], perform: Perform) -> None:
    """Collect the tests of these arguments, and pass them to `perform`. Raises a `RuntimeError` if they cannot be
    collected."""
    options = ["-mgpu", "-oaddopts=", "-pno:cacheprovider", "-qq", "--no-summary", f"--rootdir={ROOT}"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*options, "-c", str(ROOT / "pyproject.toml"), *arguments], plugins=[_Loop(perform)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r}: {' '.join(said.getvalue().split())[-500:]}")


class _Loop:
    """A pytest plugin that passes the collected tests to `perform` instead of running them in order."""

    def __init__(self, perform: Perform) -> None:
        self.perform = perform
        self.reports: list[pytest.TestReport] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("the tests cannot be collected")
        self.perform([Task(item.nodeid, partial(self._row, item)) for item in sorted(session.items, key=_shuffled)])
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def _row(self, item: pytest.Item) -> Row:
        self.reports.clear()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        for report in self.reports:
            if report.failed:
                raise Failed(_message(report.longrepr))
            if report.skipped:
                return {
                    "ok": True,
                    "passed over": report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr),
                }
        return {"ok": True}


def _shuffled(item: pytest.Item) -> int:
    """An order with two aims: every family comes early, in case the time is not sufficient, and workers seldom compile
    the same kernels."""
    return zlib.crc32(item.nodeid.encode())


class Failed(Exception):
    """A test failed."""


def _message(traceback: Any) -> str:
    """The error of a test and where it was raised."""
    crash = getattr(traceback, "reprcrash", None)
    if not crash:
        return str(traceback)
    return f"{crash.message.splitlines()[0]} ({crash.path.removeprefix(f'{ROOT}/')}:{crash.lineno})"
