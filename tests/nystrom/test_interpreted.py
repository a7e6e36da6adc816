"""The Triton kernels, in a process of their own: Triton decides for interpreter or compiler when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_kernels_in_the_interpreter() -> None:
    tests = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(tests)]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=tests.parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
