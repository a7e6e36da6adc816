"""Every Triton kernel of the package on the machine, through the operators: bounds of P2, and equal bits in several orders."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from cmab_kernels.testing import OperatorSuite

from ..attention import test_suite as attention
from ..intention import test_suite as intention
from ..nystrom import test_suite as nystrom
from .launch import on_machine
from .orders import in_orders

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
ONE_ROW = {"L": 1, "N": 1, "D": 1, "E": 1}
BLOCKS = {"B": 1, "H": 1, "L": 130, "N": 70}
RUNS = {"B": 1, "H": 1, "L": 3, "N": 1100}
FEW = {"B": 1, "H": 2}


def accuracy(suite: type[OperatorSuite], name: str, extents: dict[str, int], orders: int = 2) -> set[str]:
    """Check results and gradients of an operator by promise P2; return the kernels that ran."""
    declared, dtype = suite(), DTYPES[name]
    torch.manual_seed(0)
    inputs = declared.inputs(dtype, "normal", extents)
    return in_orders(lambda: declared.check_accuracy("triton", dtype, "normal", inputs), on_machine, orders)


# ---- ordinary: every kernel, every type that it takes


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("extents", [FEW, BLOCKS], ids=["ragged", "blocks"])
def test_attention(name: str, extents: dict[str, int]) -> None:
    """Ragged tiles of one block of queries, and several blocks."""
    ran = accuracy(attention.TestAttentionState, name, extents)
    assert ran >= {"_forward", "_row_terms", "_backward"} and ("_backward_keys" in ran) == (extents is BLOCKS)


def test_attention_of_several_runs() -> None:
    assert accuracy(attention.TestAttentionState, "fp32", RUNS) >= {"_forward", "_merge", "_backward", "_sum_runs"}


@pytest.mark.parametrize("suite", [attention.TestPackedSets, attention.TestIncomingState])
def test_attention_of_sets_and_states(suite: type[OperatorSuite]) -> None:
    assert "_merge" in accuracy(suite, "fp32", {"H": 1})


def test_attention_of_one_row() -> None:
    accuracy(attention.TestAttentionState, "bf16", ONE_ROW)


@pytest.mark.parametrize("emptied", ["B", "N", "L", "LN"])
def test_attention_of_nothing(emptied: str) -> None:
    in_orders(lambda: attention.TestAttentionState().test_empty_extents("triton", emptied), on_machine)


@pytest.mark.parametrize("name", DTYPES)
def test_intention(name: str) -> None:
    """Sums over keys, their gradients, and products of rows."""
    ran = accuracy(intention.TestIntention, name, {**FEW, "N": 40})
    assert ran >= {"_gram", "_gram_backward", "_apply"}


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp64"])
def test_ridge_state(name: str) -> None:
    assert "_gram" in accuracy(intention.TestRidgeState, name, FEW)


@pytest.mark.parametrize("suite", [intention.TestWeightedDual, intention.TestSigma])
def test_other_forms_of_intention(suite: type[OperatorSuite]) -> None:
    accuracy(suite, "fp32", {**FEW, "N": 9})


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_pinv(name: str) -> None:
    assert accuracy(nystrom.TestPinv, name, {"B": 2, "M": 5}) >= {"_pinv", "_pinv_backward"}


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_nystrom_attention(name: str) -> None:
    ran = accuracy(nystrom.TestGivenLandmarks, name, {**FEW, "L": 20, "N": 21})
    assert ran >= {"_landmark_values", "_landmark_values_backward", "_forward"}


@pytest.mark.parametrize("suite", [attention.TestAttentionState, intention.TestIntention])
def test_masks(suite: type[OperatorSuite]) -> None:
    """NaN and infinity lie under the mask."""
    declared = suite()
    declared.extents = {**declared.extents, "H": 1}
    in_orders(lambda: declared.test_masks("triton", (3, 197)), on_machine)
