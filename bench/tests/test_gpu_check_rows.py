"""The rows of the GPU check as far as a machine without a GPU can make them: right ones pass, planted faults do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def _interpreted(name: str) -> Any:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bench.tests.gpu_rows_interpreted", name],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_timings() -> None:
    """Each row is made, peers and all; what is not installed or wrong says so, and is no fault of ours."""
    rows = _interpreted("times")
    assert len(rows) == 8 and not any(row.get("ok") is False for row in rows.values()), rows
    for key, row in rows.items():
        name = key.split("; ")[1]
        if name == "flash-attention":
            assert "pip install flash-attn" in row["problem"]
        elif name == "wrong":
            assert "wrong here: relative RMS error" in row["problem"]
        else:
            assert {"group", "seconds", "floor", "extra_memory", "error"} <= row.keys(), row
            assert ("speed_up" in row) == (name != "triton"), row


@pytest.mark.nightly
def test_candidates() -> None:
    rows, wrong = _interpreted("tiles")
    assert len(rows) == 8 and all(row["sound"] for row in rows.values()), rows
    assert not wrong["sound"] and "wrong" in wrong["problem"]
