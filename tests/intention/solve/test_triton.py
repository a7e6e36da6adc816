"""The Triton solve in Triton's interpreter. tests/test_interpreter.py runs this file with TRITON_INTERPRET=1.

The interpreter checks no bounds: inputs lie between margins of NaN, results between margins that must stay as they
were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.intention.solve import triton as kernels
from cmab_kernels.intention.solve.contract import RegularisedSolve
from cmab_kernels.intention.solve.reference import regularised_solve_reference
from cmab_kernels.intention.solve.triton import launch
from cmab_kernels.runtime.constants import ILL_CONDITIONED
from cmab_kernels.testing import between_margins, guarded_results, lapack_ratio

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"

DTYPES = [torch.float64, torch.float32]
USUAL = 1.0
"""The LAPACK ratio of a good solve; docs/numerics.md allows 5."""


@pytest.fixture(autouse=True)
def margins() -> Iterator[None]:
    """Put results between margins of memory, and check at the end of the test that no kernel wrote to the margins."""
    with guarded_results():
        yield


def _systems(
    matrices: int, order: int, columns: int, dtype: torch.dtype, condition: float = 1e3
) -> tuple[Tensor, Tensor]:
    basis = torch.linalg.qr(torch.randn(matrices, order, order).double()).Q
    spectrum = torch.logspace(0, -math.log10(condition), order, dtype=torch.float64)
    gram, rhs = (basis * spectrum @ basis.mT).to(dtype), torch.randn(matrices, order, columns).to(dtype)
    return between_margins(gram), between_margins(rhs)


def _regularised(gram: Tensor, alpha: Tensor) -> Tensor:
    lower = gram.double().tril()
    return lower + lower.tril(-1).mT + alpha.double()[:, None, None] * torch.eye(gram.shape[-1]).double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order, columns", [(1, 1), (3, 20), (16, 16), (17, 0), (33, 5), (40, 60)])
def test_shapes(dtype: torch.dtype, order: int, columns: int) -> None:
    """The last lines do not fill a tile, and right-hand sides fill a part of a tile, or several."""
    matrices = 2 if order < 64 else 1
    gram, rhs = _systems(matrices, order, columns, dtype)
    alpha = torch.tensor([1e-3, 0.0], dtype=dtype)[:matrices]
    weight, info = kernels.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    assert weight.shape == rhs.shape and weight.dtype == dtype and weight.is_contiguous()
    assert info.shape == (matrices,) and info.dtype == torch.int32 and not info.any()
    assert not columns or lapack_ratio(_regularised(gram, alpha), weight, rhs).max() <= USUAL


def test_no_systems() -> None:
    weight, info = kernels.regularised_solve(
        RegularisedSolve(torch.empty(0, 3, 3), torch.empty(0, 3, 2), torch.empty(0))
    )
    assert weight.shape == (0, 3, 2) and info.shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_is_small_for_any_condition(dtype: torch.dtype) -> None:
    for exponent in (6, 12) if dtype == torch.float64 else (3, 6):
        gram, rhs = _systems(1, 20, 3, dtype, 10.0**exponent)
        weight, info = kernels.regularised_solve(RegularisedSolve(gram, rhs, torch.zeros(1, dtype=dtype)))
        assert (info != 1).all() and lapack_ratio(gram.double(), weight, rhs).max() <= USUAL, exponent


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**100])
def test_the_condition_is_that_of_the_definition(dtype: torch.dtype, scale: float) -> None:
    """Other kernels estimate the condition number. This kernel has the `info` of the reference, except within a tenth
    of the limit."""
    limit = ILL_CONDITIONED / torch.finfo(dtype).eps
    seen = set()
    for share in (0.8, 1.25):
        gram, rhs = _systems(3, 5, 1, torch.float64, 10.0)
        # The smallest eigenvalue is such that the condition number in the 1-norm is this share of the limit.
        for one in gram:
            values, vectors = torch.linalg.eigh(one)
            for _ in range(20):
                values[0] *= torch.linalg.cond(vectors * values @ vectors.mT, 1) / (share * limit)
            one.copy_(vectors * values @ vectors.mT)
        given = (gram * scale).to(dtype), rhs.to(dtype), torch.zeros(3, dtype=dtype)
        condition = torch.linalg.cond(given[0].double(), 1) / limit
        _, info = kernels.regularised_solve(RegularisedSolve(*given))
        decided = (condition - 1).abs() > 0.1
        assert torch.equal(info[decided] == 0, (condition < 1)[decided]), share
        seen.update(info.tolist())
    assert {0, 2} <= seen


def test_only_the_lower_triangle_is_read_with_any_strides() -> None:
    """Bits do not depend on strides, on the batch, on other columns, or on the number of programs."""
    gram, rhs = _systems(2, 18, 40, torch.float64)
    alpha = torch.rand(2).double()
    weight, _ = kernels.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    upper = torch.ones(18, 18).triu(1).bool()
    strange = gram.masked_fill(upper, math.nan).mT.contiguous().mT, rhs.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert torch.equal(
        kernels.regularised_solve(RegularisedSolve(*strange, torch.stack([alpha, alpha], 1)[:, 0]))[0], weight
    )
    one = slice(1, 2)
    assert torch.equal(kernels.regularised_solve(RegularisedSolve(gram[one], rhs[one], alpha[one]))[0], weight[one])
    assert torch.equal(
        kernels.regularised_solve(RegularisedSolve(gram[one], rhs[one, :, 37:38], alpha[one]))[0], weight[one, :, 37:38]
    )
    with mock.patch.object(launch, "MOST_SCRATCH", 1):
        assert torch.equal(kernels.regularised_solve(RegularisedSolve(gram, rhs, alpha))[0], weight), (
            "one program for all systems"
        )
    spread = gram[one].expand(2, -1, -1), rhs[one, :, :1].expand(2, -1, 2), alpha[one].expand(2)
    assert torch.equal(kernels.regularised_solve(RegularisedSolve(*spread))[0], weight[one, :, :1].expand(2, -1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_matrices_are_told_and_leave_the_others_alone(dtype: torch.dtype) -> None:
    gram, rhs = _systems(8, 6, 2, dtype)
    alpha = torch.full((8,), 0.5, dtype=dtype)
    right, _ = kernels.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    gram[0] -= 2 * torch.eye(6)
    gram[1, 5, 5] = math.inf
    gram[2, 5, 4] = math.nan
    gram[4], alpha[4] = 0.0, 0.0
    alpha[5], alpha[6] = -1e-30, math.nan
    weight, info = kernels.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    assert info.tolist() == [1, 1, 1, 0, 1, 1, 1, 0]
    assert weight[info == 1].isnan().all() and torch.equal(weight[info == 0], right[info == 0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_right_hand_side_stays_in_its_column(bad: float) -> None:
    gram, rhs = _systems(1, 18, 4, torch.float64)
    right, _ = kernels.regularised_solve(RegularisedSolve(gram, rhs, torch.zeros(1).double()))
    rhs[0, 1, 2] = bad
    weight, info = kernels.regularised_solve(RegularisedSolve(gram, rhs, torch.zeros(1).double()))
    assert not info.any() and not weight[0, :, 2].isfinite().any()
    assert torch.equal(weight[..., [0, 1, 3]], right[..., [0, 1, 3]])


def test_an_infinity_over_a_number() -> None:
    weight, _ = kernels.regularised_solve(
        RegularisedSolve(torch.full((1, 1, 1), 4.0), torch.full((1, 1, 1), math.inf), torch.zeros(1))
    )
    assert (weight == math.inf).all()


def test_the_public_functions() -> None:
    """Systems, inverses, states and Intention are solved by these kernels, with their gradients."""
    q, k, v = torch.randn(1, 2, 5, 6).double(), torch.randn(1, 2, 40, 6).double(), torch.randn(1, 2, 40, 3).double()
    gram = (k.mT @ k)[0] / 40
    leaves = [t.clone().requires_grad_() for t in (q, k, v, gram, torch.rand(2).double())]
    results = {}
    for impl in ("triton", "reference"):
        ran: list[int] = []
        solve = kernels.regularised_solve
        with mock.patch.object(
            kernels, "regularised_solve", lambda *given, ran=ran, solve=solve: (ran.append(1), solve(*given))[1]
        ):
            found = [
                ck.intention(*leaves[:3], 0.5, form="primal", impl=impl),
                ck.regularised_solve(leaves[3], leaves[2][0, :, :6], leaves[4], impl=impl).weight,
                ck.regularised_inverse(leaves[3], leaves[4], impl=impl),
                ck.solve_ridge(ck.ridge_state(*leaves[1:3], impl=impl), 0.5, impl=impl).weight,
            ]
            grads = torch.autograd.grad(sum(out.square().sum() for out in found), leaves)
        assert len(ran) == (8 if impl == "triton" else 0), "four solves, and four for their gradients"
        results[impl] = (*(out.detach() for out in found), *grads)
    for ours, right in zip(results["triton"], results["reference"], strict=True):
        assert torch.allclose(ours, right, rtol=1e-10, atol=1e-12)


def test_agrees_with_the_definition_in_info() -> None:
    gram, rhs = _systems(4, 6, 2, torch.float32, 1e7)
    alpha = torch.tensor([0.0, 1e-5, 1e-3, 1.0])
    assert torch.equal(
        kernels.regularised_solve(RegularisedSolve(gram, rhs, alpha))[1],
        regularised_solve_reference(gram, rhs, alpha)[1],
    )


def test_what_is_refused() -> None:
    gram = torch.zeros(1, 2, 2)
    assert kernels.unsupported(gram, gram) is None
    assert "bfloat16" in str(kernels.unsupported(gram.bfloat16(), gram.bfloat16()))
    assert "256" in str(kernels.unsupported(torch.zeros(1, 257, 257), torch.zeros(1, 257, 1)))
    assert "meta" in str(kernels.unsupported(gram.to("meta"), gram.to("meta")))
