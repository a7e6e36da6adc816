"""Kernel features: their products are the kernel, duplicates and padding do not count,
and gradients exist at equal eigenvalues."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cmab_kernels.intention import variants
from cmab_kernels.intention.variants.inverse_root import inverse_root


def _kernel(rows: Tensor, columns: Tensor, gamma: float) -> Tensor:
    return torch.exp(-gamma * (rows.unsqueeze(-2) - columns.unsqueeze(-3)).square().sum(-1))


@pytest.mark.parametrize("gamma", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_products_are_the_kernel(gamma: float, shift: float) -> None:
    query, key = (torch.randn(2, 3, n, 4, dtype=torch.float64) + shift for n in (7, 20))
    phi, own = variants.kernel_features(query, key, gamma), variants.kernel_features(key, key, gamma)
    torch.testing.assert_close(phi @ own.mT, _kernel(query, key, gamma), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(own, own.mT, rtol=1e-7, atol=1e-7)


def test_a_point_given_twice_adds_nothing() -> None:
    query, key = torch.randn(1, 2, 7, 3, dtype=torch.float64), torch.randn(1, 2, 12, 3, dtype=torch.float64)
    twice = torch.cat([key, key[:, :, :5]], 2)
    once, more = variants.kernel_features(query, key, 1.0), variants.kernel_features(query, twice, 1.0)
    torch.testing.assert_close(more @ more.mT, once @ once.mT, rtol=1e-9, atol=1e-9)


def test_padding_counts_for_nothing() -> None:
    query, key = torch.randn(2, 2, 7, 3), torch.randn(2, 2, 12, 3)
    mask = torch.arange(12).expand(2, -1) >= 9
    key[:, :, 9:] = math.nan
    padded = variants.kernel_features(query, key, 1.0, key_padding_mask=mask)
    assert padded[..., 9:].eq(0).all()
    torch.testing.assert_close(padded[..., :9], variants.kernel_features(query, key[:, :, :9], 1.0))
    assert variants.kernel_features(query, key, 1.0, key_padding_mask=torch.ones_like(mask)).eq(0).all()
    few = variants.nystrom_features(query, key, 12, 1.0, key_padding_mask=mask)
    torch.testing.assert_close(few @ few.mT, padded @ padded.mT)
    assert few[..., 9:].eq(0).all()


@pytest.mark.parametrize("shift", [0.0, 1e6, 1e8])
def test_padding_takes_no_digits_of_points_far_from_the_origin(shift: float) -> None:
    query, key = (torch.randn(2, 2, n, 2, dtype=torch.float64) + shift for n in (5, 10))
    mask = torch.arange(10).expand(2, -1) % 2 == 0
    wanted = _kernel(query, key, 0.5)[..., ~mask[0]]
    for features in (variants.kernel_features, lambda q, k, g, **o: variants.nystrom_features(q, k, 8, g, **o)):
        ours, own = features(query, key, 0.5, key_padding_mask=mask), features(key, key, 0.5, key_padding_mask=mask)
        torch.testing.assert_close((ours @ own.mT)[..., ~mask[0]], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("far", [1e7, 1e9])
def test_a_point_far_from_all_others_takes_none_of_their_digits(far: float) -> None:
    query, key = (torch.randn(2, 2, n, 2, dtype=torch.float64) for n in (5, 10))
    near = torch.arange(10) != 3
    wanted = variants.kernel_features(query, key[:, :, near], 0.5)
    slope = torch.autograd.functional.jvp(
        lambda q: variants.kernel_features(q, key[:, :, near], 0.5).square().sum(-1), query, query
    )[1]
    key[:, :, 3] = far
    phi, own = variants.kernel_features(query, key, 0.5), variants.kernel_features(key, key, 0.5)
    torch.testing.assert_close(phi @ own.mT, _kernel(query, key, 0.5), rtol=0, atol=1e-12)
    torch.testing.assert_close(phi @ phi.mT, wanted @ wanted.mT, rtol=0, atol=1e-12)
    ours = torch.autograd.functional.jvp(
        lambda q: variants.kernel_features(q, key, 0.5).square().sum(-1), query, query
    )[1]
    torch.testing.assert_close(ours, slope, rtol=1e-9, atol=1e-9)


def test_landmarks_reach_from_the_first_to_the_last() -> None:
    key = torch.arange(10.0, dtype=torch.float64)[None, None, :, None]
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, [0, 4, 9]] = True
    for count, wanted in ((1, [1]), (2, [1, 8]), (3, [1, 5, 8]), (7, [1, 2, 3, 5, 6, 7, 8])):
        ours = variants.nystrom_features(key, key, count, 0.5, key_padding_mask=mask)
        assert torch.equal(ours, variants.kernel_features(key, key[:, :, wanted], 0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    query, key = torch.randn(1, 2, 7, 3, dtype=dtype), torch.randn(1, 2, 12, 3, dtype=dtype)
    ours = variants.kernel_features(query, key, 0.5)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, variants.kernel_features(query.double(), key.double(), 0.5).to(dtype))


@pytest.mark.parametrize("batch, heads, rows, keys", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_empty_extents(batch: int, heads: int, rows: int, keys: int) -> None:
    query, key = torch.randn(batch, heads, rows, 3), torch.randn(batch, heads, keys, 3)
    assert variants.kernel_features(query, key, 0.5).shape == (batch, heads, rows, keys)


def test_gradient() -> None:
    query, key = (torch.randn(1, 2, n, 2, dtype=torch.float64).requires_grad_() for n in (3, 5))
    gamma = torch.tensor([[0.4, 1.5]], dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(variants.kernel_features, (query, key, gamma))
    assert torch.autograd.gradgradcheck(variants.kernel_features, (query, key, gamma))
    assert torch.autograd.gradcheck(lambda q, k, g: variants.nystrom_features(q, k, 3, g), (query, key, gamma))
    assert torch.autograd.gradcheck(lambda k, g: variants.kernel_features(k, k, g), (key, gamma))


def test_gradient_of_the_root_at_equal_and_vanishing_eigenvalues() -> None:
    basis = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    matrix = (basis * torch.tensor([2.0, 2.0, 2.0, 0.5, 0.5], dtype=torch.float64)) @ basis.mT
    for given in (matrix, torch.eye(4, dtype=torch.float64)):
        assert torch.autograd.gradcheck(lambda a: inverse_root((a + a.mT) / 2), given.requires_grad_())

    def of_rank_two(rows: Tensor) -> Tensor:
        return inverse_root(rows @ rows.mT)

    assert torch.autograd.gradcheck(of_rank_two, torch.randn(4, 2, dtype=torch.float64).requires_grad_())


def test_gradient_with_padding_and_where_no_key_is_present() -> None:
    query, key = (torch.randn(2, 2, n, 2, dtype=torch.float64).requires_grad_() for n in (3, 5))
    gamma = torch.tensor([[0.4, 1.5]], dtype=torch.float64).requires_grad_()
    mask = torch.tensor([[False, True, False, True, True], [True] * 5])

    def run(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        padded = variants.kernel_features(q, k, g, key_padding_mask=mask)
        return padded, variants.nystrom_features(q, k, 3, g, key_padding_mask=mask)

    assert torch.autograd.gradcheck(run, (query, key, gamma))
    grads = torch.autograd.grad(sum(t[1].square().sum() for t in run(query, key, gamma)), (query, key, gamma))
    assert all(g.eq(0).all() for g in grads)


def test_gradients_of_one_and_of_several_derivatives_agree() -> None:
    """The gradient equals the one from which further derivatives are taken,
    also for equal points, `vmap`, a compiler, and a compiled transform."""
    query, key = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64), torch.randn(1, 2, 6, 3, dtype=torch.float64)
    query[:, :, :, :2] = key[:, :, :2]
    query.requires_grad_()

    def run(rows: Tensor) -> Tensor:
        return variants.kernel_features(rows, key, 0.7).sin().sum()

    (wanted,) = torch.autograd.grad(sum(run(rows) for rows in query), query, create_graph=True)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for total in (
        sum(run(rows) for rows in query),
        torch.vmap(run)(query).sum(),
        sum(compiled(rows) for rows in query),
    ):
        torch.testing.assert_close(torch.autograd.grad(total, query)[0], wanted, rtol=1e-11, atol=1e-12)
    mapped = torch.vmap(torch.func.grad(run))
    for gradients in (mapped, torch.compile(mapped, backend="aot_eager")):
        torch.testing.assert_close(gradients(query.detach()), wanted, rtol=1e-11, atol=1e-12)


def test_points_that_coincide_have_a_gradient() -> None:
    key = torch.randn(1, 1, 6, 2, dtype=torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad(variants.kernel_features(key, torch.cat([key, key], 2), 1.0).square().sum(), key)
    assert grad.isfinite().all()


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_set(strange: float) -> None:
    """LAPACK would refuse the whole batch."""
    query, key = torch.randn(3, 2, 4, 3), torch.randn(3, 2, 12, 3)
    for features in (variants.kernel_features, lambda q, k, gamma: variants.nystrom_features(q, k, 6, gamma)):
        right = features(query, key, 0.5)
        found = features(query, torch.cat([key[:1], key[1:].index_fill(2, torch.tensor([0]), strange)]), 0.5)
        assert torch.equal(found[0], right[0]) and found[1:].isnan().all()


def test_a_set_alone_has_the_bits_of_a_batch() -> None:
    """The matrix of 33 points on a line is nearly singular: what is rounded differently shows."""
    query, key = torch.randn(5, 2, 3, 1, dtype=torch.float64), torch.randn(5, 2, 33, 1, dtype=torch.float64)
    key.requires_grad_()
    whole = variants.kernel_features(query, key, 0.3)
    (slope,) = torch.autograd.grad(whole.sin().sum(), key)
    for one in range(5):
        own = key[one : one + 1].detach().clone().requires_grad_()
        alone = variants.kernel_features(query[one : one + 1].clone(), own, 0.3)
        assert torch.equal(alone[0], whole[one])
        assert torch.equal(torch.autograd.grad(alone.sin().sum(), own)[0][0], slope[one])
