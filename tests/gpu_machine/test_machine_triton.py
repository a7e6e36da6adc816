"""Every Triton kernel of the package on the machine, through the operators:
bounds of P2, and equal bits in several orders."""

from __future__ import annotations

import importlib
import math
import pkgutil

import pytest
import torch
from torch import Tensor

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)

import cmab_kernels
import cmab_kernels as ck
from cmab_kernels.attention.state import subtract_state
from cmab_kernels.runtime.triton_launch import Kernel
from cmab_kernels.testing import OperatorSuite, oracles
from gpu_machine.launch import on_machine
from gpu_machine.orders import in_orders

from ..attention import test_suite as attention
from ..attention.prefix import test_suite as prefix
from ..attention.projected import test_suite as projected
from ..intention import test_suite as intention
from ..intention.solve import test_suite as solve
from ..layers import test_suite as layers
from ..nystrom import test_suite as nystrom
from ..nystrom.continual import test_suite as steps
from ..nystrom.continual.streams import stepped

pytestmark = pytest.mark.thorough

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
ONE_ROW = {"L": 1, "N": 1, "D": 1, "E": 1}
BLOCKS = {"B": 1, "H": 1, "L": 130, "N": 70}
RUNS = {"B": 1, "H": 1, "L": 1, "N": 1100, "D": 8, "E": 8}
FEW = {"B": 1, "H": 2}
LANDMARKS = {**FEW, "L": 20, "N": 21}
SLOW = [pytest.param("fp64", marks=pytest.mark.nightly)]
ATTENTION = {"_forward", "_row_terms", "_backward"}
PREFIXES = {"_windows", "_scan", "_send_back", "_prefix_keys", "_prefix_queries"}
MATRICES = {"_matrix_gradient", "_add_shares"}
PROJECTED = {"_project", "_forward", "_row_terms", "_project_rows_back", *MATRICES}
FEED_FORWARD = {"_feed_forward", "_feed_forward_back", *MATRICES}
ATTENTION_LAYER = {"_project", "_join", "_part", "_project_back", *MATRICES}
IN_PARTS = {"_forward", "_row_terms", "_backward_in_parts"}
INTENTION = {"_gram", "_gram_backward", "_apply"}
RIDGE_PREFIXES = {"_prefix_sums", "_send_sums_back", "_add_planes"}
PINV = {"_pinv", "_pinv_backward"}
NYSTROM = {"_landmark_values", "_landmark_values_backward", "_forward"}
EVERY = {
    "_solve",
    "_nystrom_step",
    "_attention_step",
    "_step_backward",
    *ATTENTION,
    *PROJECTED,
    "_backward_keys",
    "_backward_in_parts",
    "_subtract",
    "_sum_runs",
    "_merge",
    "_vet",
    *PREFIXES,
    *FEED_FORWARD,
    *ATTENTION_LAYER,
    *INTENTION,
    "_add_runs",
    *RIDGE_PREFIXES,
    "_scan_matrices",
    *PINV,
    *NYSTROM,
    "_multiply",
}
"""The Triton kernels of the package; a test below asserts that each has run."""


def accuracy(
    suite: type[OperatorSuite], name: str, extents: dict[str, int], orders: int = 2, law: str = "normal"
) -> set[str]:
    """Check results and gradients of an operator by promise P2; return the kernels that ran."""
    declared, dtype = suite(), DTYPES[name]
    torch.manual_seed(0)
    inputs = declared.inputs(dtype, law, extents)
    return in_orders(lambda: declared.check_accuracy("triton", dtype, law, inputs), on_machine, orders)


def test_every_kernel_is_named_here() -> None:
    found = (name for _, name, _ in pkgutil.walk_packages(cmab_kernels.__path__, "cmab_kernels."))
    names = [name for name in found if ".triton" in name]
    modules = [importlib.import_module(name) for name in names]
    assert {
        value.__name__ for module in modules for value in vars(module).values() if isinstance(value, Kernel)
    } == EVERY


# ---- latent cross-attention


@pytest.mark.parametrize("name", DTYPES)
def test_attention(name: str) -> None:
    """Partial tiles of one block of queries."""
    assert accuracy(attention.TestAttentionState, name, FEW) >= (IN_PARTS if name == "fp32" else ATTENTION)


@pytest.mark.parametrize("name", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly), *SLOW])
def test_attention_of_several_blocks(name: str) -> None:
    assert accuracy(attention.TestAttentionState, name, BLOCKS) >= {*ATTENTION, "_backward_keys"}


@pytest.mark.parametrize("width", [16, pytest.param(64, marks=pytest.mark.nightly)])
def test_float32_gradients_over_blocks_and_chunks(width: int) -> None:
    """Two blocks of queries, and several chunks of wide heads: a block or chunk adds to the stored results of
    others."""
    extents = {"B": 1, "H": 1, "L": 70, "N": 140 if width == 16 else 270, "D": width, "E": width}
    assert accuracy(attention.TestAttentionState, "fp32", extents) >= IN_PARTS


def test_attention_of_several_runs() -> None:
    assert accuracy(attention.TestAttentionState, "bf16", RUNS) >= {*ATTENTION, "_merge", "_sum_runs"}


def test_attention_of_packed_sets() -> None:
    assert accuracy(attention.TestPackedSets, "fp32", {"H": 1}) >= {*IN_PARTS, "_merge", "_vet"}


def test_attention_with_a_state() -> None:
    assert accuracy(attention.TestIncomingState, "fp32", FEW) >= IN_PARTS


def test_attention_of_one_row() -> None:
    assert accuracy(attention.TestAttentionState, "bf16", ONE_ROW) >= ATTENTION


@pytest.mark.parametrize("emptied", ["B", "N", "L", "LN"])
def test_attention_of_nothing(emptied: str) -> None:
    in_orders(lambda: attention.TestAttentionState().test_empty_extents("triton", emptied), on_machine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_removal(dtype: torch.dtype) -> None:
    """Rows of two programs: one row loses all of its mass, one had no mass, and one loses nothing."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, rows, 17, dtype=dtype) for rows in (18, 5, 5))
    state, part = ck.attention_state(query, key, value), ck.attention_state(query, key[:, :, :2], value[:, :, :2])
    state.lse[0, 0, 3], state.lse[0, 0, 4] = part.lse[0, 0, 3] - 1, -math.inf

    def check() -> None:
        removal = ck.remove_from_state(state, query, key[:, :, :2], value[:, :, :2], impl="triton")
        right = subtract_state(state, part)
        assert torch.equal(removal.reliable, right.reliable)
        for ours, wanted in zip(removal.state, right.state, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)

    assert in_orders(check, on_machine) == {"_forward", "_subtract"}


# ---- states of all prefixes


@pytest.mark.parametrize("name", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.nightly), *SLOW])
def test_prefixes(name: str) -> None:
    """Groups of four chunks of three keys; the last group is not full."""
    assert accuracy(prefix.TestPrefixStates, name, {**FEW, "B": 1, "N": 31}) >= {*PREFIXES, "_sum_runs"}


@pytest.mark.parametrize("suite", [attention.TestAttentionState, prefix.TestPrefixStates])
def test_large_scores_in_float16(suite: type[OperatorSuite]) -> None:
    """A score of 2.5e5 has weight 1 in the gradients too: matrix units truncate its sum in the same way as in the
    forward pass."""
    accuracy(suite, "fp16", {"B": 1, "H": 1, "L": 2, "N": 4, "D": 16, "E": 16}, orders=1, law="one outlier")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_with_one_key_has_its_value(dtype: torch.dtype) -> None:
    """A row with one key has the value of this key, for any rounding of the exponent of the weight. Otherwise the
    weight would be 1.02 at scores of 1e6, and a half type would round it again."""
    torch.manual_seed(0)
    query = torch.linspace(100, 1000, 16, dtype=dtype).view(1, 1, 16, 1)
    key, value = torch.tensor([1000.0, 1.0], dtype=dtype).view(1, 1, 2, 1), torch.randn(1, 1, 2, 8).to(dtype)

    def check() -> None:
        out = ck.attention_state(query, key, value, impl="triton").out
        torch.testing.assert_close(out, value[:, :, :1].float().expand_as(out), rtol=1e-6, atol=0)

    assert "_forward" in in_orders(check, on_machine)


@pytest.mark.parametrize("suite", [prefix.TestEveryKey, prefix.TestWholeTiles, prefix.TestIncomingState])
def test_other_prefixes(suite: type[OperatorSuite]) -> None:
    """Sixteen chunks of one key, longer chunks, and a state before them."""
    assert accuracy(suite, "fp32", {**FEW, "B": 1, "H": 1, "N": 70}) >= PREFIXES


def test_prefixes_of_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEYS", "PREFIXES"):
        monkeypatch.setattr(f"cmab_kernels.attention.prefix.triton.backward.{name}", 16)
    assert accuracy(prefix.TestEveryKey, "fp32", {"B": 1, "H": 1, "L": 3, "N": 40, "D": 8, "E": 8}) >= PREFIXES


# ---- attention over projected inputs


@pytest.mark.parametrize("name", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.nightly), *SLOW])
def test_projected_attention(name: str) -> None:
    """The cases are partial tiles of rows with several pieces, a single piece, and half types that are read
    unchanged."""
    assert accuracy(projected.TestProjectedAttention, name, {**FEW, "N": 37, "C": 36}) >= PROJECTED


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_projected_attention_of_wide_heads(name: str) -> None:
    extents = {"B": 1, "H": 1, "L": 3, "N": 20, "C": 12, "D": 80, "E": 66}
    assert accuracy(projected.TestProjectedAttention, name, extents, orders=1) >= PROJECTED


def test_projected_attention_of_several_blocks() -> None:
    assert accuracy(projected.TestStackedBlocks, "fp32", {"B": 1, "H": 1, "K": 2, "L": 34, "N": 20}) >= PROJECTED


@pytest.mark.nightly
def test_projected_attention_of_several_runs() -> None:
    extents = {"B": 1, "H": 1, "L": 1, "N": 1040, "M": 3, "C": 3, "D": 4, "E": 4}
    assert accuracy(projected.TestIncomingState, "fp32", extents, orders=1) >= {*PROJECTED, "_merge", "_sum_runs"}


def test_projected_attention_of_packed_sets() -> None:
    assert accuracy(projected.TestPackedSets, "fp32", {"H": 1}) >= {*PROJECTED, "_merge", "_vet"}


@pytest.mark.parametrize("suite", [projected.TestIncomingState, projected.TestPackedSets])
def test_projected_attention_of_several_chunks(suite: type[OperatorSuite], monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk continues the state and adds to the shares of earlier chunks."""
    chunks = importlib.import_module("cmab_kernels.attention.projected.triton.chunks")
    monkeypatch.setattr(chunks, "STEP", 16)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    extents = {"B": 1, "L": 1, "N": 37, "M": 3} if suite is projected.TestIncomingState else {"L": 1}
    assert accuracy(suite, "fp32", {"H": 1, **extents}) >= PROJECTED


def test_projected_attention_without_a_norm() -> None:
    assert accuracy(projected.TestPlainProjections, "fp32", {"B": 1, "H": 1, "N": 20}) >= PROJECTED


@pytest.mark.parametrize("emptied", ["B", "N", "L", "LN"])
def test_projected_attention_of_nothing(emptied: str) -> None:
    in_orders(lambda: projected.TestProjectedAttention().test_empty_extents("triton", emptied), on_machine)


# ---- layers


@pytest.mark.parametrize(
    "name", ["fp32", *[pytest.param(name, marks=pytest.mark.nightly) for name in ("bf16", "fp16", "fp64")]]
)
def test_feed_forward_layers(name: str) -> None:
    """Two blocks of rows, where the last is partial, and partial tiles of features."""
    assert accuracy(layers.TestGeglu, name, {"B": 1, "R": 40, "C": 12, "F": 35, "G": 70}, orders=1) == FEED_FORWARD


def test_a_norm_of_equal_numbers() -> None:
    """The mean of equal rows is the rows themselves: 1 / sqrt(eps)
    turns an error of one unit in the last place into 2e-5."""
    accuracy(layers.TestGeglu, "fp32", {"B": 1, "R": 3, "C": 17, "F": 3, "G": 6}, orders=1, law="all equal")


@pytest.mark.nightly
@pytest.mark.parametrize("suite", [layers.TestGelu, layers.TestRelu])
def test_other_activations(suite: type[OperatorSuite]) -> None:
    assert accuracy(suite, "fp32", {"B": 1, "R": 5, "C": 70, "F": 35}) == FEED_FORWARD


@pytest.mark.parametrize(
    "name", ["bf16", *[pytest.param(name, marks=pytest.mark.nightly) for name in ("fp32", "fp16", "fp64")]]
)
def test_attention_layers(name: str) -> None:
    """Cross-attention whose heads extend over several tiles of the matrices."""
    extents = {"B": 1, "L": 5, "N": 9, "K": 8 * layers.HEADS, "V": 4 * layers.HEADS}
    assert accuracy(layers.TestAttentionLayer, name, extents, orders=1) >= {*ATTENTION_LAYER, "_forward", "_row_terms"}


@pytest.mark.nightly
def test_self_attention_layers() -> None:
    assert accuracy(layers.TestSelfAttentionLayer, "fp32", {"B": 2, "L": 5}) >= {
        *ATTENTION_LAYER,
        "_forward",
        "_row_terms",
    }


# ---- Intention


@pytest.mark.parametrize("name", DTYPES)
def test_intention(name: str) -> None:
    assert accuracy(intention.TestIntention, name, {**FEW, "N": 40}) >= INTENTION


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp64"])
def test_ridge_state(name: str) -> None:
    """Weights of keys."""
    assert accuracy(intention.TestRidgeState, name, FEW) >= {"_gram", "_gram_backward"}


def test_ridge_state_of_several_runs() -> None:
    assert accuracy(intention.TestRidgeState, "fp32", {**RUNS, "N": 2100}) >= {"_gram", "_add_runs"}


@pytest.mark.parametrize("name", ["fp32", *SLOW])
def test_ridge_prefixes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of three keys, in several runs; and long chunks, whose sums are added up."""
    monkeypatch.setattr(importlib.import_module("cmab_kernels.intention.triton.scan"), "GRAIN", 3)
    extents = {"B": 1, "H": 2, "N": 31, "D": 9, "E": 8}
    assert accuracy(intention.TestPrefixStates, name, extents) >= {*RIDGE_PREFIXES, "_scan_matrices"}
    monkeypatch.setattr(intention.TestPrefixStates, "every", 16)
    assert accuracy(intention.TestPrefixStates, name, {**extents, "N": 70}) >= {
        "_scan_matrices",
        "_gram",
        "_gram_backward",
    }


@pytest.mark.parametrize("suite", [intention.TestWeightedDual, intention.TestSigma])
def test_other_forms_of_intention(suite: type[OperatorSuite]) -> None:
    accuracy(suite, "fp32", {**FEW, "N": 9})


@pytest.mark.parametrize(
    "suite",
    [
        intention.TestIntention,
        *(
            pytest.param(suite, marks=pytest.mark.nightly)
            for suite in (attention.TestAttentionState, projected.TestProjectedAttention)
        ),
    ],
)
def test_masks(suite: type[OperatorSuite]) -> None:
    """NaN and infinity are under the mask."""
    declared = suite()
    declared.extents = {**declared.extents, "H": 1}
    in_orders(lambda: declared.test_masks("triton", (3, 197)), on_machine)


# ---- Nyström attention


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_pinv(name: str) -> None:
    assert accuracy(nystrom.TestPinv, name, {"B": 2, "M": 5}) >= PINV


class OneIteration(nystrom.TestPinv):
    """The first step of the iteration, without gradients:
    a step with them takes the machine 20 seconds for many landmarks."""

    differentiable = ()

    def call(self, impl: str, matrix: Tensor) -> tuple[Tensor, ...]:
        return (ck.iterative_pinv(matrix, 1, impl=impl),)

    def oracle(self, matrix: Tensor) -> tuple[Tensor, ...]:
        return (oracles.iterative_pinv(matrix, 1),)


@pytest.mark.parametrize("name", ["fp32", *SLOW])
def test_more_landmarks_than_registers_hold(name: str) -> None:
    """Products of 65 x 65, in blocks; the last blocks are one row and one column."""
    assert accuracy(OneIteration, name, {"B": 1, "M": 65}) == {"_multiply"}


@pytest.mark.parametrize("name", ["fp32", *SLOW])
def test_nystrom_attention(name: str) -> None:
    assert accuracy(nystrom.TestGivenLandmarks, name, LANDMARKS) >= NYSTROM


# ---- solves and continual steps


@pytest.mark.parametrize("name", ["fp32", "fp64"])
@pytest.mark.parametrize(
    "width", [9, 33, *[pytest.param(width, marks=pytest.mark.nightly) for width in (16, 64, 70, 128)]]
)
def test_solve(width: int, name: str) -> None:
    assert accuracy(solve.TestRegularisedSolve, name, {"B": 1, "H": 1, "D": width}) == {"_solve"}


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", *SLOW])
@pytest.mark.parametrize(
    "suite, ran", [(steps.TestContinualAttention, "_attention_step"), (steps.TestFixedLandmarks, "_nystrom_step")]
)
def test_steps(suite: type[OperatorSuite], ran: str, name: str) -> None:
    assert accuracy(suite, name, {"B": 1, "H": 1}) == {ran, "_step_backward"}


@pytest.mark.parametrize("name", ["fp64", pytest.param("fp32", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind, output", [("fixed", "single"), ("continual", "retroactive"), ("exact", "single")])
def test_gradients_of_steps(kind: str, output: str, name: str) -> None:
    """Rows of sums and values of several tiles; rows that slide, and rows that are recomputed."""
    window, dtype, init = 23, DTYPES[name], ck.continual_nystrom_init
    inputs = [torch.randn(1, 1, window + 4, width) for width in (9, 9, 70)] + [torch.randn(1, 19, 9) for _ in range(2)]
    inputs = [t.to(dtype).requires_grad_() for t in inputs]

    def gradients(impl: str, given: list[Tensor]) -> tuple[Tensor, ...]:
        first, rest = zip(*(t.split([window, 4], 2) for t in given[:3]), strict=True)
        near = given[3], given[4]
        state = init(*first, landmarks=near) if kind == "fixed" else init(*first, num_landmarks=19)
        outs = stepped(
            ck.continual_attention_init(*first) if kind == "exact" else state, rest, 2, impl=impl, output=output
        )
        total = torch.stack([(out * out).sum() for _, out, _ in outs]).sum()
        return torch.autograd.grad(total, given[: 5 if kind == "fixed" else 3])

    wanted = gradients("reference", [t.detach().double().requires_grad_() for t in inputs])

    def check() -> None:
        for found, right in zip(gradients("triton", inputs), wanted, strict=True):
            assert (found - right).abs().max() <= 100 * torch.finfo(dtype).eps * right.abs().max()

    assert in_orders(check, on_machine) == {"_attention_step" if kind == "exact" else "_nystrom_step", "_step_backward"}


# ---- nightly: more shapes, in more orders


@pytest.mark.nightly
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 33, 64, 128])
@pytest.mark.parametrize("latents", [3, 130])
def test_attention_of_any_width(latents: int, width: int, name: str) -> None:
    """A row of the result has several numbers: a single number may vanish, and then the float32 definition also exceeds
    P2."""
    accuracy(
        attention.TestAttentionState,
        name,
        {"B": 1, "H": 1, "L": latents, "N": 77, "D": width, "E": max(width - 1, 5)},
        orders=4,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("width", [1, 33, 65, 128])
def test_intention_of_any_width(width: int, name: str) -> None:
    accuracy(intention.TestIntention, name, {"B": 1, "H": 1, "N": 2 * width + 40, "D": width, "E": 17}, orders=4)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fp32", "fp64"])
@pytest.mark.parametrize("landmarks", [1, 16, 17, 40])
def test_pinv_of_any_size(landmarks: int, name: str) -> None:
    accuracy(nystrom.TestPinv, name, {"B": 1, "M": landmarks}, orders=3)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_pinv_of_more_landmarks_than_registers_hold(name: str) -> None:
    """With gradients."""
    assert accuracy(nystrom.TestPinv, name, {"B": 1, "M": 65}) == {"_multiply"}
