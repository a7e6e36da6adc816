"""The Triton kernels of every family in Triton's interpreter, each file in a separate process."""

from __future__ import annotations

from pathlib import Path

import pytest

from cmab_kernels.testing import run_in_interpreter

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)
TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("test_triton*.py"))


@pytest.mark.parametrize("half", [0, 1])
def test_a_sample_of_kernels(half: int) -> None:
    """One in 24 of the tests, so that the ordinary tier runs every kernel; two processes, for two cores."""
    run_in_interpreter(*FILES[half::2], "--one-in", "24")


@pytest.mark.thorough
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.relative_to(TESTS)}-{file.stem}")
def test_kernels(file: Path) -> None:
    run_in_interpreter(file)
