"""Sections without a GPU, to test the code that runs them: tasks that are slow, raise an error, hang, or start a
program."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import gpu_check
from bench.gpu import suite
from bench.gpu.sections import Perform, Row, Section, Task

MACHINE = {"gpu": "NVIDIA H200", "commit": "abc", "sources": "123", "date": "2026-01-02T03:04:05+00:00"}
MARKS = "FAKE_SECTIONS_MARKS"
"""Environment variable: a folder in which each task writes a file each time that it is run."""


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the command run as if there were a GPU, with a separate table of tiles in `folder`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "clean_commit", lambda told: MACHINE["commit"])
    monkeypatch.setattr(gpu_check, "gpu", lambda commit: dict(MACHINE))
    monkeypatch.setattr(gpu_check, "gpu_state", lambda: {"clocks.sm": "1980 MHz"})
    monkeypatch.setattr(gpu_check.tiles, "FILE", folder / "tiles.json")
    gpu_check.tiles.FILE.write_text("{}")


class Hurried(Section):
    """A section whose rows may take at most two seconds."""

    row_limit = 2.0


def _marked(key: str, make: Callable[[], Row], peer: bool = False) -> Task:
    def run() -> Row:
        folder = Path(os.environ[MARKS])
        (folder / f"{key}.{len(list(folder.glob(f'{key}.*')))}").write_text(str(os.getpid()))
        return make()

    return Task(key, run, peer)


def _fine() -> Row:
    return {"ok": True}


def _raises() -> Row:
    raise RuntimeError("out of memory\nand more")


def _hangs() -> Row:
    time.sleep(60)
    return {"ok": True}


def fine(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    return [_marked(f"row {i}", _fine) for i in range(4)]


def slow(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """Two rows at once, and then one that takes longer than the section may, unless told otherwise."""
    return [*fine(device, before)[:2], _marked("slow", _fine if os.environ.get("FAKE_SECTIONS_FAST") else _hangs)]


def starting(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """A row that waits for a program that it has started."""

    def waits() -> Row:
        program = subprocess.Popen(["sleep", "60"])
        (Path(os.environ[MARKS]) / "program").write_text(str(program.pid))
        program.wait()
        return {"ok": True}

    return [_marked("waits", waits)]


def empty(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    return []


def dead_on_arrival(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    os._exit(5)


def listed(device: str, before: Mapping[str, list[Row]]) -> Callable[[Perform], None]:
    """The check's own section of tests, whose rows are right at once."""
    run = suite.tasks(device, before)
    return lambda perform: run(lambda found: perform([task._replace(make=_fine) for task in found]))


def tests(device: str, before: Mapping[str, list[Row]]) -> Callable[[Perform], None]:
    """The tests of a folder that an environment variable names, instead of the tests of the package."""
    return partial(suite.run_tests, [os.environ["FAKE_SECTIONS_TESTS"]])


def tuned_tests(device: str, before: Mapping[str, list[Row]]) -> Callable[[Perform], None] | list[Task]:
    return suite.tuned_tasks(device, before) and tests(device, before)


def tuned(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """Tiles that are better than the built-in ones."""
    found = {
        "written": True,
        "gain": 0.2,
        "noise": 0.01,
        "built-in": [4],
        "tiles": [8],
        "candidates": len(before["candidates"]),
    }
    return [_marked("tuned", lambda: {"ok": True, **found})]


def times(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """A time of ours, the rates of the machine, and peers that cannot run."""
    row = {"group": "a case", "seconds": [1e-4] * 3, "extra_memory": 0, "result_memory": 0, "error": 0.0}
    rates = {"rates": {"exponentials": 3.87e12, "memory": 4.3e12, "matrix": {"bfloat16": 790e12}}}
    peers = [_marked("a case; peer", _raises, True), _marked("a case; another", _hangs, True)]
    return [_marked("rates", lambda: rates), _marked("a case; triton", lambda: row), *peers]
