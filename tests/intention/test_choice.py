"""The choice of "auto" on a GPU with kernels in Triton and in CUDA C++:
the faster one by measurement, on meta tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cmab_kernels import use_impl
from cmab_kernels.runtime import backends

cuda = pytest.importorskip("cmab_kernels.intention.cuda", exc_type=ImportError)
pytest.importorskip("triton")

RESULTS = Path(__file__).parents[2] / "bench" / "results"
FAMILIES = {"intention": "intention", "regularised_solve": "intention.solve"}
NOISE = 1.02
"""The ratio of two times from which on one counts as faster."""


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        backends, "_unsupported", lambda operator_set, impl, tensors: "it is made up" if impl == "native" else None
    )


def _measured() -> dict[tuple[str, str], tuple[str, list[torch.Tensor]]]:
    """(Operator, group) -> the faster kernel in the newest check of a GPU, and tensors of its sizes."""
    newest = max(RESULTS.glob("gpu_check_*_????-??-??.json"), key=lambda path: path.stem[-10:])
    times: dict[tuple[str, str], dict[str, float]] = {}
    sizes = {}
    for section in json.loads(newest.read_text())["sections"].values():
        for row in section["rows"]:
            if row.get("scan") in FAMILIES and row["implementation"] in ("triton", "cuda") and "seconds" in row:
                times.setdefault((row["scan"], row["group"]), {})[row["implementation"]] = row["seconds"][0]
                sizes[row["scan"], row["group"]] = row["parameters"]
    found = {}
    for case, taken in times.items():
        first, second = sorted(taken, key=lambda name: taken[name])
        if taken[second] / taken[first] > NOISE:
            found[case] = first, _tensors(sizes[case])
    return found


def _tensors(size: dict[str, int]) -> list[torch.Tensor]:
    """The tensors on which the choice depends: query, key and value, or gram and rhs."""
    dtype, width, batch = getattr(torch, str(size["dtype"])), size["D"], size["B"]
    if "N" in size:
        return [torch.empty(batch, 1, size["N"], width, dtype=dtype, device="meta")] * 3
    return [
        torch.empty(batch, width, width, dtype=dtype, device="meta"),
        torch.empty(batch, width, width, dtype=dtype, device="meta"),
    ]


def test_what_was_faster_is_taken() -> None:
    measured = _measured()
    assert {operator for operator, _ in measured} == FAMILIES.keys() and {best for best, _ in measured.values()} == {
        "triton",
        "cuda",
    }
    for (operator, group), (best, tensors) in measured.items():
        assert backends.choose(FAMILIES[operator], "auto", *tensors) == best, (operator, group)


def test_a_solve_in_float64_is_cudas() -> None:
    """Intention's own systems: 278 us where CUDA solves,
    and 305 where Triton does (docs/measured_gpu.md, 256 sets of 1,024 points)."""
    gram, rhs = torch.empty(2, 256, 64, 64, dtype=torch.float64, device="meta")
    assert backends.choose("intention.solve", "auto", gram, rhs) == "cuda"


def test_a_named_implementation_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements decide only if the caller does not; and a slower kernel runs if no other can."""
    rows = [torch.empty(2, 1, 9, 4, device="meta")] * 3
    assert backends.choose("intention", "cuda", *rows) == "cuda"
    with use_impl("cuda"):
        assert backends.choose("intention", "auto", *rows) == "cuda"
    monkeypatch.setattr(
        backends, "_unsupported", lambda operator_set, impl, tensors: None if impl == "cuda" else "it is made up"
    )
    assert backends.choose("intention", "auto", *rows) == "cuda"
