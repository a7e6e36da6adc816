"""The GPU check as far as a machine without a GPU shows it: floors, parity in the interpreter, report, refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench import gpu_check
from bench.gpu import ridge_parity, ridge_timings
from bench.gpu.floors import Rates, Shape, backward_floor, forward_floor, ridge_backward_floor, ridge_floor
from bench.gpu.parity import problems
from bench.gpu.timings import SHAPES

ROOT = Path(gpu_check.__file__).parents[1]
H200 = Rates(3.87e12, 4.3e12, {"bfloat16": 790e12, "tf32": 395e12})
MACHINE = {"gpu": "NVIDIA H200", "driver": "1", "versions": {}, "commit": "unknown", "date": "2026-01-01T00:00:00+00:00"}


@pytest.mark.parametrize(
    "shape, exponentials, matrix, memory, bound",
    [
        (SHAPES[0], 132, 41, 60, "exponentials"),
        (SHAPES[1], 265, 62, 60, "exponentials"),
        (SHAPES[2], 33, 41, 60, "memory"),
        (SHAPES[3], 1060, 1330, 480, "matrix"),
        (SHAPES[4], 132, 83, 119, "exponentials"),
    ],
)
def test_floors(shape: Shape, exponentials: float, matrix: float, memory: float, bound: str) -> None:
    """Microseconds of the design's table, which rounds to three digits at most."""
    floor = forward_floor(shape, H200)
    assert [floor.exponentials * 1e6, floor.matrix * 1e6, floor.memory * 1e6] == pytest.approx([exponentials, matrix, memory], rel=0.02)
    assert floor.bound == bound and floor.seconds == max(floor.exponentials, floor.matrix, floor.memory)


def test_backward_floor() -> None:
    floor = backward_floor(SHAPES[2], H200)
    assert floor.matrix == pytest.approx(2 * 128e6 * 320 / 790e12) and floor.memory == pytest.approx(
        2 * forward_floor(SHAPES[2], H200).memory
    )


def test_ridge_floors() -> None:
    """Intention's row in the design's table: 8 us of products, 31 of memory."""
    floor = ridge_floor(ridge_timings.SHAPES[0], H200)
    assert [floor.matrix * 1e6, floor.memory * 1e6] == pytest.approx([8, 31], rel=0.03) and floor.bound == "memory"
    backward = ridge_backward_floor(ridge_timings.SHAPES[0], H200)
    assert backward.matrix == pytest.approx(2 * floor.matrix) and backward.memory == pytest.approx(2 * floor.memory)


def test_the_sections_take_eight_minutes_at_most() -> None:
    assert sum(gpu_check.SECTIONS.values()) <= 480


def test_every_dtype_width_and_variant_is_checked() -> None:
    seen = list(problems())
    assert {(p.dtype, p.width) for p in seen} >= {
        (d, w) for d in ("float64", "float32", "bfloat16", "float16") for w in (8, 16, 64, 128, 256)
    }
    assert {p.variant for p in seen} == {"plain", "mask", "packed", "state", "strided"} and len(set(seen)) == len(seen)


def test_every_dtype_and_variant_of_intention_is_checked() -> None:
    seen = list(ridge_parity.problems())
    assert {(p.impl, p.dtype, p.width) for p in seen} >= {
        (i, d, w) for i in ("triton", "cuda") for d in ("float64", "float32", "bfloat16", "float16") for w in (16, 33, 64, 128)
    }
    assert {p.variant for p in seen} == {"plain", "masked", "strided", "huge"} and {p.exact for p in seen} == {False, True}
    assert len(set(seen)) == len(seen)


PARITY = """
import json, sys
from dataclasses import replace
from unittest import mock
from bench.gpu.parity import Problem, check
from cmab_kernels.attention.kernels import forward

tiny = [Problem("float32", 8, 8, latents=5, keys=70, variant=v) for v in ("plain", "mask", "packed", "state", "strided")]
tiny += [Problem(d, 9, 7, "ten times", latents=3, keys=33) for d in ("float64", "float16")]
rows = [check(problem, "cpu") for problem in tiny]
with mock.patch.object(forward, "LN_2", forward.tl.constexpr(0.69)):
    wrong = check(replace(tiny[0], dtype="float16"), "cpu")
print(json.dumps([rows, wrong]))
"""


def test_parity_in_the_interpreter() -> None:
    """Right kernels pass in every variant; a kernel whose lse is off by a little does not."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARITY],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows, wrong = json.loads(run.stdout)
    assert all(row["ok"] for row in rows), [row for row in rows if not row["ok"]]
    assert all(set(row["shares"]) == {"out", "lse", "dq", "dk", "dv"} for row in rows)
    assert not wrong["ok"] and wrong["shares"]["lse"] > 1


RIDGE = """
import json, sys
from unittest import mock
import torch
from bench.gpu import repeats, ridge_timings
from bench.gpu.floors import Rates, RidgeShape
from bench.gpu.ridge_parity import Problem, check
from cmab_kernels.intention.kernels import sums
from cmab_kernels.intention.kernels.launch import Cut

tiny = [Problem("triton", "float32", 9, 7, keys=70, variant=v) for v in ("plain", "masked", "strided", "huge")]
tiny += [Problem("triton", d, 5, 3, keys=33, variant="masked", exact=True) for d in ("float64", "float16")]
rows = [check(problem, "cpu") for problem in tiny]
absent = check(Problem("cuda", "float32", 9, 7, keys=70), "cpu")
with mock.patch.object(sums, "cut_keys", lambda keys, *_: Cut(1, keys - 1)):
    wrong = check(tiny[0], "cpu")

call, given = repeats._ridge("triton"), repeats._ridge_inputs(torch.float32, 4, 40, "cpu")
bits = [repeats.again(call, given, 2), repeats.alone(call, given)]
moved = [0]
def restless(*inputs):
    moved[0] += 1
    return tuple(t + moved[0] for t in call(*inputs)[:1])
bits += [repeats.again(restless, given, 2), repeats.alone(restless, given)]

def once(runs):
    for run in runs:
        run()
    return 1e-6
alike = mock.patch.multiple(ridge_timings, l2_copies=lambda *_: 1, memory_of=lambda run: 0, seconds_of=once)
with alike, mock.patch.object(torch.cuda, "synchronize"):
    shape = RidgeShape("tiny", 2, 40, 4, "float32", "tf32")
    times = list(ridge_timings.rows(shape, Rates(1e12, 1e12, {"tf32": 1e12}), "cpu"))
print(json.dumps([rows, absent, wrong, bits, times]))
"""


def test_intention_in_the_interpreter() -> None:
    """Right kernels pass; one that drops the last key does not; bits that change are seen; each pass is run and has its row."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RIDGE],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows, absent, wrong, bits, times = json.loads(run.stdout)
    assert all(row["ok"] for row in rows), [row for row in rows if not row["ok"]]
    assert set(rows[0]["shares"]) >= {"gram", "moment", "dkey", "dvalue", "dweights", "rows", "solution", "LAPACK's ratio", "info"}
    assert absent["ok"] and "GPU" in absent["problem"], "what was not built is passed over, and said"
    assert not wrong["ok"] and wrong["shares"]["gram"] > 1
    assert bits == [True, True, False, False]
    assert [(row["pass"], row["impl"], "seconds" in row) for row in times] == [
        (p, i, i != "cuda") for p in ("sums", "gradients", "solution") for i in ("triton", "cuda", "torch")
    ], times


def _report(**sections: list[dict]) -> dict:
    return {"machine": MACHINE, "sections": sections}


def test_a_wrong_row_fails_the_check_and_stands_in_the_table() -> None:
    good, bad = {"check": "a", "ok": True}, {"check": "b", "ok": False}
    assert gpu_check.passed(_report(parity=[good])) and not gpu_check.passed(_report(parity=[good], repeats=[bad]))
    assert "repeats: 0 of 1 passed" in gpu_check.table(_report(repeats=[bad])) and "WRONG" in gpu_check.table(_report(repeats=[bad]))


def test_the_table_has_times_and_refusals() -> None:
    row = {"shape": "4 heads of 16", "pass": "forward", "impl": "triton", "floor": 1e-4, "bound": "matrix"}
    text = gpu_check.table(
        _report(
            timings=[{"rates": {"copy": 4e12}}, row | {"seconds": 2e-4, "memory": 2**20, "share of floor": 0.5}, row | {"problem": "no"}]
        )
    )
    assert "200.0 us" in text and "50.0%" in text and text.endswith("no")
    assert gpu_check.passed(_report(timings=[row | {"problem": "a peer cannot run this"}])), "a peer's refusal is no fault of ours"


def test_a_section_that_crashes_or_hangs_is_reported() -> None:
    """Without a GPU its first use of one raises; with no time at all it is stopped."""
    rows = gpu_check.run_section("repeats", "no such device", 120)
    assert rows[-1]["ok"] is False and "device" in rows[-1]["problem"]
    assert "stopped" in gpu_check.run_section("repeats", "cpu", 0.1)[-1]["problem"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu_check.py"), "--output", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr == "gpu_check: there is no GPU that torch can use\n" and not list(tmp_path.iterdir())


def test_a_missing_commit_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    assert gpu_check.commit() == "unknown"
    monkeypatch.setenv("PATH", "")
    assert gpu_check.commit() == "unknown"
