"""The Triton kernels of layers compiled for GPUs that this machine need not have."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from cmab_kernels.attention.projected.triton import launch as launches
from cmab_kernels.attention.projected.triton.launch import Tiles
from cmab_kernels.layers import triton as kernels
from cmab_kernels.layers.contract import (
    AttentionLayer,
    AttentionLayerBackward,
    FeedForwardLayer,
    FeedForwardLayerBackward,
)
from cmab_kernels.layers.reference import RESIDUALS
from cmab_kernels.testing.cubin import Launch, as_if_on, record
from tests.machine_code import wrong

pytestmark = pytest.mark.thorough

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
FEED_FORWARD = ("_feed_forward", "_feed_forward_back", "_matrix_gradient", "_add_shares")
ATTENTION = ("_project", "_join", "_part", "_project_back", "_matrix_gradient", "_add_shares")
CAPABILITIES = (80, 86, 89, 90, 100, 120)
ORDINARY = [("fp32", 64, 90, "input"), ("fp32", 64, 90, "normed"), ("bf16", 128, 80, "normed")]
SPILLING = {
    **{("bf16", 64, capability): {"_matrix_gradient": 0.035} for capability in (86, 89)},
    **{("bf16", width, capability): {"_matrix_gradient": 0.025} for width in (128, 256) for capability in (86, 89)},
    ("fp64", 256, 90): {"_feed_forward_back": 0.02},
}
"""The feed-forward kernels known to spill, and the largest share of their instructions that may access local memory."""
NIGHTLY = [
    case for case in itertools.product(DTYPES, (20, 64, 128, 256), CAPABILITIES, RESIDUALS) if case not in ORDINARY
]


def _feed_forward(dtype: torch.dtype, width: int, residual: str = "input") -> dict[str, Launch]:
    """Record a forward and a backward pass."""
    shapes = ((width,), (width,), (4 * width, width), (4 * width,), (width, 2 * width), (width,))
    x, *parameters = (torch.empty(shape, dtype=dtype) for shape in ((2048, width), *shapes))

    def call() -> None:
        kernels.feed_forward_layer(FeedForwardLayer(x, *parameters, 1e-5, "geglu", residual))
        kernels.feed_forward_layer_backward(
            FeedForwardLayerBackward(x, x, *parameters, 1e-5, "geglu", residual, (True,) * 7)
        )

    return {launch.kernel.__name__: launch for launch in record(call)}


def _attention(dtype: torch.dtype, width: int, residual: str = "input") -> dict[str, Launch]:
    """Record a forward and a backward pass of cross-attention with a mask."""
    x, context = torch.empty(16, 128, width, dtype=dtype), torch.empty(16, 100, width, dtype=dtype)
    matrix, vector = torch.empty(width, width, dtype=dtype), torch.empty(width, dtype=dtype)
    tensors = x, context, torch.zeros(16, 100, dtype=torch.bool), *[vector] * 4, *(matrix, vector) * 4
    settings = 4, 0.5, 1e-5, 1e-5, residual

    def call() -> None:
        _, *kept = kernels.attention_layer(AttentionLayer(*tensors, *settings, True))
        kernels.attention_layer_backward(AttentionLayerBackward(x, *tensors, *kept, *settings, (True,) * 14))

    return {launch.kernel.__name__: launch for launch in record(call)}


def _by_matrix_units(launch: Launch, capability: int) -> bool:
    """Return whether matrix units multiply: for float64 only on sm_80 and sm_90, as in Triton 3.6."""
    operand = launch.options.get("OPERAND")
    return operand is not None and (operand != launches.triton_dtype(torch.float64) or capability in (80, 90))


def _faults(
    found: dict[str, Launch],
    names: tuple[str, ...],
    capability: int,
    folder: Path,
    spilling: dict[str, float] | None = None,
) -> list[str]:
    return wrong((found[name] for name in names), capability, folder, _by_matrix_units, spilling)


@pytest.mark.parametrize(
    "name, width, capability, residual",
    [*ORDINARY, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)],
)
def test_feed_forward(name: str, width: int, capability: int, residual: str, tmp_path: Path) -> None:
    with as_if_on(capability):
        found = _feed_forward(DTYPES[name], width, residual)
    assert set(found) == {*FEED_FORWARD}
    assert _faults(found, FEED_FORWARD, capability, tmp_path, SPILLING.get((name, width, capability))) == []


@pytest.mark.parametrize(
    "name, width, capability, residual",
    [*ORDINARY, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)],
)
def test_attention(name: str, width: int, capability: int, residual: str, tmp_path: Path) -> None:
    with as_if_on(capability):
        found = _attention(DTYPES[name], width, residual)
    assert set(found) >= {*ATTENTION, "_forward", "_row_terms"}
    assert _faults(found, ATTENTION, capability, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.parametrize("width, capability", list(itertools.product((64, 128, 256), CAPABILITIES)))
def test_with_tf32(width: int, capability: int, tmp_path: Path) -> None:
    with mock.patch.object(launches, "allows_tf32", lambda: True), as_if_on(capability):
        assert _faults(_feed_forward(torch.float32, width), FEED_FORWARD, capability, tmp_path) == []
        assert _faults(_attention(torch.float32, width), ATTENTION, capability, tmp_path) == []


def test_launches() -> None:
    """A feed-forward layer is one launch; an attention layer is three, and one more if a context has its own
    projections.

    The missing gradient of the log-sum-exps is not replaced by zeros: to fill them would be one more launch.
    """
    x, matrix = torch.empty(2, 9, 16), torch.empty(16, 16)
    parameters, settings = (*[None] * 4, *(matrix, None) * 4), (2, 0.5, 0.0, 0.0, "input")
    own, other = (
        record(
            lambda context=context: kernels.attention_layer(AttentionLayer(x, context, None, *parameters, *settings))
        )
        for context in (None, x)
    )
    assert [launch.kernel.__name__ for launch in own] == ["_project", "_forward", "_join"]
    assert [launch.kernel.__name__ for launch in other] == ["_project", "_project", "_forward", "_join"]
    kept = (*[x] * 3, torch.empty(2, 2, 9, 8), torch.empty(2, 2, 9, dtype=torch.float64))
    back = record(
        lambda: kernels.attention_layer_backward(
            AttentionLayerBackward(x, x, None, None, *parameters, *kept, *settings, (True,) * 14)
        )
    )
    passes = ["_part", "_row_terms", "_backward_in_parts", *["_matrix_gradient"] * 4, "_project_back", "_add_shares"]
    assert [launch.kernel.__name__ for launch in back] == passes and back[1].args[1] is None
    one = record(
        lambda: kernels.feed_forward_layer(
            FeedForwardLayer(x[0], None, None, matrix, None, matrix, None, 0.0, "relu", "input")
        )
    )
    assert [launch.kernel.__name__ for launch in one] == ["_feed_forward"]


def test_spills_are_seen(tmp_path: Path) -> None:
    """The tiles are too large."""
    with mock.patch.dict(launches._TABLES, {"back": {"tf32x3": {64: Tiles(64, 64, 64, 4)}}}), as_if_on(80):
        found = _feed_forward(torch.float32, 64)
    assert any("spilled" in fault for fault in _faults(found, ("_feed_forward_back",), 80, tmp_path))
