"""The choice of "auto" on a GPU with kernels in Triton and in CUDA C++:
the faster one by measurement, on meta tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cmab_kernels import use_impl
from cmab_kernels.runtime import backends

pytest.importorskip("cmab_kernels.intention.solve.cuda", exc_type=ImportError)
pytest.importorskip("triton")

RESULTS = Path(__file__).parents[2] / "bench" / "results"
NOISE = 1.02
"""The smallest ratio of two times at which one kernel counts as faster."""


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        backends, "_unsupported", lambda operator_set, impl, tensors: "it is made up" if impl == "native" else None
    )


def _measured() -> dict[str, tuple[str, list[torch.Tensor]]]:
    """Group of solves -> the faster kernel in the newest check of a GPU, and tensors of its sizes."""
    newest = max(RESULTS.glob("gpu_check_*_????-??-??.json"), key=lambda path: path.stem[-10:])
    times: dict[str, dict[str, float]] = {}
    sizes = {}
    for section in json.loads(newest.read_text())["sections"].values():
        for row in section["rows"]:
            solves = row.get("scan") == "regularised_solve" and row["implementation"] in ("triton", "cuda")
            if solves and "seconds" in row:
                times.setdefault(row["group"], {})[row["implementation"]] = row["seconds"][0]
                sizes[row["group"]] = row["parameters"]
    found = {}
    for group, taken in times.items():
        first, second = sorted(taken, key=lambda name: taken[name])
        if taken[second] / taken[first] > NOISE:
            found[group] = first, _systems(sizes[group])
    return found


def _systems(size: dict[str, int]) -> list[torch.Tensor]:
    dtype, width, batch = getattr(torch, str(size["dtype"])), size["D"], size["B"]
    return [torch.empty(batch, width, width, dtype=dtype, device="meta")] * 2


def test_what_was_faster_is_taken() -> None:
    measured = _measured()
    assert {best for best, _ in measured.values()} == {"triton", "cuda"}
    for group, (best, tensors) in measured.items():
        assert backends.choose("intention.solve", "auto", *tensors) == best, group


def test_a_solve_in_float64_is_cudas() -> None:
    """Intention's own systems: 278 us where CUDA solves,
    and 305 where Triton does (docs/measured_gpu.md, 256 sets of 1,024 points)."""
    gram, rhs = torch.empty(2, 256, 64, 64, dtype=torch.float64, device="meta")
    assert backends.choose("intention.solve", "auto", gram, rhs) == "cuda"


def test_a_named_implementation_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements decide only if the caller names no implementation. A slower kernel runs if no other kernel can."""
    systems = [torch.empty(2, 9, 9, device="meta")] * 2
    assert backends.choose("intention.solve", "auto", *systems) == "triton"
    assert backends.choose("intention.solve", "cuda", *systems) == "cuda"
    with use_impl("cuda"):
        assert backends.choose("intention.solve", "auto", *systems) == "cuda"
    monkeypatch.setattr(
        backends, "_unsupported", lambda operator_set, impl, tensors: None if impl == "cuda" else "it is made up"
    )
    assert backends.choose("intention.solve", "auto", *systems) == "cuda"
