"""Promises of Intention alone: keys of any size, condition numbers, memory, and the `info` of a solve (P6).

test_suite.py has the rest.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import measure
from cmab_kernels.testing import lapack_ratio, oracles, row_error

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


# ---- P1: nothing finite or masked gives a NaN


@pytest.mark.parametrize("size", [1e-10, 1.0, 1e4, 1e15, 1e25])
def test_keys_of_any_size(impl: str, size: float) -> None:
    """Products of float32 keys beyond 1e19 overflow float32, but the sums do not: they are formed in float64."""
    q, k, v = torch.randn(1, 2, 5, 4), size * torch.randn(1, 2, 700, 4), torch.randn(1, 2, 700, 3)
    state = ck.ridge_state(k, v, impl=impl)
    assert state.gram.isfinite().all()
    if impl == "reference" and size > 1e19:
        return  # the definition overflows in float32 where the kernels do not
    out = ck.intention(size * q, k, v, size**2, impl=impl)
    wanted = oracles.intention(q.double(), k.double() / size, v.double(), 1.0)
    assert row_error(out, wanted).max() < 2e-4


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bad_key_stays_in_its_head(impl: str, poison: float) -> None:
    q, k, v = torch.randn(3, 4, 5, 6), torch.randn(3, 4, 30, 6), torch.randn(3, 4, 30, 2)
    clean = ck.intention(q, k, v, 0.1, impl=impl), ck.ridge_state(k, v, impl=impl).gram
    k[1, 2, 7, 3] = poison
    bad = torch.zeros(3, 4, dtype=torch.bool)
    bad[1, 2] = True
    out, gram = ck.intention(q, k, v, 0.1, impl=impl), ck.ridge_state(k, v, impl=impl).gram
    assert out[bad].isnan().all() and torch.equal(out[~bad], clean[0][~bad]) and torch.equal(gram[~bad], clean[1][~bad])
    assert ck.solve_ridge(ck.ridge_state(k, v, impl=impl), 0.1, impl=impl).info.ne(0).eq(bad).all()


# ---- P2: the error of every row is bounded


@pytest.mark.parametrize("exponent", [1, 3, 5, 7, 9, 11])
def test_float64_through_a_condition_of(impl: str, exponent: int) -> None:
    """The solution is backward stable:
    its error follows the condition number of the normal equations, and is no larger."""
    basis = torch.linalg.qr(torch.randn(2, 1, 50, 8, dtype=torch.float64))[0]
    key = basis * torch.logspace(0, -exponent / 2, 8, dtype=torch.float64)
    value = torch.randn(2, 1, 50, 3, dtype=torch.float64)
    weight, info = ck.solve_ridge(ck.ridge_state(key, value, impl=impl), 0.0, impl=impl)
    wanted = torch.linalg.lstsq(key, value).solution
    assert info.eq(0).all() and ((weight - wanted).norm() / wanted.norm()) < 1e-14 * 10**exponent


# ---- P5: any layout


def test_expanded_tensors(impl: str) -> None:
    """Inputs of stride 0, and the gradient of a sum, which has stride 0."""
    q, k, v, alpha = (torch.randn(s).double() for s in ((3, 5, 8), (1, 1, 70, 8), (2, 1, 70, 1), ()))
    inputs = tuple(t.requires_grad_() for t in (q, k, v, alpha.abs()))

    def run(function, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, **options: str) -> tuple[Tensor, ...]:
        out = function(q.expand(2, 3, 5, 8), k.expand(2, 3, 70, 8), v.expand(2, 3, 70, 4), alpha, **options)
        return out, *torch.autograd.grad(out.sum(), inputs)

    for a, b in zip(run(ck.intention, *inputs, impl=impl), run(oracles.intention, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    shared = ck.intention(
        inputs[0], inputs[1].expand(2, 3, 70, 8), inputs[2].expand(2, 3, 70, 4), alpha.abs(), impl=impl
    )
    torch.testing.assert_close(shared, run(oracles.intention, *inputs)[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "width, value_width", [(1, 1), (3, 5), (7, 1), (17, 31), (64, 8), (100, 3), (129, 40), (300, 5)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_widths(impl: str, dtype: torch.dtype, width: int, value_width: int) -> None:
    q, k, v = (torch.randn(1, 2, n, w, dtype=dtype) for n, w in ((3, width), (77, width), (77, value_width)))
    wide = tuple(t.double() for t in (q, k, v))
    out = ck.intention(q, k, v, 5.0, form="primal", impl=impl)
    assert row_error(out, oracles.intention(*wide, 5.0)).max() < (1e-12 if dtype == torch.float64 else 2e-5)


def _read_off(rows: int):
    """Fit a ridge regression to `rows` keys,
    and return its value at one point and the gradients with respect to alpha and the query."""
    k, v = torch.randn(1, 1, rows, 32), torch.randn(1, 1, rows, 32)
    q, alpha = torch.randn(1, 1, 1, 32, requires_grad=True), torch.ones((), requires_grad=True)
    return lambda: torch.autograd.grad(ck.intention(q, k, v, alpha, impl="native").sum(), (q, alpha))


def test_constant_memory() -> None:
    """Forward and backward over a million keys allocate nothing of size N but the requested gradients."""
    few, many = (measure.peak_memory(_read_off, rows, warm_up=(1000,)).extra / 2**20 for rows in (10_000, 1_000_000))
    assert many < few + 1.0, f"{few:.1f} MiB, {many:.1f} MiB"


# ---- P6: the quality of a solve


def _conditioned(systems: int, width: int, condition: float, dtype: torch.dtype) -> Tensor:
    basis = torch.linalg.qr(torch.randn(systems, width, width, dtype=torch.float64))[0]
    return ((basis * torch.logspace(0, -math.log10(condition), width, dtype=torch.float64)) @ basis.mT).to(dtype)


@pytest.mark.parametrize("width", [2, 16, 33, 64, 100])
@pytest.mark.parametrize("exponent", range(1, 13))
def test_lapack_ratio(impl: str, exponent: int, width: int) -> None:
    for alpha in (0.0, 1e-14, 1e-3):
        matrix, rhs = (
            _conditioned(5, width, 10.0**exponent, torch.float64),
            torch.randn(5, width, 3, dtype=torch.float64),
        )
        weight, info = ck.regularised_solve(matrix, rhs, alpha, impl=impl)
        assert info.eq(0).all()
        assert lapack_ratio(matrix + alpha * torch.eye(width, dtype=torch.float64), weight, rhs).max() < 5, (
            "LAPACK's limit is 30"
        )


@pytest.mark.parametrize("dtype, sound, doubtful", [(torch.float32, 1e3, 1e7), (torch.float64, 1e12, 1e15)])
@pytest.mark.parametrize("width", [3, 16, 64, 80])
def test_info_tells_failed_from_ill_conditioned(
    impl: str, width: int, dtype: torch.dtype, sound: float, doubtful: float
) -> None:
    good, worse = _conditioned(4, width, sound, dtype), _conditioned(4, width, doubtful, dtype)
    bad = good.clone()
    bad[:, width - 1, width - 1] = -1.0
    rhs = torch.randn(4, width, 2, dtype=dtype)
    mixed = torch.stack([good[0], bad[0], good[1], worse[0], bad[1].fill_(math.nan), good[2]])
    weight, info = ck.regularised_solve(mixed, rhs[[0, 0, 1, 0, 1, 2]], 0.0, impl=impl)
    assert info[[0, 2, 5]].eq(0).all() and info[[1, 4]].eq(1).all() and info[3].item() in (1, 2)
    assert weight[[1, 4]].isnan().all()
    for i, j in ((0, 0), (2, 1), (5, 2)):
        alone = ck.regularised_solve(good[j : j + 1], rhs[j : j + 1], 0.0, impl=impl).weight[0]
        assert torch.equal(weight[i], alone), "the neighbours' bits are theirs"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rank_deficient_and_duplicated_keys_are_reported(impl: str, dtype: torch.dtype) -> None:
    key, value = torch.randn(2, 3, 40, 6, dtype=dtype), torch.randn(2, 3, 40, 2, dtype=dtype)
    duplicated = torch.cat([key[..., :5], key[..., :1]], -1)
    few = key[:, :, :1].expand(2, 3, 40, 6)
    for rows in (duplicated, few, torch.zeros_like(key)):
        state = ck.ridge_state(rows, value, impl=impl)
        assert ck.solve_ridge(state, 0.0, impl=impl).info.ne(0).all()
        sound = ck.solve_ridge(state, 0.1, impl=impl)
        assert sound.info.eq(0).all() and sound.weight.isfinite().all()
    assert ck.solve_ridge(ck.ridge_state(key, value, impl=impl), 0.0, impl=impl).info.eq(0).all()


def test_half_precision_systems() -> None:
    matrix = _conditioned(3, 8, 10.0, torch.float32).bfloat16()
    weight, info = ck.regularised_solve(matrix, torch.ones(3, 8, 1, dtype=torch.bfloat16), 0.1)
    assert weight.dtype == torch.bfloat16 and info.eq(0).all()
