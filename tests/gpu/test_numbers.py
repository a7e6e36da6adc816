"""Sizes that are tested only on a GPU: rows beyond the range of 32 bits, long sums, keys whose squares overflow, bad
systems."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import lapack_ratio

from . import DEVICE, impls

pytestmark = pytest.mark.gpu
FAR = 2**30
"""Elements between rows: the third row is beyond the range of 32 bits."""


def _far(rows: Tensor) -> Tensor:
    """Return a copy of (1, 1, 3, 8) rows that are `FAR` elements apart."""
    storage = torch.empty(2 * FAR + 8, dtype=rows.dtype, device=DEVICE)
    return storage.as_strided(rows.shape, (0, 0, FAR, 1)).copy_(rows)


@pytest.mark.parametrize("impl", impls("attention"))
def test_keys_far_apart(impl: str) -> None:
    query, key, value = (torch.randn(1, 1, n, 8, device=DEVICE).half().requires_grad_() for n in (4, 3, 3))
    far = _far(key.detach()).requires_grad_()
    found = []
    for keys in (key, far):
        state = ck.attention_state(query, keys, value, impl=impl)
        found.append((*state, *torch.autograd.grad(state.out.sum(), (query, keys))))
    assert all(torch.equal(ours, right) for ours, right in zip(*found, strict=True))


@pytest.mark.parametrize("impl", impls("intention"))
def test_rows_far_apart(impl: str) -> None:
    key, value = (torch.randn(1, 1, 3, 8, device=DEVICE).half() for _ in range(2))
    found = [ck.intention(rows, rows, value, 1.0, form="primal", impl=impl) for rows in (key, _far(key))]
    assert torch.equal(*found)


@pytest.mark.parametrize("impl", impls("intention"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys, largest", [(300_000, 0.0), (1500, 3e19)])
def test_sums(impl: str, dtype: torch.dtype, keys: int, largest: float) -> None:
    """The errors of sums over many keys, and over a key whose square overflows float32, are 1e-13 of the sizes of their
    terms.

    The right sums add up 100 keys at a time, because a single product over all keys would itself have such an error.
    """
    key, value = (torch.randn(3, 2, keys, 16, device=DEVICE).to(dtype) for _ in range(2))
    if largest:
        key[1, 1, keys // 3] = largest
    state = ck.ridge_state(key, value, impl=impl)
    left, *rights = (rows.double().unflatten(2, (-1, 100)) for rows in (key, key, value))
    for ours, right in zip((state.gram, state.moment), rights, strict=True):
        terms = (left.abs().mT @ right.abs()).sum(2)
        assert ((ours - (left.mT @ right).sum(2)).abs() <= 1e-13 * terms).all()
    assert torch.equal(state.gram, state.gram.mT)


def _systems(dtype: torch.dtype, order: int, condition: float) -> tuple[Tensor, Tensor]:
    """Return 300 matrices of this condition number, and right-hand sides."""
    axes = torch.linalg.qr(torch.randn(300, order, order, device=DEVICE).double())[0]
    values = torch.logspace(0, -math.log10(condition), order, dtype=torch.float64, device=DEVICE)
    gram = (axes * values) @ axes.mT
    return ((gram + gram.mT) / 2).to(dtype), torch.randn(300, order, 5, device=DEVICE).to(dtype)


@pytest.mark.parametrize("impl", impls("intention.solve"))
@pytest.mark.parametrize("dtype, condition", [(torch.float64, 1e12), (torch.float32, 1e4)])
@pytest.mark.parametrize("order", [1, 16, 33, 64, 128])
def test_bad_systems(impl: str, dtype: torch.dtype, condition: float, order: int) -> None:
    """LAPACK's own measure of a solve is met; a matrix that is not positive definite is reported and changes no other
    matrix."""
    gram, rhs = _systems(dtype, order, condition)
    weight, info = ck.regularised_solve(gram, rhs, 0.0, impl=impl)
    assert not (info == 1).any() and (lapack_ratio(gram, weight, rhs) <= 30).all()
    gram[7] = -gram[7]
    again, info = ck.regularised_solve(gram, rhs, 0.0, impl=impl)
    others = torch.arange(300, device=DEVICE) != 7
    assert info[7] == 1 and again[7].isnan().all() and torch.equal(again[others], weight[others])


@pytest.mark.parametrize("impl", impls("nystrom"))
@pytest.mark.parametrize("landmarks", [17, 64])
def test_huge_logits(impl: str, landmarks: int) -> None:
    """Logits of 1e38 give finite results and gradients."""
    query, key, value = (torch.randn(2, 3, 300, 33, device=DEVICE) for _ in range(3))
    query = torch.zeros_like(query).index_fill_(-1, torch.tensor([0], device=DEVICE), 1e38)
    key = torch.linspace(-1, 1, 300, device=DEVICE)[:, None] * torch.ones_like(key)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out = ck.nystrom_attention(*leaves, landmarks=(query[:, :, :landmarks], key[:, :, :landmarks]), impl=impl)
    (grad,) = torch.autograd.grad(out.sum(), leaves[2:])
    assert out.isfinite().all() and grad.isfinite().all()
