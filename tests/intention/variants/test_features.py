"""Kernel features: their products are the kernel, duplicates and padding do not count, and gradients exist at equal eigenvalues."""

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


def test_points_that_coincide_have_a_gradient() -> None:
    key = torch.randn(1, 1, 6, 2, dtype=torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad(variants.kernel_features(key, torch.cat([key, key], 2), 1.0).square().sum(), key)
    assert grad.isfinite().all()
