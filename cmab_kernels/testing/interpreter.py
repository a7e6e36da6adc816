"""Tests of Triton kernels on a CPU in Triton's interpreter, in a separate process: Triton chooses the interpreter when
it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process runs Triton kernels in the interpreter."""


def run_in_interpreter(*arguments: str | Path) -> str:
    """Run `python -m pytest` with these arguments and TRITON_INTERPRET=1, and return its standard output.

    If a test fails or none passes, raise `AssertionError` with the end of the output.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *map(str, arguments)]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-5000:] + run.stderr[-2000:]
    return run.stdout
