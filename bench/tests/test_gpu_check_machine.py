"""The GPU check from start to end on the GPU made of software (docs/gpu_machine.md), with planted faults. Its times mean nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench import gpu_check
from bench.gpu.sections import Row, Section, run
from gpu_machine import cuda_launch

MACHINE = {"gpu": "made of software", "commit": "abc", "sources": "123", "date": "2026-01-02T03:04:05+00:00"}
HERE = "bench.tests.machine_sections"
STANDS_FOR = {
    "suite": "tests",
    "timings": "times",
    "ridge_timings": "intention_times",
    "nystrom_timings": "nystrom_times",
    "continual_timings": "continual_times",
    "candidates": "some_tiles",
    "tune": "tuning",
    "tuned_suite": "tuned_tests",
    "tuned_timings": "tuned_times",
    "compiled_timings": "compiled_times",
}
LIMIT = 60.0


class Limited(Section):
    """A section whose rows may take as long as they do on a busy processor."""

    row_limit = LIMIT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the sections read, for a check that takes the machine for a GPU."""
    there = tmp_path / "sections"
    there.mkdir()
    (there / "tiles.json").write_text('{"cmab_kernels_tiles": 1, "entries": []}')
    monkeypatch.setenv("MACHINE_SECTIONS", str(there))
    sections = {
        name: Limited(**{**vars(section), "tasks": f"{HERE}:{STANDS_FOR[name]}", "workers": min(section.workers, 2)})
        for name, section in gpu_check.SECTIONS.items()
        if name in STANDS_FOR
    }
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    monkeypatch.setattr(gpu_check, "BUDGET", 3600.0)
    monkeypatch.setattr(gpu_check, "run", lambda section, device, *rest: run(section, "cpu", *rest))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "clean_commit", lambda told: MACHINE["commit"])
    monkeypatch.setattr(gpu_check, "gpu", lambda commit: dict(MACHINE))
    monkeypatch.setattr(gpu_check, "gpu_state", lambda: {"clocks.sm": "none"})
    monkeypatch.setattr(gpu_check.tiles, "FILE", there / "tiles.json")
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "set by the check")
    return there


def _rows(output: Path) -> dict[str, dict[str, Row]]:
    """Section -> key -> row."""
    (file,) = output.glob("gpu_check_made-of-software_2026-01-02.json")
    sections = json.loads(file.read_text())["sections"]
    return {name: {row["key"]: row for row in section["rows"]} for name, section in sections.items()}


HANGS = "TestFixedLandmarks::test_accuracy[triton"
FAULTS = {
    "TestRidgeState::test_accuracy[triton": "of the error that it may have",
    HANGS: f"stopped after {LIMIT:.0f} s",
    "TestRegularisedSolve::test_accuracy[triton": "its process ended with exit code -11",
    "TestRegularisedSolve::test_accuracy[cuda": "the CUDA kernels are not there (nvcc was not found)",
}
"""Tests of the package -> what is said of them while the faults are there."""


def _problems(rows: Mapping[str, Row]) -> dict[str, str]:
    return {key: row["problem"] for key, row in rows.items() if not row.get("ok", True)}


def _are_reported(problems: Mapping[str, str], but: str = "") -> None:
    for test, problem in FAULTS.items():
        found = [said for key, said in problems.items() if test in key]
        assert test == but or found, test
        assert all(problem in said for said in found), (test, found)


def test_faults_of_kernels_cost_their_rows(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with a kernel that is wrong, one that crashes, and without the extension; and one when the kernels are mended."""
    monkeypatch.setattr(gpu_check, "SECTIONS", {"suite": gpu_check.SECTIONS["suite"]})
    output = tmp_path / "results"
    assert gpu_check.main(["--output", str(output)]) == 1
    rows = _rows(output)["suite"]
    assert len(rows) == 5 and len(_problems(rows)) == 4
    _are_reported(_problems(rows), but=HANGS)
    (folder / "mended").touch()
    assert gpu_check.main(["--output", str(output)]) == 1, "the extension is still not there"
    assert len(wrong := _problems(_rows(output)["suite"])) == 2 and all("[cuda" in key for key in wrong)


@pytest.mark.nightly
@pytest.mark.skipif(cuda_launch.COMPILER is None or cuda_launch.nvcc() is None, reason="no nvcc, or no C++ compiler, for the CUDA kernels")
def test_a_check_from_start_to_end(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All operators and sections: the first call finds the faults, the second what was mended, the third nothing to do."""
    (folder / "cuda").mkdir()
    cuda_launch.build(folder / "cuda")
    output = tmp_path / "results"

    def call() -> tuple[int, str]:
        return gpu_check.main(["--output", str(output)]), capsys.readouterr().out

    code, said = call()
    found = _rows(output)
    assert code == 1 and found.keys() == STANDS_FOR.keys() and "not done yet" not in said
    for section in ("suite", "tuned_suite"):
        _are_reported(_problems(found[section]))
        assert len(found[section]) > 35 and not any("attention/" in key for key in _problems(found[section]))
    assert "1 of 1 block sizes are better" in said and [row["sound"] for row in found["candidates"].values()] == 3 * [True]
    assert any("triton" in key and "floor" in row for key, row in found["timings"].items())
    crashed, hung = (row for name in ("ridge_timings", "continual_timings") for key, row in found[name].items() if key.endswith("; triton"))
    assert "exit code -11" in crashed["problem"] and "stopped after" in hung["problem"]
    (folder / "mended").touch()
    code, said = call()
    assert code == 0 and "WRONG" not in said and not any(_problems(rows) for rows in _rows(output).values())
    before = _rows(output)
    assert call()[0] == 0 and _rows(output) == before
