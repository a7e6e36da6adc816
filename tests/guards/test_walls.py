"""No operator reads outside of its inputs or writes outside of its results."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cmab_kernels.testing import LAYOUTS

pytest.importorskip("cmab_kernels.attention.native", reason="the extension was not built", exc_type=ImportError)
if not sys.platform.startswith("linux"):
    pytest.skip("pages without access are made by mprotect, with Linux's numbers", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
TOO_FAR = """
import torch
from cmab_kernels.attention import native
from tests.guards.walls import between_walls
from cmab_kernels.attention.contract import Attention
query, rows = torch.randn(1, 1, 3, 8), between_walls(torch.float32, 40 * 8, True, beyond={beyond} * 8)
key = rows.as_strided((1, 1, 40 + {beyond}, 8), (0, 0, 8, 1))
out, _ = native.attention_forward(Attention(query, key, key, scale=1.0))
print("read", tuple(out.shape))
"""
"""The kernel is told that there are `beyond` more keys than exist."""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


def _all_run(*dtypes: str) -> None:
    run = _run("-m", "tests.guards.walls", *dtypes)
    cases = run.stdout.splitlines()
    assert run.returncode == 0, f"{cases[-1:]}: exit code {run.returncode}\n{run.stderr[-3000:]}"
    assert len({re.split(", ", case)[0] for case in cases}) >= 20 and len(cases) >= 20 * 2 * len(LAYOUTS)


def test_nothing_outside_is_read_or_written() -> None:
    _all_run()


@pytest.mark.nightly
def test_nothing_outside_is_read_or_written_in_other_dtypes() -> None:
    _all_run("float64", "bfloat16", "float16")


@pytest.mark.nightly
def test_nothing_outside_is_read_or_written_with_narrower_vectors(narrow_isa: str) -> None:
    _all_run("float64", "float32", "bfloat16", "float16")


@pytest.mark.parametrize("beyond, code", [(0, 0), (1, -signal.SIGSEGV)])
def test_a_key_past_the_last_ends_the_process(beyond: int, code: int) -> None:
    run = _run("-c", TOO_FAR.format(beyond=beyond))
    assert run.returncode == code and ("read" in run.stdout) == (code == 0), run.stderr[-2000:]
