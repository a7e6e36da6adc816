"""The Triton kernels of prefixes, compiled for GPUs that this machine need not have: these tests read the machine
code."""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)


from cmab_kernels.attention.prefix import triton as kernels
from cmab_kernels.attention.prefix.contract import PrefixAttention, PrefixAttentionBackward
from cmab_kernels.attention.triton import launch as launches
from cmab_kernels.testing.cubin import Launch, as_if_on, record
from tests.machine_code import by_matrix_units, wrong

pytestmark = pytest.mark.thorough

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
WITH_PRODUCTS = ("_windows", "_prefix_keys", "_prefix_queries")
ORDINARY = [("fp32", 16, 90), ("bf16", 64, 90), ("fp16", 16, 80)]
NIGHTLY = [
    case
    for case in itertools.product(DTYPES, (16, 32, 64, 128, 256), (80, 86, 89, 90, 100, 120))
    if case not in ORDINARY
]
SPILLING = {
    ("bf16", 16, 120): {"_prefix_keys": 0.01},
    **{("fp16", 32, capability): {"_prefix_queries": 0.015} for capability in (86, 89)},
    **{("fp16", 64, capability): {"_prefix_keys": 0.01} for capability in (86, 89, 90, 100)},
    **{("fp16", 128, capability): {"_prefix_queries": 0.01} for capability in (86, 89, 100)},
    ("fp16", 128, 90): {"_prefix_keys": 0.01},
    ("fp16", 256, 80): {"_prefix_keys": 0.015},
    ("fp32", 32, 80): {"_prefix_keys": 0.025},
    ("fp32", 32, 120): {"_prefix_keys": 0.01},
    **{("fp32", 64, capability): {"_prefix_keys": 0.01} for capability in (86, 89)},
    ("fp32", 64, 90): {"_prefix_keys": 0.07},
    ("fp32", 128, 100): {"_prefix_keys": 0.01},
    **{("fp32", 256, capability): {"_prefix_keys": 0.015} for capability in (86, 89)},
    **{("fp64", 16, capability): {"_send_back": 0.01} for capability in (86, 89)},
    **{("fp64", 32, capability): {"_send_back": 0.015} for capability in (86, 89)},
    **{("fp64", 32, capability): {"_send_back": 0.01} for capability in (90, 100, 120)},
    **{("fp64", 64, capability): {"_send_back": 0.015} for capability in (80, 90)},
    **{
        ("fp64", 64, capability): {"_windows": 0.05, "_send_back": 0.02, "_prefix_queries": 0.19}
        for capability in (86, 89)
    },
    ("fp64", 64, 100): {"_windows": 0.06, "_send_back": 0.01, "_prefix_queries": 0.2},
    ("fp64", 64, 120): {"_windows": 0.025, "_send_back": 0.01, "_prefix_queries": 0.16},
    ("fp64", 128, 80): {"_windows": 0.04},
    **{("fp64", 128, capability): {"_windows": 0.35, "_prefix_queries": 0.3} for capability in (86, 89)},
    ("fp64", 128, 90): {"_windows": 0.12},
    ("fp64", 128, 100): {"_windows": 0.4, "_prefix_queries": 0.25},
    ("fp64", 128, 120): {"_windows": 0.09, "_prefix_queries": 0.25},
    ("fp64", 256, 80): {"_windows": 0.13, "_prefix_queries": 0.17},
    **{("fp64", 256, capability): {"_windows": 0.15, "_prefix_queries": 0.3} for capability in (86, 89)},
    ("fp64", 256, 90): {"_windows": 0.22, "_prefix_queries": 0.16},
    ("fp64", 256, 100): {"_windows": 0.35, "_prefix_queries": 0.3},
    ("fp64", 256, 120): {"_windows": 0.12, "_prefix_queries": 0.25},
}
"""Kernels known to spill, and the largest share of their instructions that may access local memory.

Shares up to 1.5 % are a few values that ptxas spills to fit one more block. In float64 with 64 columns or more, tiles
that are hidden from Triton (`as_operand`) stay in registers. Without this, `_prefix_keys` would be wrong.
"""

SPILLING_FADED = {
    ("fp32", 16, 90): {"_prefix_keys": 0.02, "_send_back": 0.01},
    ("bf16", 64, 90): {"_send_back": 0.01},
}
"""The same with a bias of each key and decay."""


def _launches(
    dtype: torch.dtype, width: int, every: int, latents: int = 16, mask: bool = False, faded: bool = False
) -> list[Launch]:
    """Record the launches of a forward and a backward pass over several runs, with an incoming state, and if `faded`
    with a bias of each key and decay."""
    q, k, v = (torch.empty(2, 4, n, width, dtype=dtype, device="meta") for n in (latents, 3000, 3000))
    sums = torch.promote_types(dtype, torch.float32)
    state = tuple(
        torch.empty(2, 4, latents, *last, dtype=kind, device="meta")
        for last, kind in (((width,), sums), ((), torch.float64))
    )
    ignore = torch.zeros(2, 3000, dtype=torch.bool, device="meta") if mask else None
    bias, decay = None, None
    if faded:
        bias = torch.empty(2, 4, 3000, dtype=sums, device="meta")
        decay = torch.empty(2, 4, -(-3000 // every), dtype=torch.float64, device="meta")

    def call() -> tuple[Tensor, ...]:
        out, lse = kernels.prefix_forward(PrefixAttention(q, k, v, ignore, *state, bias, decay, every, 1.0))
        return kernels.prefix_backward(
            PrefixAttentionBackward(
                out,
                lse,
                q,
                k,
                v,
                ignore,
                *state,
                out,
                lse,
                bias,
                decay,
                every,
                1.0,
                (True,) * 7,
            )
        )

    return record(call)


def _check(name: str, width: int, capability: int, folder: Path, faded: bool = False) -> None:
    """Check the launches for a state after every key, after every few keys, and after every hundred."""
    with as_if_on(capability):
        found = [launch for every in (1, 5, 100) for launch in _launches(DTYPES[name], width, every, faded=faded)]
    names = {launch.kernel.__name__ for launch in found}
    assert names == {"_windows", "_scan", "_send_back", "_prefix_keys", "_prefix_queries", "_sum_runs"}
    once = {
        str((launch.kernel.__name__, launch.options.get("GROUP"), [t is None for t in launch.args])): launch
        for launch in found
    }
    compiled = [launch for launch in once.values() if launch.kernel.__name__ != "_sum_runs"]
    assert (
        wrong(
            compiled,
            capability,
            folder,
            partial(by_matrix_units, WITH_PRODUCTS),
            (SPILLING_FADED if faded else SPILLING).get((name, width, capability)),
        )
        == []
    )


@pytest.mark.parametrize("name, width, capability", ORDINARY)
def test_compiled(name: str, width: int, capability: int, tmp_path: Path) -> None:
    _check(name, width, capability, tmp_path)


@pytest.mark.parametrize("name, width, capability", ORDINARY)
def test_compiled_with_a_bias_and_decay(name: str, width: int, capability: int, tmp_path: Path) -> None:
    _check(name, width, capability, tmp_path, faded=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name, width, capability", NIGHTLY)
def test_compiled_everywhere(name: str, width: int, capability: int, tmp_path: Path) -> None:
    _check(name, width, capability, tmp_path)


@pytest.mark.parametrize("capability", [80, 86])
def test_gradients_with_tf32_fit(capability: int, tmp_path: Path) -> None:
    """In tf32, float32 heads of 256 columns fill most of shared memory."""
    with mock.patch.object(launches, "allows_tf32", lambda: True), as_if_on(capability):
        found = [
            launch
            for launch in _launches(torch.float32, 256, 100)
            if launch.kernel.__name__ in ("_prefix_keys", "_prefix_queries")
        ]
    assert wrong(found, capability, tmp_path, partial(by_matrix_units, WITH_PRODUCTS)) == []


@pytest.mark.parametrize("dtype, spilling", [(torch.bfloat16, None), (torch.float64, {"_prefix_queries": 0.01})])
def test_compiled_with_a_mask(dtype: torch.dtype, spilling: dict[str, float] | None, tmp_path: Path) -> None:
    """Triton's own assertion fails for a mask of bytes next to a float64 product,
    so the kernels must keep them apart."""
    with as_if_on(90):
        found = _launches(dtype, 16, 1, mask=True)
    compiled = [launch for launch in found if launch.kernel.__name__ in WITH_PRODUCTS]
    assert wrong(compiled, 90, tmp_path, partial(by_matrix_units, WITH_PRODUCTS), spilling) == []
