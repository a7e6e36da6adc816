"""The Triton kernels of attention over projected inputs compiled for GPUs that this machine need not have."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from cmab_kernels.attention.projected import triton as kernels
from cmab_kernels.attention.projected.contract import ProjectedAttention, ProjectedAttentionBackward
from cmab_kernels.attention.projected.triton import launch as launches
from cmab_kernels.attention.projected.triton.launch import Tiles
from cmab_kernels.testing.cubin import Launch, as_if_on, compiled, record
from tests.machine_code import wrong

pytestmark = pytest.mark.thorough

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
KERNELS = ("_projected_forward", "_projected_backward", "_projected_backward_inputs")
CAPABILITIES = (80, 86, 89, 90, 100, 120)
ORDINARY = [("fp32", 16, 64, 90), ("fp32", 16, 64, 80), ("bf16", 64, 64, 100), ("fp64", 16, 64, 90)]
EVERY = [*itertools.product(DTYPES, (16, 32, 64), (64, 512), CAPABILITIES), *itertools.product(DTYPES, (128, 256), (64,), CAPABILITIES)]
NIGHTLY = [case for case in EVERY if case not in ORDINARY]
_SPILLED = {
    ("bf16", 16, 512, "_projected_forward"): (0.01, 0, 0, 0, 0, 0),
    ("bf16", 16, 512, "_projected_backward"): (0.025, 0, 0, 0, 0, 0),
    ("bf16", 64, 64, "_projected_backward"): (0.045, 0.02, 0.02, 0, 0, 0.02),
    ("bf16", 64, 512, "_projected_backward"): (0.015, 0, 0, 0, 0, 0),
    ("bf16", 64, 512, "_projected_backward_inputs"): (0.01, 0, 0, 0, 0, 0),
    ("bf16", 128, 64, "_projected_backward"): (0.115, 0.1, 0.1, 0, 0.01, 0.095),
    ("bf16", 128, 64, "_projected_backward_inputs"): (0.065, 0.05, 0.05, 0.055, 0.045, 0.035),
    ("bf16", 256, 64, "_projected_forward"): (0, 0, 0, 0.01, 0, 0),
    ("bf16", 256, 64, "_projected_backward"): (0.105, 0.09, 0.09, 0, 0, 0.095),
    ("bf16", 256, 64, "_projected_backward_inputs"): (0.085, 0.03, 0.03, 0.03, 0.02, 0.03),
    ("fp32", 16, 512, "_projected_backward"): (0, 0, 0, 0.01, 0, 0),
    ("fp32", 32, 512, "_projected_backward"): (0.01, 0, 0, 0, 0, 0),
    ("fp32", 64, 64, "_projected_backward_inputs"): (0.015, 0, 0, 0.015, 0, 0),
    ("fp32", 64, 512, "_projected_backward_inputs"): (0.02, 0, 0, 0.01, 0, 0),
    ("fp32", 128, 64, "_projected_forward"): (0, 0, 0, 0.01, 0, 0),
    ("fp32", 128, 64, "_projected_backward_inputs"): (0.09, 0.08, 0.08, 0.075, 0.065, 0.055),
    ("fp32", 256, 64, "_projected_forward"): (0, 0, 0, 0.07, 0, 0),
    ("fp32", 256, 64, "_projected_backward_inputs"): (0.085, 0.07, 0.07, 0.055, 0.045, 0.045),
    ("fp64", 32, 64, "_projected_backward"): (0.045, 0, 0, 0.035, 0, 0),
    ("fp64", 32, 64, "_projected_backward_inputs"): (0, 0.19, 0.19, 0, 0.125, 0.065),
    ("fp64", 32, 512, "_projected_backward"): (0.055, 0, 0, 0.035, 0, 0),
    ("fp64", 32, 512, "_projected_backward_inputs"): (0, 0.195, 0.195, 0, 0.13, 0.07),
    ("fp64", 64, 64, "_projected_forward"): (0, 0.055, 0.055, 0, 0.055, 0.03),
    ("fp64", 64, 64, "_projected_backward"): (0.11, 0, 0, 0.105, 0.015, 0),
    ("fp64", 64, 64, "_projected_backward_inputs"): (0, 0.255, 0.255, 0, 0.2, 0.135),
    ("fp64", 64, 512, "_projected_forward"): (0, 0.06, 0.06, 0, 0.055, 0.03),
    ("fp64", 64, 512, "_projected_backward"): (0.135, 0.015, 0.015, 0.115, 0.015, 0),
    ("fp64", 64, 512, "_projected_backward_inputs"): (0, 0.265, 0.265, 0, 0.205, 0.14),
    ("fp64", 128, 64, "_projected_forward"): (0, 0.165, 0.165, 0.01, 0.16, 0.105),
    ("fp64", 128, 64, "_projected_backward"): (0.115, 0.035, 0.035, 0.09, 0.035, 0.015),
    ("fp64", 128, 64, "_projected_backward_inputs"): (0.035, 0.185, 0.185, 0.035, 0.19, 0.095),
    ("fp64", 256, 64, "_projected_forward"): (0, 0.045, 0.045, 0, 0.05, 0.025),
    ("fp64", 256, 64, "_projected_backward"): (0.12, 0.025, 0.025, 0.095, 0.025, 0.015),
    ("fp64", 256, 64, "_projected_backward_inputs"): (0.04, 0.19, 0.19, 0.025, 0.19, 0.095),
}
SPILLING: dict[tuple[str, int, int, int], dict[str, float]] = {}
"""The kernels known to spill, and the largest share of their instructions that may access local memory, by case of
`EVERY`.

Wide heads and float64 have the most; no tile was found that avoids their spills.
"""
for (*case, spilled), shares in _SPILLED.items():
    for capability, share in zip(CAPABILITIES, shares, strict=True):
        if share:
            SPILLING.setdefault((*case, capability), {})[spilled] = share


def _launches(dtype: torch.dtype, width: int, columns: int, latents: int = 128, mask: bool = False) -> dict[str, Launch]:
    """Record a forward and a backward pass over several runs of rows,
    with an incoming state and, on request, a mask."""
    sums = torch.promote_types(dtype, torch.float32)
    query, inputs = torch.empty(1, 1, 4, latents, width, dtype=sums), torch.empty(1, 5003, columns, dtype=dtype)
    weight, bias = torch.empty(1, 8 * width, columns, dtype=sums), torch.empty(1, 8 * width, dtype=sums)
    out, lse = torch.empty(1, 1, 4, latents, width, dtype=sums), torch.empty(1, 1, 4, latents).double()
    given = (query, inputs, weight, bias, torch.zeros(1, 5003, dtype=torch.bool) if mask else None, None)

    def call() -> tuple[Tensor, ...]:
        slopes = ProjectedAttentionBackward(out, lse, *given, out, lse, 1.0, 1e-5, (True,) * 4)
        results = kernels.projected_attention_forward(ProjectedAttention(*given, out, lse, 1.0, 1e-5))
        return (*results, *kernels.projected_attention_backward(slopes))

    return {launch.kernel.__name__: launch for launch in record(call)}


def _by_matrix_units(launch: Launch, capability: int) -> bool:
    """Return whether matrix units multiply: never for full float32;
    for float64 only on sm_80 and sm_90, as in Triton 3.6."""
    in_float64 = launch.options["OPERAND"] == launches.triton_dtype(torch.float64)
    return launch.options["PRECISION"] != "ieee" or (in_float64 and capability in (80, 90))


def _faults(found: dict[str, Launch], capability: int, folder: Path, spilling: dict[str, float] | None = None) -> list[str]:
    return wrong((found[name] for name in KERNELS), capability, folder, _by_matrix_units, spilling)


@pytest.mark.parametrize("name, width, columns, capability", ORDINARY)
def test_compiled(name: str, width: int, columns: int, capability: int, tmp_path: Path) -> None:
    with as_if_on(capability):
        found = _launches(DTYPES[name], width, columns)
    assert set(found) == {*KERNELS, "_merge", "_row_terms", "_sum_runs"}
    assert _faults(found, capability, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name, width, columns, capability", NIGHTLY)
def test_compiled_everywhere(name: str, width: int, columns: int, capability: int, tmp_path: Path) -> None:
    with as_if_on(capability):
        found = _launches(DTYPES[name], width, columns)
    assert _faults(found, capability, tmp_path, SPILLING.get((name, width, columns, capability))) == []


@pytest.mark.nightly
@pytest.mark.parametrize("width, capability", list(itertools.product((16, 32, 64), CAPABILITIES)))
def test_compiled_with_tf32(width: int, capability: int, tmp_path: Path) -> None:
    with mock.patch.object(launches, "allows_tf32", lambda: True), as_if_on(capability):
        found = _launches(torch.float32, width, 64)
    assert _faults(found, capability, tmp_path) == []


def test_bfloat16_is_multiplied_as_such(tmp_path: Path) -> None:
    """Each of two loops has three products for scores, one for values and weighted values;
    the key projection has three of tf32."""
    with as_if_on(90):
        figures = compiled(_launches(torch.bfloat16, 16, 64)["_projected_forward"], 90, tmp_path)
    operands = re.findall(r"tt\.dot .* : tensor<\d+x\d+x(\w+)> \*", figures.ttir)
    assert (operands.count("bf16"), operands.count("f32")) == (10, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_compiled_with_a_mask(dtype: torch.dtype, tmp_path: Path) -> None:
    """Triton's own assertion fails for a mask of bytes next to a float64 product,
    so the kernel must keep them apart."""
    with as_if_on(90):
        assert _faults(_launches(dtype, 16, 20, mask=True), 90, tmp_path) == []


def test_the_programs_of_a_run_are_neighbours() -> None:
    """The heads of all blocks are neighbours in the grid, and none has a run of its own:
    they find the rows in the cache."""
    with as_if_on(90):
        launch = _launches(torch.float32, 16, 64)["_projected_forward"]
    (runs, _), (_, blocks, heads, *_) = launch.options["cut"], launch.options["sizes"]
    assert launch.grid == (runs * blocks * heads,) and runs <= 64


@pytest.mark.parametrize("rows, blocks, wanted", [(1024, 1, ["_projected_forward"]), (5003, 2, ["_projected_forward", "_merge"])])
def test_launches(rows: int, blocks: int, wanted: list[str]) -> None:
    """K blocks over a run of rows take one launch, which also merges the incoming state; several runs take one more."""
    query, inputs = torch.empty(blocks, 2, 4, 8, 16), torch.empty(2, rows, 64)
    weight, out, lse = torch.empty(blocks, 128, 64), torch.empty(blocks, 2, 4, 8, 16), torch.empty(blocks, 2, 4, 8).double()
    given = ProjectedAttention(query, inputs, weight, weight[..., 0], None, None, out, lse, 0.25, 1e-5)
    found = record(lambda: kernels.projected_attention_forward(given))
    assert [launch.kernel.__name__ for launch in found] == wanted


# ---- each check refuses a planted fault


def test_spills_are_seen(tmp_path: Path) -> None:
    with mock.patch.object(launches, "_FORWARD", {"tf32x3": {64: Tiles(128, 64, 64, 4)}}), as_if_on(80):
        found = _launches(torch.float32, 16, 64)
    assert any("spilled" in fault for fault in _faults(found, 80, tmp_path))


def test_too_much_shared_memory_is_seen(tmp_path: Path) -> None:
    with mock.patch.object(launches, "_FORWARD", {"tf32x3": {64: Tiles(64, 32, 64, 8)}}), as_if_on(86):
        found = _launches(torch.float32, 64, 64)
    assert any("shared memory" in fault for fault in _faults(found, 86, tmp_path))
