"""Sections are run row by row, in separate processes and with a time limit: a hang or a crash costs only its row.

A section is a list of tasks, each with a stable key. Its workers take the tasks one by one, write to a file when they
begin one, and add the row when it is finished. The watcher stops a worker whose row takes too long, starts another
worker instead, and stops all workers when the time is up. The rows so far are kept, and a later run continues after
them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
POLL = 0.1
DEVICE_LOST = 70
"""Exit code of a worker whose GPU became unusable because of an error."""


class Task(NamedTuple):
    """A row of the table that is still to be made. If a peer fails, the row reports it, and this is not a fault."""

    key: str
    make: Callable[[], Row]
    peer: bool = False


Perform = Callable[[list[Task]], None]
"""A function that makes the rows of tasks."""


@dataclass(frozen=True)
class Section:
    """`tasks` is "module:function", a function of (device, rows of the sections that ran before).

    It lists the tasks, or returns a function that passes them to `Perform` while their resources are open.
    """

    tasks: str
    counted: float = 25.0
    """Seconds that the kernels of a row take to compile, as counted (bench/notes/benchmarks.md), and to run; a row may
    take twice as long."""
    workers: int = 1
    """More than one if nothing is timed, because compilers on the CPU then take most of the time."""
    judged: bool = True
    """Whether rows are right or wrong; otherwise they are figures."""
    after: str = ""
    """The section that must be complete before; its rows are needed to interpret these rows."""

    @property
    def row_limit(self) -> float:
        return 2 * self.counted


@dataclass
class Outcome:
    """The rows of a section so far."""

    rows: list[Row] = field(default_factory=list)
    complete: bool = False
    problem: str = ""
    state: dict[str, str] = field(default_factory=dict)
    """The state of the GPU when the section was last run: clocks, temperature, power."""
    listed: int = 0
    """The number of rows to make."""

    @property
    def right(self) -> bool:
        return self.complete and all(row.get("ok", True) for row in self.rows)

    def add(self, row: Row) -> None:
        """Add a row, in place of an older one with the same key."""
        self.rows = [*(old for old in self.rows if old["key"] != row["key"]), row]


def perform(tasks: str, device: str, before: Mapping[str, list[Row]], make: Perform) -> None:
    """Pass the tasks of a section, named "module:function", to `make`."""
    module, function = tasks.split(":")
    found = getattr(importlib.import_module(module), function)(device, before)
    if callable(found):
        found(make)
    else:
        make(found)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


# ---- in a worker


def _work(
    section: Section, device: str, before: Mapping[str, list[Row]], outcome: Outcome, folder: str, number: int
) -> None:
    """End without cleanup, because a crash during cleanup would look like a crash of a row."""
    os.setsid()  # processes that a row starts are stopped with it
    if "TRITON_CACHE_DIR" in os.environ:
        from .cached import (
            same_keys,
        )  # imports Triton only if rows need it: without Triton a worker starts in a tenth of the time

        same_keys()
    with open(os.path.join(folder, f"{number}.jsonl"), "a") as file:

        def tell(**line: Any) -> None:
            print(json.dumps(line), file=file, flush=True)

        def make(tasks: list[Task]) -> None:
            tell(listed=len(tasks))
            for task in _waiting(tasks, outcome, folder):
                tell(begun=task.key, peer=task.peer)
                row, lost = _made(task, device)
                tell(row=row)
                if lost:
                    os._exit(DEVICE_LOST)

        try:
            perform(section.tasks, device, before, make)
        except Exception as error:
            traceback.print_exc()
            tell(failed=first_line(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _waiting(tasks: Iterable[Task], outcome: Outcome, folder: str) -> Iterator[Task]:
    """The tasks that are neither done nor taken by another worker; tasks that failed earlier come last."""
    known = {row["key"]: row.get("ok", True) for row in outcome.rows}
    left = [(number, task) for number, task in enumerate(tasks) if not known.get(task.key, False)]
    for number, task in sorted(left, key=lambda pair: pair[1].key in known):
        try:
            os.close(os.open(os.path.join(folder, f"{number}.claimed"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        yield task


def _made(task: Task, device: str) -> tuple[Row, bool]:
    """The row, and whether this process can no longer use the GPU."""
    start, lost = time.perf_counter(), False
    try:
        row = task.make()
    except Exception as error:
        row = failure(task.peer, first_line(error))
        lost = not _recovered(device)
    return {"key": task.key, **row, "took": round(time.perf_counter() - start, 3)}, lost


def failure(peer: bool, problem: str) -> Row:
    return {"problem": problem} if peer else {"ok": False, "problem": problem}


def _recovered(device: str) -> bool:
    """Whether the GPU is lost for this process: after an out-of-memory error it can be used again, but after an illegal
    access every later call fails."""
    if not device.startswith("cuda"):
        return True
    import torch  # imported only if rows need it: without it a worker starts ten times as fast

    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


# ---- the watcher


class _Worker:
    """A process, its reports, and its current row."""

    def __init__(self, number: int, folder: str, *arguments: Any) -> None:
        self.path = Path(folder) / f"{number}.jsonl"
        self.read = 0
        self.at: Row | None = None
        self.since = time.monotonic()
        self.rows = 0
        self.listed = 0
        self.failed = ""
        self.process = multiprocessing.get_context("spawn").Process(target=_work, args=(*arguments, folder, number))
        self.process.start()

    def news(self) -> Iterator[Row]:
        """The rows since the last call. A half-written line is read later."""
        lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
        for line in map(json.loads, lines[self.read :]):
            self.read += 1
            if "begun" in line:
                self.at, self.since = line, time.monotonic()
            elif "row" in line:
                self.at, self.rows = None, self.rows + 1
                yield line["row"]
            elif "listed" in line:
                self.listed = line["listed"]
            else:
                self.failed = line["failed"]

    def stop(self) -> None:
        """Stop the process and all processes that it has started."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has not started the task yet
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def run(
    section: Section,
    device: str,
    outcome: Outcome,
    before: Mapping[str, list[Row]],
    seconds: float,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Continue with `outcome` for at most this number of seconds; `keep` is called whenever there is a new result."""
    outcome.complete, outcome.problem = False, ""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        arguments = (section, device, before, Outcome(list(outcome.rows)))
        workers = [_Worker(number, folder, *arguments) for number in range(section.workers)]
        started = len(workers)
        try:
            while workers and time.monotonic() < end:
                time.sleep(POLL)
                seen = outcome.rows
                for worker in list(workers):
                    if _look_after(worker, section, outcome):
                        continue
                    workers.remove(worker)
                    if worker.failed or worker.process.exitcode == 0:
                        outcome.problem = outcome.problem or worker.failed
                    elif worker.rows == 0:
                        outcome.problem = f"ended with exit code {worker.process.exitcode} before the first row"
                    else:
                        workers.append(_Worker(started, folder, *arguments))
                        started += 1
                if outcome.rows is not seen:
                    keep()
            if workers:
                outcome.problem = outcome.problem or f"stopped after {seconds:.0f} s"
        finally:
            for worker in workers:
                worker.stop()
                for row in worker.news():
                    outcome.add(row)
    outcome.complete = not outcome.problem
    keep()


def _look_after(worker: _Worker, section: Section, outcome: Outcome) -> bool:
    """Take the worker's rows, end the worker if it hangs, and return whether it still works."""
    alive = worker.process.is_alive()
    for row in worker.news():
        outcome.add(row)
    outcome.listed = worker.listed or outcome.listed
    problem = ""
    if alive and worker.at and time.monotonic() - worker.since > section.row_limit:
        problem = f"stopped after {section.row_limit:.0f} s"
        worker.stop()
    elif not alive and worker.at:
        problem = f"its process ended with exit code {worker.process.exitcode}"
    if problem and worker.at:
        outcome.add({"key": worker.at["begun"], **failure(worker.at["peer"], problem)})
        worker.rows += 1
    return worker.process.is_alive()
