"""How a section is run: row by row in processes of its own, each row within a limit, so that what hangs or crashes costs that row alone.

A section is a list of tasks, each with a stable key. Its workers claim them one by one, say on file when they begin one, and put the row
there when it is made. Whoever watches stops a worker whose row takes too long, puts another in its place, and stops them all when the
time is up; the rows that are there are kept, and a later run goes on behind them.
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
"""Exit code of a worker that an error left without a usable GPU."""


class Task(NamedTuple):
    """A row to be made; of a peer, a failure is a fact and no fault."""

    key: str
    make: Callable[[], Row]
    peer: bool = False


Perform = Callable[[list[Task]], None]
"""A function that makes the rows of tasks."""


@dataclass(frozen=True)
class Section:
    """`tasks` is "module:function", a function of (device, rows of the sections that ran before).

    It lists the tasks, or returns a function that gives them to `Perform` while what they need is open.
    """

    tasks: str
    counted: float = 25.0
    """Seconds that a row takes with compiling its kernels, as counted (bench/notes/benchmarks.md); it may take twice as long."""
    workers: int = 1
    """More than one where nothing is timed: most of the time goes to compilers on the CPU."""
    judged: bool = True
    """Rows are right or wrong; else they are figures."""
    after: str = ""
    """The section that must be complete before, and without whose rows these are worth nothing."""

    @property
    def row_limit(self) -> float:
        return 2 * self.counted


@dataclass
class Outcome:
    """What has been made of a section so far."""

    rows: list[Row] = field(default_factory=list)
    complete: bool = False
    problem: str = ""
    state: dict[str, str] = field(default_factory=dict)
    """The state of the GPU when the section was last run: clocks, temperature, power."""
    listed: int = 0
    """How many rows there are to make."""

    @property
    def right(self) -> bool:
        return self.complete and all(row.get("ok", True) for row in self.rows)

    def add(self, row: Row) -> None:
        """Adds a row, in place of an older one of the same key."""
        self.rows = [*(old for old in self.rows if old["key"] != row["key"]), row]


def perform(tasks: str, device: str, before: Mapping[str, list[Row]], make: Perform) -> None:
    """Give the tasks of a section, named "module:function", to `make`."""
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


def _work(section: Section, device: str, before: Mapping[str, list[Row]], outcome: Outcome, folder: str, number: int) -> None:
    """Ends without tidying up: a crash in that would look like one of a row."""
    os.setsid()  # what a row starts is stopped with it
    if "TRITON_CACHE_DIR" in os.environ:
        from .cached import same_keys  # Triton, where rows need it: a worker starts in a tenth of the time

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
    """Those that are neither done nor claimed by another worker; what went wrong before comes last."""
    known = {row["key"]: row.get("ok", True) for row in outcome.rows}
    left = [(number, task) for number, task in enumerate(tasks) if not known.get(task.key, False)]
    for number, task in sorted(left, key=lambda pair: pair[1].key in known):
        try:
            os.close(os.open(os.path.join(folder, f"{number}.claimed"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        yield task


def _made(task: Task, device: str) -> tuple[Row, bool]:
    """The row, and whether the GPU is lost to this process."""
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
    """Out of memory passes; after an illegal access every later call fails."""
    if not device.startswith("cuda"):
        return True
    import torch  # not where rows need none: a worker starts in a tenth of the time

    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


# ---- who watches


class _Worker:
    """A process, what it has told, and the row that it is at."""

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
        """The rows made since the last time. A line that is half written waits."""
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
        """Stops the process with all that it has started."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has not got so far
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
    """Carries on with `outcome` for so many seconds at most; `keep` is called whenever there is more of it."""
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
    """Takes the worker's rows, ends one that is stuck, and says whether it still works."""
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
