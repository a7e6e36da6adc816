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
        [sys.executable, "-W", "ignore", "-m", "tests.bench.gpu_rows_interpreted", name],
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
    attention, ridge, nystrom = _interpreted("times")
    expected = {"triton", "triton, tf32", "torch math", "naive", "flash-attn", "wrong"}
    assert {key.split("; ", 2)[2] for key in attention} == expected and len(attention) == 12
    for key, row in attention.items():
        name = key.split("; ", 2)[2]
        if name == "flash-attn":
            assert "flash_attn" in row["problem"] and "ok" not in row
        elif name == "wrong":
            assert "wrong result" in row["problem"] and row["ok"], "a peer's, which is not our fault"
        else:
            assert {"seconds", "spread", "floor", "share", "memory", "error"} <= row.keys(), row
            assert row.get("times ours") == (None if name.startswith("triton") else [2.0] * 3) and row["seconds"] == 2e-6
    assert {key: "seconds" in row for key, row in ridge.items()} == {
        **{f"tiny; {pass_}; {name}": name != "cuda" for pass_ in ("sums", "gradients", "solution") for name in ("triton", "cuda", "torch")},
        "3 systems of 4; solve; cuda": False,
        "3 systems of 4; solve; torch": True,
        "256 x (1,024 of 64), bf16; a solve a token; mesa_net": False,
    }, ridge
    assert not any(row.get("ok") is False for row in ridge.values()), "nothing that is not installed or not built is a fault"
    assert all("seconds" in row for row in nystrom.values()) and len(nystrom) == 5, nystrom
    assert all(("floor" in row) == (not key.endswith("torch attention")) for key, row in nystrom.items())


@pytest.mark.nightly
def test_candidates() -> None:
    rows, wrong = _interpreted("tiles")
    assert len(rows) == 8 and all(row["sound"] for row in rows.values()), rows
    assert not wrong["sound"] and "wrong" in wrong["problem"]


@pytest.mark.nightly
def test_small_cases() -> None:
    assert _interpreted("small") == [0, 0, 0, 0]
