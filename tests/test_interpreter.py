"""The Triton kernels of every family in Triton's interpreter, each family in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cmab_kernels.testing import run_in_interpreter

pytest.importorskip("triton")
TESTS = Path(__file__).parent


@pytest.mark.parametrize("family", ["attention", "intention", "nystrom"])
def test_kernels(family: str) -> None:
    run_in_interpreter(TESTS / family / "test_kernels.py")
