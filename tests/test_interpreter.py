"""The Triton kernels of every family in Triton's interpreter, each file in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cmab_kernels.testing import run_in_interpreter

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)
TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    "family, file",
    [
        ("attention", "test_kernels"),
        ("attention", "test_kernels_large"),
        ("attention", "test_kernels_tf32"),
        ("attention/prefix", "test_kernels"),
        ("attention/projected", "test_kernels"),
        ("layers", "test_kernels"),
        ("intention", "test_kernels"),
        ("intention/solve", "test_kernels"),
        ("nystrom", "test_kernels"),
        ("nystrom/continual", "test_kernels"),
    ],
)
def test_kernels(family: str, file: str) -> None:
    run_in_interpreter(TESTS / family / f"{file}.py")
