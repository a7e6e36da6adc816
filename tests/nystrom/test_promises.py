"""Promises of Nyström attention alone: masks, logits of any size, the pseudo-inverse,
memory. test_suite.py has the rest."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import measure
from cmab_kernels.testing import bound, oracles

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


# ---- P1: nothing finite or masked gives a NaN


@pytest.mark.parametrize("start, stop", [(0, 64), (64, 128), (128, 200), (0, 200), (3, 197), (1, 200)])
def test_masked_blocks(impl: str, start: int, stop: int) -> None:
    """The first, middle or last block is masked, and holds NaN and infinity; these reach no result and no gradient."""
    q, k, v = torch.randn(2, 2, 200, 8), torch.randn(2, 2, 200, 8), torch.randn(2, 2, 200, 4)
    mask = torch.zeros(2, 200, dtype=torch.bool)
    mask[0, start:stop] = True
    k[0, :, start:stop:2], v[0, :, start:stop:2], q[0, :, start:stop:3] = math.nan, math.inf, math.nan
    inputs = tuple(t.requires_grad_() for t in (q, k, v))
    out = ck.nystrom_attention(*inputs, 9, key_padding_mask=mask, impl=impl)
    grads = torch.autograd.grad(out.sum(), inputs)
    assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
    assert all(g[0, :, start:stop].eq(0).all() for g in grads)


@pytest.mark.parametrize("pinv", ["iterative", "exact"])
def test_a_nan_stays_in_its_set(impl: str, pinv: str) -> None:
    """LAPACK, which computes the exact pseudo-inverse, would refuse the whole batch."""
    tokens = torch.randn(2, 1, 12, 4)
    right = ck.nystrom_attention(tokens, tokens, tokens, 3, pinv=pinv, impl=impl)
    tokens[1, 0, 3, 0] = math.nan
    tokens.requires_grad_()
    out = ck.nystrom_attention(tokens, tokens, tokens, 3, pinv=pinv, impl=impl)
    (slope,) = torch.autograd.grad(out[0].sum(), tokens)
    assert torch.allclose(out[0], right[0], atol=1e-5) and out[1].isnan().any() and slope[0].isfinite().all()


@pytest.mark.parametrize("size", [0.0, 88.8, 104.0, 1e4, 1e18])
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_of_any_size(impl: str, size: float, sign: int) -> None:
    """Results and gradients are finite for logits of either sign from 0 to more than 1e18."""
    q, k, v = torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 4)
    q, k = (t.sign() * size**0.5 for t in (q, sign * k))
    out = ck.nystrom_attention(q.requires_grad_(), k.requires_grad_(), v, 5, impl=impl)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k)))


# ---- P2: the error of every row is bounded


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("number", [1, 3, 16, 40, 64])
def test_accuracy_of_the_pseudo_inverse(impl: str, number: int, dtype: torch.dtype) -> None:
    matrix = (2 * torch.randn(20, number, number)).softmax(-1).to(dtype)
    wanted, theirs = oracles.iterative_pinv(matrix.double(), 6), oracles.iterative_pinv(matrix, 6)
    ours = ck.iterative_pinv(matrix, impl=impl)
    size = wanted.flatten(1).norm(dim=1)
    error, others = ((t.double() - wanted).flatten(1).norm(dim=1) / size for t in (ours, theirs))
    assert (error <= bound(dtype, 0.0, others)).all()


# ---- memory


def _attend(length: int, backward: bool) -> Callable[[], tuple[Tensor, ...]]:
    q, k, v = (torch.randn(1, 4, length, 16, requires_grad=backward) for _ in range(3))
    landmarks = (torch.randn(4, 8, 16), torch.randn(4, 8, 16))
    dout = torch.ones(1).expand_as(v)

    def task() -> tuple[Tensor, ...]:
        out = ck.nystrom_attention(q, k, v, landmarks=landmarks)
        return (out, *torch.autograd.grad(out, (q, k, v), dout)) if backward else (out,)

    return task


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("backward", [False, True])
def test_memory_does_not_grow_with_the_tokens(backward: bool) -> None:
    """A call stores nothing whose size grows with the number of tokens except the result, the requested gradients, and
    one log-sum-exp per row."""
    beyond = []
    for length in (50_000, 400_000):
        peak = measure.peak_memory(_attend, length, backward, warm_up=(1000, backward))
        beyond.append((peak.extra - peak.results - 4 * length * 8) / 2**20)
    assert beyond[1] < max(beyond[0], 0.0) + 1.0, beyond
