"""Promises P1 (finite), P2 (accurate), P3 (repeatable) and P5 (any layout) of Nyström attention and of the pseudo-inverse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import measure
from cmab_kernels.testing import LAWS, bound, oracles

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


# ---- P1: nothing finite or masked gives a NaN


@pytest.mark.parametrize("batch, heads, queries, keys", list(itertools.product((0, 2), (0, 3), (0, 4), (0, 5))))
def test_empty_extents(impl: str, batch: int, heads: int, queries: int, keys: int) -> None:
    q, k, v = (torch.randn(batch, heads, n, w, requires_grad=True) for n, w in ((queries, 6), (keys, 6), (keys, 3)))
    near, far = (torch.randn(heads, 4, 6, requires_grad=True) for _ in range(2))
    out = ck.nystrom_attention(q, k, v, landmarks=(near, far), impl=impl)
    grads = torch.autograd.grad(out.sum(), (q, k, v, near, far))
    assert out.shape == (batch, heads, queries, 3) and not any(g.isnan().any() for g in grads)
    if keys == 0:
        assert out.eq(0).all() and grads[0].eq(0).all()


@pytest.mark.parametrize("start, stop", [(0, 64), (64, 128), (128, 200), (0, 200), (3, 197), (1, 200)])
def test_masked_blocks(impl: str, start: int, stop: int) -> None:
    """All-masked block first, middle, last; NaN and infinity under the mask reach nobody else, and no gradient."""
    q, k, v = torch.randn(2, 2, 200, 8), torch.randn(2, 2, 200, 8), torch.randn(2, 2, 200, 4)
    mask = torch.zeros(2, 200, dtype=torch.bool)
    mask[0, start:stop] = True
    k[0, :, start:stop:2], v[0, :, start:stop:2], q[0, :, start:stop:3] = math.nan, math.inf, math.nan
    inputs = tuple(t.requires_grad_() for t in (q, k, v))
    out = ck.nystrom_attention(*inputs, 9, key_padding_mask=mask, impl=impl)
    grads = torch.autograd.grad(out.sum(), inputs)
    assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
    assert all(g[0, :, start:stop].eq(0).all() for g in grads)


@pytest.mark.parametrize("size", [0.0, 88.8, 104.0, 1e4, 1e18])
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_of_any_size(impl: str, size: float, sign: int) -> None:
    """Up to 1e36 in float32."""
    q, k, v = torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 4)
    q, k = (t.sign() * size**0.5 for t in (q, sign * k))
    out = ck.nystrom_attention(q.requires_grad_(), k.requires_grad_(), v, 5, impl=impl)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k)))


# ---- P2: the error of every row is bounded


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, length, number, width, value_width", [(2, 300, 16, 16, 16), (3, 97, 5, 8, 24), (1, 130, 33, 64, 64)])
def test_accuracy(impl: str, dtype: torch.dtype, law: str, heads: int, length: int, number: int, width: int, value_width: int) -> None:
    """Rows of a head share one pseudo-inverse, whose error all of them show: torch's own error is the largest of a head's rows.

    With given landmarks, since whoever takes a mean in half precision has other landmarks. In float64, where torch is the oracle, its own
    error is what it has in float32, scaled by eps. Where softmax saturates, or all is equal, its gradients are differences that vanish:
    the tests of latent attention bound those, and only gradients of the values are looked at.
    """
    q, k, v, near, far = (
        LAWS[law](2, heads, n, w).to(dtype).requires_grad_()
        for n, w in ((length, width), (length, width), (length, value_width), (number, width), (number, width))
    )
    inputs = (q, k, v, near, far)
    wide = tuple(t.detach().double().requires_grad_() for t in inputs)
    low = torch.float32 if dtype == torch.float64 else dtype
    same = tuple(t.detach().to(low).requires_grad_() for t in inputs)
    shrink = torch.finfo(dtype).eps / torch.finfo(low).eps
    expected, theirs = oracles.nystrom_attention(*wide[:3], wide[3:]), oracles.nystrom_attention(*same[:3], same[3:])
    ours = ck.nystrom_attention(q, k, v, landmarks=(near, far), impl=impl)
    dout = torch.randn(theirs.shape).to(dtype)
    results = (ours, *torch.autograd.grad(ours, inputs, dout))
    own = (theirs, *torch.autograd.grad(theirs, same, dout.to(low)))
    wanted = (expected, *torch.autograd.grad(expected, wide, dout.double()))
    score = float(max((wide[0] @ wide[4].mT).abs().max(), (wide[3] @ wide[1].mT).abs().max(), (wide[3] @ wide[4].mT).abs().max()))
    for name, mine, right, other in zip(("out", "dq", "dk", "dv", "dnear", "dfar"), results, wanted, own, strict=True):
        assert mine.dtype == dtype
        if law != "normal" and name in ("dq", "dk", "dnear", "dfar"):
            continue
        size = right.norm(dim=-1).clamp(min=1e-300).maximum(0.05 * right.norm(dim=-1).amax(-1, keepdim=True))
        error, others = ((t.double() - right).norm(dim=-1) / size for t in (mine, other))
        torchs = shrink * others.nan_to_num(1.0, 1.0).amax(-1, keepdim=True)
        allowed = bound(dtype, score * width**-0.5, torchs, 1.0 if name == "out" else 4.0)
        assert (error <= allowed).all(), (name, float((error / allowed).max()))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("number", [1, 3, 16, 40, 64])
def test_accuracy_of_the_pseudo_inverse(impl: str, number: int, dtype: torch.dtype) -> None:
    matrix = (2 * torch.randn(20, number, number)).softmax(-1).to(dtype)
    wanted, theirs = oracles.iterative_pinv(matrix.double(), 6), oracles.iterative_pinv(matrix, 6)
    ours = ck.iterative_pinv(matrix, impl=impl)
    size = wanted.flatten(1).norm(dim=1)
    error, others = ((t.double() - wanted).flatten(1).norm(dim=1) / size for t in (ours, theirs))
    assert (error <= bound(dtype, 0.0, others)).all()


# ---- P3: the same bits


def _bits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    inputs = tuple(t.detach().requires_grad_() for t in (q, k, v))
    out = ck.nystrom_attention(*inputs, 16, key_padding_mask=mask, impl="native")
    matrix = k[..., :16, :16].detach().softmax(-1).float().requires_grad_()
    inverse = ck.iterative_pinv(matrix, impl="native")
    return out, *torch.autograd.grad(out.sum(), inputs), inverse, *torch.autograd.grad(inverse.sum(), matrix)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_alone_and_for_any_thread_count(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(5, 2, 301, w, dtype=dtype) for w in (24, 24, 9))
    mask = torch.rand(5, 301) < 0.3
    threads = torch.get_num_threads()
    try:
        whole = _bits(q, k, v, mask)
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            assert all(torch.equal(a, b) for a, b in zip(_bits(q, k, v, mask), whole, strict=True)), f"{count} threads"
    finally:
        torch.set_num_threads(threads)
    for i in range(5):
        alone = _bits(*(t[i : i + 1] for t in (q, k, v, mask)))
        assert all(torch.equal(a, b[i : i + 1]) for a, b in zip(alone, whole, strict=True))


# ---- P5: any layout, and memory


LAYOUTS = {
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every other row": lambda t: torch.stack([t, torch.full_like(t, math.nan)], 3).flatten(2, 3)[:, :, ::2],
    "an offset of three elements": lambda t: torch.cat([torch.zeros(3, dtype=t.dtype), t.flatten()])[3:].view(t.shape),
    "columns first": lambda t: t.mT.contiguous().mT,
    "flipped": lambda t: t.flip(2).flip(2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(impl: str, layout: str) -> None:
    q, k, v = (torch.randn(2, 3, 50, w) for w in (8, 8, 5))
    change = LAYOUTS[layout]
    wanted = ck.nystrom_attention(q, k, v, 7, impl=impl)
    ours = ck.nystrom_attention(change(q), change(k), change(v), 7, impl=impl)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)
    landmarks = (oracles.segment_means(q, 7), oracles.segment_means(k, 7))
    given = ck.nystrom_attention(change(q), change(k), change(v), landmarks=tuple(change(t) for t in landmarks), impl=impl)
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-6)
    matrix = k[..., :8, :8].softmax(-1)
    torch.testing.assert_close(ck.iterative_pinv(change(matrix), impl=impl), ck.iterative_pinv(matrix, impl=impl), rtol=1e-5, atol=1e-6)


def test_expanded_inputs_and_gradients(impl: str) -> None:
    """Stride 0 in, and the gradient of a sum out."""
    q, k, v = (torch.randn(1, 1, 50, w, dtype=torch.float64, requires_grad=True) for w in (8, 8, 5))
    out = ck.nystrom_attention(*(t.expand(2, 3, 50, t.shape[-1]) for t in (q, k, v)), 7, impl=impl)
    wanted = 6 * oracles.nystrom_attention(q, k, v, (oracles.segment_means(q, 7), oracles.segment_means(k, 7))).sum()
    for ours, right in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(wanted, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-10)


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
    """Beyond the result, the gradients that are asked for, and the log-sum-exp of each row."""
    beyond = []
    for length in (50_000, 400_000):
        peak = measure.peak_memory(_attend, length, backward, warm_up=(1000, backward))
        beyond.append((peak.extra - peak.results - 4 * length * 8) / 2**20)
    assert beyond[1] < max(beyond[0], 0.0) + 1.0, beyond
