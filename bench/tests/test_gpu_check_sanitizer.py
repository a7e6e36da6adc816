"""The GPU check's use of compute-sanitizer, which is replaced by a program that prints given text. No GPU is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from bench.gpu import sanitizer

pytestmark = pytest.mark.thorough

RIGHT = [sys.executable, "-c", ""]
"""A program that is right."""
CLEAN = "========= COMPUTE-SANITIZER\nattention: float64\n========= ERROR SUMMARY: 0 errors\n"
BAD = (
    "========= COMPUTE-SANITIZER\n========= Invalid __global__ write of size 4 bytes\n=========     at _copy+0x150\n"
    "========= ERROR SUMMARY: 3 errors\n"
)
RACE = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
REFUSED = "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to the documentation.\n"


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A compute-sanitizer that prints `text` and ends with `code`."""

    def install(text: str, code: int = 0, seconds: float = 0.0) -> str:
        path = tmp_path / "compute-sanitizer"
        path.write_text(
            f"#!{sys.executable}\nimport sys, time\nprint({text!r}, "
            f"flush=True)\ntime.sleep({seconds})\nsys.exit({code})\n"
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return str(path)

    return install


OK = {"ok": True, "verdict": "ERROR SUMMARY: 0 errors"}
PASSED_OVER = {"ok": True, "passed over": "compute-sanitizer: Device not supported"}


@pytest.mark.parametrize(
    "text, code, silent, must_see",
    [
        (CLEAN, 0, OK, False),
        (RACE, 0, {"ok": True, "verdict": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"}, False),
        (BAD, sanitizer.FOUND, {"ok": False, "verdict": "ERROR SUMMARY: 3 errors"}, True),
        ("Traceback: no module", 0, {"ok": False, "verdict": "no verdict", "lines": ["Traceback: no module"]}, False),
        ("crashed", 1, {"ok": False, "verdict": "no verdict"}, False),
        (CLEAN, 1, {"ok": False}, False),
        (REFUSED, 1, PASSED_OVER, True),
    ],
)
def test_what_it_says_is_understood(
    text: str, code: int, silent: dict[str, Any], must_see: bool, says: Callable[..., str]
) -> None:
    """The cases are a right program and a planted fault.

    A missing verdict is not a success; programs that the sanitizer does not accept are skipped.
    """
    program = says(text, code)
    assert sanitizer.program() == program
    row = sanitizer.is_silent(program, "memcheck", RIGHT)
    assert row.items() >= silent.items() and (text != BAD or "Invalid __global__ write" in row["lines"][0])
    assert sanitizer.must_see(program, "memcheck", RIGHT)["ok"] == must_see


def test_what_takes_too_long_is_stopped(says: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "LIMIT", 1.0)
    row = sanitizer.is_silent(says(CLEAN, 0, 30.0), "memcheck", RIGHT)
    assert not row["ok"] and row["exit code"] == -1


def test_what_is_looked_at_ran_before_by_itself(says: Callable[..., str], tmp_path: Path) -> None:
    """Compiling would take ten times as long under a sanitizer; a program that fails without a sanitizer tells nothing
    under one."""
    mark = tmp_path / "ran"
    command = [sys.executable, "-c", f"open({str(mark)!r}, 'a').write('once ')"]
    assert sanitizer.is_silent(says(CLEAN), "memcheck", command)["ok"] and mark.read_text() == "once "
    row = sanitizer.is_silent(says(CLEAN), "memcheck", [sys.executable, "-c", "raise SystemExit('no kernel')"])
    assert row == {"ok": False, "problem": "it fails without a sanitizer", "lines": ["no kernel"]}


def test_errors_of_the_driver_are_left_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: dict[str, Any] = {}
    monkeypatch.setattr(sanitizer, "_output", lambda command: commands.update({command[2]: command}) or (0, CLEAN))
    for tool in sanitizer.TOOLS:
        sanitizer.looked_at("compute-sanitizer", tool, RIGHT)
    assert {tool: "--report-api-errors" in command for tool, command in commands.items()} == {
        "memcheck": True,
        "racecheck": False,
        "synccheck": False,
    }
    assert all(command[-3:] == RIGHT for command in commands.values())


def test_every_family_meets_every_tool_and_the_fault_comes_first(
    says: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(CLEAN)
    first, *others = [task.key for task in sanitizer.tasks("cuda", {})]
    assert first == "memcheck sees a write beyond the end"
    assert others == [f"{tool}, {family}" for family in sanitizer.FAMILIES for tool in sanitizer.TOOLS]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sanitizer.shutil, "which", lambda *_, **__: None)
    (task,) = sanitizer.tasks("cuda", {})
    assert task.make()["ok"] and "neither on the PATH" in task.make()["passed over"]
