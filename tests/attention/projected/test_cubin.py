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

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
KERNELS = ("_project", "_project_rows_back", "_matrix_gradient")
WITH_WIDE_KEYS = ("_forward", "_backward", "_backward_keys")
"""The kernels of attention, which take keys wider than values only for bfloat16; tests/attention/test_cubin.py tests
the others."""
CAPABILITIES = (80, 86, 89, 90, 100, 120)
ORDINARY = [
    ("fp32", 16, 64, 90),
    ("fp32", 16, 64, 80),
    ("bf16", 64, 64, 100),
    ("bf16", 16, 64, 90),
    ("fp64", 16, 64, 90),
]
EVERY = [
    *itertools.product(DTYPES, (16, 64), (20, 64, 512), CAPABILITIES),
    *itertools.product(("bf16",), (32, 128, 256), (64,), CAPABILITIES),
]
NIGHTLY = [case for case in EVERY if case not in ORDINARY]
SPILLING: dict[tuple[str, int, int, int], dict[str, float]] = {
    **{("bf16", 256, 64, capability): {"_forward": 0.015, "_backward": 0.05} for capability in CAPABILITIES},
    ("bf16", 256, 64, 120): {"_backward": 0.045},
    **{("fp64", width, 512, capability): {"_project": 0.012} for width in (16, 64) for capability in (86, 89)},
}
"""The kernels known to spill, and the largest share of their instructions that may access local memory, by case of
`EVERY`."""


def _launches(
    dtype: torch.dtype, width: int, columns: int, latents: int = 128, mask: bool = False
) -> dict[str, Launch]:
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
    """Return whether matrix units multiply: for float64 only on sm_80 and sm_90, as in Triton 3.6."""
    return launch.options["OPERAND"] != launches.triton_dtype(torch.float64) or capability in (80, 90)


def _faults(
    found: dict[str, Launch], capability: int, folder: Path, spilling: dict[str, float] | None = None
) -> list[str]:
    wide = found["_project"].options["FIRST_OPERAND"] != found["_project"].options["OPERAND"]
    names = [name for name in (*KERNELS, *(WITH_WIDE_KEYS if wide else ())) if name in found]
    return wrong((found[name] for name in names), capability, folder, _by_matrix_units, spilling)


@pytest.mark.parametrize("name, width, columns, capability", ORDINARY)
def test_compiled(name: str, width: int, columns: int, capability: int, tmp_path: Path) -> None:
    with as_if_on(capability):
        found = _launches(DTYPES[name], width, columns)
    assert set(found) >= {*KERNELS, "_forward", "_merge", "_row_terms", "_sum_runs", "_add_shares"}
    assert _faults(found, capability, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name, width, columns, capability", NIGHTLY)
def test_compiled_everywhere(name: str, width: int, columns: int, capability: int, tmp_path: Path) -> None:
    with as_if_on(capability):
        found = _launches(DTYPES[name], width, columns)
    assert _faults(found, capability, tmp_path, SPILLING.get((name, width, columns, capability))) == []


@pytest.mark.nightly
@pytest.mark.parametrize("width, capability", list(itertools.product((16, 64), CAPABILITIES)))
def test_compiled_with_tf32(width: int, capability: int, tmp_path: Path) -> None:
    with mock.patch.object(launches, "allows_tf32", lambda: True), as_if_on(capability):
        found = _launches(torch.float32, width, 64)
    assert _faults(found, capability, tmp_path) == []


def test_keys_are_not_rounded(tmp_path: Path) -> None:
    """For bfloat16 there are three products with keys: of tf32 parts for the projection, and of bfloat16 parts for
    scores.

    Values take one product. Both loops of attention have these products.
    """
    with as_if_on(90):
        found = _launches(torch.bfloat16, 16, 64)
    for name, wanted in (("_project", (1, 3)), ("_forward", (8, 0))):
        operands = re.findall(r"tt\.dot .* : tensor<\d+x\d+x(\w+)> \*", compiled(found[name], 90, tmp_path).ttir)
        assert (operands.count("bf16"), operands.count("f32")) == wanted, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_compiled_with_a_mask(dtype: torch.dtype, tmp_path: Path) -> None:
    """Triton's own assertion fails for a mask of bytes next to a float64 product,
    so the kernel must keep them apart."""
    with as_if_on(90):
        assert _faults(_launches(dtype, 16, 20, mask=True), 90, tmp_path) == []


@pytest.mark.parametrize("rows, wanted", [(1024, ["_project", "_forward"]), (5003, ["_project", "_forward", "_merge"])])
def test_launches(rows: int, wanted: list[str]) -> None:
    """K blocks over a run of rows take two launches; the second merges the incoming state. Several runs take one more
    launch."""
    query, inputs = torch.empty(2, 2, 4, 8, 16), torch.empty(2, rows, 64)
    weight, out, lse = torch.empty(2, 128, 64), torch.empty(2, 2, 4, 8, 16), torch.empty(2, 2, 4, 8).double()
    given = ProjectedAttention(query, inputs, weight, weight[..., 0], None, None, out, lse, 0.25, 1e-5)
    found = record(lambda: kernels.projected_attention_forward(given))
    assert [launch.kernel.__name__ for launch in found] == wanted


@pytest.mark.parametrize("rows, blocks, programs", [(50, 1, 4), (50, 6, 24), (10**5, 1, 1024)])
def test_few_rows_take_many_programs(rows: int, blocks: int, programs: int) -> None:
    """If there are too few blocks of rows to fill a GPU, each block has a program for every tile of the columns.

    The third case has enough blocks in its first chunk of 65,536 rows.
    """
    query, inputs, weight = torch.empty(blocks, 1, 4, 8, 16), torch.empty(1, rows, 64), torch.empty(blocks, 128, 64)
    given = ProjectedAttention(query, inputs, weight, weight[..., 0], scale=0.25, eps=1e-5)
    with as_if_on(90):
        found = record(lambda: kernels.projected_attention_forward(given))
    assert found[0].grid == (programs,)


# ---- each check reports a planted fault


def test_spills_are_seen(tmp_path: Path) -> None:
    with mock.patch.dict(launches._TABLES, {"rows": {"tf32x3": {256: Tiles(128, 128, 64, 4)}}}), as_if_on(80):
        found = _launches(torch.float32, 16, 64)
    assert any("spilled" in fault for fault in _faults(found, 80, tmp_path))


def test_too_much_shared_memory_is_seen(tmp_path: Path) -> None:
    with mock.patch.dict(launches._TABLES, {"forward": {"tf32x3": {256: Tiles(128, 128, 64, 8, 4)}}}), as_if_on(86):
        found = _launches(torch.float32, 64, 64)
    assert any("shared memory" in fault for fault in _faults(found, 86, tmp_path))
