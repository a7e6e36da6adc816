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


def test_attention() -> None:
    rows, wrong = _interpreted("attention")
    assert all(row["ok"] for row in rows), [row for row in rows if not row["ok"]]
    assert all(set(row["shares"]) == {"out", "lse", "dq", "dk", "dv"} for row in rows)
    assert not wrong["ok"] and wrong["shares"]["lse"] > 1


def test_intention() -> None:
    rows, absent, wrong = _interpreted("intention")
    assert all(row["ok"] for row in rows), [row for row in rows if not row["ok"]]
    assert set(rows[0]["shares"]) >= {"gram", "moment", "dkey", "dvalue", "dweights", "rows", "solution", "LAPACK's ratio", "info"}
    assert absent["ok"] and "GPU" in absent["passed over"], "what was not built is passed over, and said"
    assert not wrong["ok"] and wrong["shares"]["gram"] > 1


@pytest.mark.nightly
def test_bits() -> None:
    assert _interpreted("bits") == [[True, True, False, False]] * 2


@pytest.mark.nightly
def test_windows_and_solves() -> None:
    rows, wrong = _interpreted("nystrom")
    assert all(row["ok"] for row in rows), [row for row in rows if not row["ok"]]
    assert set(rows[0]["shares"]) == {"out", "dq", "dk", "dv"} and len(rows) == 10
    bad = [row for row in rows if row.get("variant") == "bad"]
    assert len(bad) == 2 and all({"neighbours' bits", "the bad one", "gradients"} <= row["shares"].keys() for row in bad)
    assert not wrong["ok"]


@pytest.mark.nightly
def test_second_order() -> None:
    rows = _interpreted("promised")
    assert len(rows) == 4 and all(row["ok"] for row in rows.values()), rows


def test_timings() -> None:
    """Each row is made, peers and all; what is not installed or wrong says so, and is no fault of ours."""
    rows = _interpreted("times")
    assert len(rows) == 8 and not any(row.get("ok") is False for row in rows.values()), rows
    for key, row in rows.items():
        name = key.split("; ")[1]
        if name == "flash-attention":
            assert "pip install flash-attn" in row["problem"]
        elif name == "wrong":
            assert "wrong: relative RMS error" in row["problem"]
        else:
            assert {"group", "seconds", "floor", "extra_memory", "error"} <= row.keys(), row
            assert ("speed_up" in row) == (name != "triton"), row


@pytest.mark.nightly
def test_candidates() -> None:
    rows, wrong = _interpreted("tiles")
    assert len(rows) == 8 and all(row["sound"] for row in rows.values()), rows
    assert not wrong["sound"] and "wrong" in wrong["problem"]


@pytest.mark.nightly
def test_small_cases() -> None:
    assert _interpreted("small") == [0, 0, 0, 0]
