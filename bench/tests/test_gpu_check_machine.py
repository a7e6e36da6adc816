"""The GPU check's section of tests on the GPU simulated in software (docs/gpu_machine.md), with planted faults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("triton")

from bench.gpu.sections import Outcome, Section, run

pytestmark = pytest.mark.thorough

FAULTS = {
    "TestRidgeState::test_accuracy[triton": "of the error that it may have",
    "TestRegularisedSolve::test_accuracy[triton": "its process ended with exit code -11",
    "TestRegularisedSolve::test_accuracy[cuda": "the CUDA kernels are not there (nvcc was not found)",
}
"""Tests of the package -> their reports while the faults are there."""


class Limited(Section):
    """A section whose rows may take as long as on a busy processor."""

    row_limit = 60.0


def _problems(outcome: Outcome) -> Mapping[str, str]:
    return {row["key"]: row["problem"] for row in outcome.rows if not row.get("ok", True)}


def test_faults_of_kernels_cost_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with a kernel that is wrong, a kernel that crashes, and without the extension; then a call after the
    kernels are fixed."""
    monkeypatch.setenv("MACHINE_SECTIONS", str(tmp_path))
    section, outcome = Limited("bench.tests.machine_sections:tests", workers=2), Outcome()
    run(section, "cpu", outcome, {}, 3600.0)
    assert len(outcome.rows) == 4 and len(_problems(outcome)) == 3, outcome
    for test, problem in FAULTS.items():
        found = [said for key, said in _problems(outcome).items() if test in key]
        assert found and all(problem in said for said in found), (test, found)
    (tmp_path / "mended").touch()
    run(section, "cpu", outcome, {}, 3600.0)
    assert len(_problems(outcome)) == 1 and all("[cuda" in key for key in _problems(outcome)), (
        "the extension is still not there"
    )
