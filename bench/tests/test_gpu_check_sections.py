"""Runs of the GPU check: rows have time limits, hangs and crashes cost only their row, and interrupted runs continue.

No GPU is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from bench import gpu_check
from bench.gpu.results import Report, file_name, opened
from bench.gpu.sections import Outcome, Section, run
from bench.runs import write_json

from .fake_sections import MACHINE, Hurried, as_on_a_gpu

pytestmark = pytest.mark.thorough

FAKE = "bench.tests.fake_sections"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """How often a fake row was run."""
    folder = tmp_path / "marks"
    folder.mkdir()
    monkeypatch.setenv(FAKE.rsplit(".", 1)[1].upper() + "_MARKS", str(folder))
    return lambda key: len(list(folder.glob(f"{key}.*")))


def _section(name: str, hurried: bool = False, **options: Any) -> Section:
    return (Hurried if hurried else Section)(f"{FAKE}:{name}", **options)


def _rows(outcome: Outcome) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in outcome.rows}


# ---- one section


def test_a_section_that_is_cut_off_goes_on_behind_its_rows(
    runs: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome()
    start = time.monotonic()
    kept: list[int] = []
    run(_section("slow"), "cpu", outcome, {}, 8.0, lambda: kept.append(len(outcome.rows)))
    assert time.monotonic() - start < 20
    assert set(_rows(outcome)) == {"row 0", "row 1"} and not outcome.complete and outcome.problem == "stopped after 8 s"
    assert outcome.listed == 3, "what was not run is known"
    assert kept[-1] == 2 and len(kept) > 1, "what is there is kept while more is made"
    monkeypatch.setenv("FAKE_SECTIONS_FAST", "1")
    run(_section("slow"), "cpu", outcome, {}, 60.0)
    assert outcome.right and set(_rows(outcome)) == {"row 0", "row 1", "slow"}
    assert [runs(key) for key in ("row 0", "row 1", "slow")] == [1, 1, 2]


def test_wrong_rows_are_tried_again_and_last(runs: Callable[[str], int]) -> None:
    """A right row stays as it was."""
    outcome = Outcome([{"key": "row 0", "ok": False}, {"key": "row 2", "ok": True, "old": True}], complete=True)
    run(_section("fine"), "cpu", outcome, {}, 60.0)
    assert outcome.right and [runs(f"row {i}") for i in range(4)] == [1, 1, 0, 1] and _rows(outcome)["row 2"]["old"]
    assert [row["key"] for row in outcome.rows][-1] == "row 0"


def test_what_a_row_started_is_stopped_with_it(runs: Callable[[str], int], tmp_path: Path) -> None:
    outcome = Outcome()
    run(_section("starting", hurried=True), "cpu", outcome, {}, 60.0)
    assert outcome.rows[0]["problem"] == "stopped after 2 s"
    process = Path("/proc") / (tmp_path / "marks" / "program").read_text()
    for _ in range(50):
        if not process.exists() or "\nState:\tZ" in (process / "status").read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("its program still runs")


def test_a_section_that_cannot_begin_says_why(runs: Callable[[str], int]) -> None:
    outcome = Outcome()
    run(_section("dead_on_arrival"), "cpu", outcome, {}, 60.0)
    assert not outcome.right and "exit code 5 before the first row" in outcome.problem and outcome.rows == []


# ---- the file


def test_a_report_is_continued(tmp_path: Path) -> None:
    report = opened(tmp_path, MACHINE, False)
    report.outcomes["parity"] = Outcome([{"key": "a", "ok": True}], True, "", {"clocks.sm": "1980 MHz"})
    report.save()
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_check_nvidia-h200_2026-01-02.json"]
    assert asdict(opened(tmp_path, MACHINE, False).outcomes["parity"]) == asdict(report.outcomes["parity"])
    assert opened(tmp_path, MACHINE, True).outcomes == {}, "--force starts again"
    assert opened(tmp_path, MACHINE | {"date": "2026-01-03T00:00:00"}, False).outcomes == {}, (
        "another day has another file"
    )


@pytest.mark.parametrize("changed", ["gpu", "commit", "sources"])
def test_a_report_of_something_else_is_not_continued(changed: str, tmp_path: Path) -> None:
    report = opened(tmp_path, MACHINE, False)
    report.save()
    content = json.loads(report.path.read_text())
    content["machine"][changed] = "other"
    write_json(report.path, content)
    before = report.path.read_bytes()
    with pytest.raises(ValueError, match=rf"comes from another {changed}: .*--output.*--force"):
        opened(tmp_path, MACHINE, False)
    assert report.path.read_bytes() == before
    opened(tmp_path, MACHINE, True)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"gpu_check": 1}', '{"gpu_check": 4, "machine": {}, "sections": {}}']
)
def test_what_is_no_report_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / file_name(MACHINE)
    path.write_text(content)
    with pytest.raises(ValueError, match=r"not a result of this check.*--force"):
        opened(tmp_path, MACHINE, False)
    assert path.read_text() == content


def test_rows_without_a_key_are_refused(tmp_path: Path) -> None:
    report = Report(tmp_path / file_name(MACHINE), MACHINE, {"parity": Outcome([{"ok": True}])})
    report.save()
    with pytest.raises(ValueError, match="not a result of this check"):
        opened(tmp_path, MACHINE, False)


# ---- a call


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command with fake sections that take 100, 300, 90 and 10 seconds of its clock, as if there were a GPU."""
    as_on_a_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(gpu_check, "adopt_installed", lambda checkout: None)
    monkeypatch.setattr(gpu_check, "os", SimpleNamespace(environ={}))
    sections = {
        "one": _section("fine"),
        "two": _section("times"),
        "three": _section("slow"),
        "tune": _section("tuned", after="three"),
    }
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    monkeypatch.setattr(gpu_check, "PARTS", {"1": ["one"], "2": ["one", "two"]})
    clock = [0.0]
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])

    def made(
        section: Section, device: str, outcome: Outcome, before: Any, seconds: float, keep: Callable[[], None]
    ) -> None:
        assert device == "cuda"
        takes = {"fine": 100.0, "times": 300.0, "slow": 90.0, "tuned": 10.0}[section.tasks.split(":")[1]]
        clock[0] += min(takes, seconds)
        times = outcome.rows[0]["times"] + 1 if outcome.rows else 1
        outcome.add({"key": "row", "ok": takes != 300.0 or times > 1, "times": times})
        outcome.complete, outcome.listed = takes <= seconds, 1
        keep()

    monkeypatch.setattr(gpu_check, "run", made)

    def call(*arguments: str) -> int:
        clock[0] = 1000.0
        return gpu_check.main(["--output", str(tmp_path), *arguments])

    return call


def _times(folder: Path) -> dict[str, int]:
    """How often each section was run."""
    content = json.loads((folder / file_name(MACHINE)).read_text())["sections"]
    return {name: section["rows"][0]["times"] for name, section in content.items()}


def test_a_call_stays_within_its_budget(
    calls: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Interrupted sections are named; the next call continues them and repeats wrong rows; the call after that has
    nothing to do."""
    assert calls() == 1
    printed = capsys.readouterr().out
    assert "not done yet: three, tune; run the same command to continue" in printed and "two: 0 of 1 right" in printed
    assert _times(tmp_path) == {"one": 1, "two": 1, "three": 1}, (
        "a section is not begun before the one that it waits for is complete"
    )
    assert calls() == 0
    assert _times(tmp_path) == {"one": 1, "two": 2, "three": 2, "tune": 1}, "the right one was not run again"
    before = (tmp_path / file_name(MACHINE)).read_text()
    assert calls() == 0 and (tmp_path / file_name(MACHINE)).read_text() == before
    assert json.loads(before)["sections"]["one"]["state"] == {"clocks.sm": "1980 MHz"}


def test_a_section_that_is_named_is_run_again(calls: Callable[..., int], tmp_path: Path) -> None:
    assert calls("--sections", "one") == 0
    assert calls("--sections", "one,three,one") == 0
    assert _times(tmp_path) == {"one": 1, "three": 1}, "anew, and once"
    assert calls("--sections", "three,tune") == 0 and _times(tmp_path) == {"one": 1, "three": 1, "tune": 1}
    assert calls("--sections", "three") == 0 and _times(tmp_path) == {"one": 1, "three": 1}, (
        "results that depend on repeated rows are removed"
    )


def test_a_part_of_a_session_continues(calls: Callable[..., int], tmp_path: Path) -> None:
    assert calls("--part", "2") == 1
    assert _times(tmp_path) == {"one": 1, "two": 1}
    assert calls("--part", "2") == 0
    assert _times(tmp_path) == {"one": 1, "two": 2}
    assert calls("--part", "1") == 0 and _times(tmp_path) == {"one": 1, "two": 2}


def test_the_parts_of_a_session_are_all_sections() -> None:
    named = [name for names in gpu_check.PARTS.values() for name in names]
    assert set(named) == set(gpu_check.SECTIONS)
    for names in gpu_check.PARTS.values():
        assert all(gpu_check.SECTIONS[name].after in ("", *names[:at]) for at, name in enumerate(names))


def test_the_session_builds_once_and_runs_a_part(tmp_path: Path) -> None:
    """`python` says what it was called with; the kernels are there after its first call."""
    script = tmp_path / "bench" / "gpu_session.sh"
    for folder in ("bench", "cmab_kernels", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(Path(gpu_check.__file__).with_name("gpu_session.sh"), script)
    (tmp_path / "bin" / "python").write_text('#!/bin/sh\necho "$CMAB_KERNELS_CUDA: $*"\ntouch cmab_kernels/_cuda.so\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def said(*arguments: str) -> tuple[int, str]:
        run = subprocess.run([script, *arguments], env=environment, capture_output=True, text=True, check=False)
        return run.returncode, run.stdout + run.stderr

    check = ": bench/gpu_check.py --part"
    assert said("2", "--force") == (0, f"{check} 2 --force\n")
    (tmp_path / "cmab_kernels" / "_cuda.so").unlink()
    assert said("1") == (0, f"1: -m pip install --quiet --no-build-isolation --no-deps .\n{check} 1\n")
    assert said("1") == (0, f"{check} 1\n")
    for wrong in ((), ("5",), ("all",)):
        given = wrong[0] if wrong else ""
        assert said(*wrong) == (2, f"gpu_session: part: got '{given}', expected 1, 2, 3 or 4\n")


def test_refusals_of_the_command(calls: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert calls("--sections", "one,nonsense") == 2
    assert capsys.readouterr().err == "gpu_check: unknown sections: nonsense; there are one, two, three, tune\n"
    path = tmp_path / file_name(MACHINE)
    path.write_text("foreign")
    assert calls() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "not a result of this check" in said and path.read_text() == "foreign"
    assert calls("--sections", "one", "--force") == 0 and "foreign" not in path.read_text()


def test_sections_wait_for_those_that_come_before() -> None:
    names = list(gpu_check.SECTIONS)
    for name, section in gpu_check.SECTIONS.items():
        assert not section.after or names.index(section.after) < names.index(name)
        assert section.row_limit < gpu_check.BUDGET - gpu_check.TO_FINISH and section.workers >= 1, name
    assert gpu_check.BUDGET == 480


def test_figures_are_taken_alone() -> None:
    """Two processes on one GPU would each see the other's load."""
    timed = [section for name, section in gpu_check.SECTIONS.items() if not section.judged or name == "tune"]
    assert len(timed) == 9 and all(section.workers == 1 for section in timed)
