"""Promises P1 (finite), P2 (accurate), P3 (repeatable) and P5 (any layout), for every implementation that runs on this processor."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import LAWS, bound, oracles, row_error

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _gradients(state: ck.AttentionState, inputs: tuple[Tensor, ...], weights: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(tuple(state), inputs, weights)


# ---- P1: nothing finite or masked gives a NaN


@pytest.mark.parametrize("batch, heads, latents, keys", list(itertools.product((0, 2), (0, 3), (0, 4), (0, 5))))
def test_empty_extents(impl: str, batch: int, heads: int, latents: int, keys: int) -> None:
    q = torch.randn(batch, heads, latents, 6, requires_grad=True)
    k = torch.randn(batch, heads, keys, 6, requires_grad=True)
    v = torch.randn(batch, heads, keys, 3, requires_grad=True)
    state = ck.attention_state(q, k, v, impl=impl)
    assert state.out.shape == (batch, heads, latents, 3) and state.lse.shape == (batch, heads, latents)
    grads = torch.autograd.grad(state.out.sum() + state.lse.masked_fill(state.lse.isinf(), 0.0).sum(), (q, k, v))
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v)] and not any(g.isnan().any() for g in grads)
    if keys == 0:
        assert state.out.eq(0).all() and state.lse.eq(-math.inf).all() and grads[0].eq(0).all()


@pytest.mark.parametrize("start, stop", [(0, 64), (64, 128), (128, 200), (0, 200), (3, 197), (0, 199), (1, 200)])
def test_masked_blocks(impl: str, start: int, stop: int) -> None:
    """All-masked block first, middle, last; NaN and infinity under the mask; gradients of ignored keys are 0."""
    q, k, v = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 200, 8), torch.randn(2, 2, 200, 4)
    mask = torch.zeros(2, 200, dtype=torch.bool)
    mask[0, start:stop] = True
    k[0, :, start:stop:2], v[0, :, start:stop:2] = math.nan, math.inf
    inputs = tuple(t.requires_grad_() for t in (q, k, v))
    state = ck.attention_state(*inputs, key_padding_mask=mask, impl=impl)
    expected, lse = oracles.attention(q, k, v, mask)
    assert row_error(state.out, expected).max() < 4e-6 and (state.lse - lse).nan_to_num().abs().max() < 1e-5
    assert torch.equal(state.lse == -math.inf, lse == -math.inf)
    grads = _gradients(state, inputs, (torch.randn_like(state.out), torch.randn_like(state.lse)))
    assert not any(g.isnan().any() for g in grads)
    assert grads[1][0, :, start:stop].eq(0).all() and grads[2][0, :, start:stop].eq(0).all()


@pytest.mark.parametrize("logit", [0.0, 88.8, -88.8, 104.0, -104.0, 1e4, -1e4, 1e38, -1e38, -math.inf])
@pytest.mark.parametrize("among", [False, True])
def test_extreme_logits(impl: str, logit: float, among: bool) -> None:
    """Every key at the logit, or one among keys at 0."""
    k = torch.zeros(1, 1, 70, 1) if among else torch.full((1, 1, 70, 1), logit)
    k[:, :, 33] = logit
    q, v = torch.ones(1, 1, 2, 1), torch.randn(1, 1, 70, 3)
    inputs = tuple(t.requires_grad_() for t in (q, k, v))
    state = ck.attention_state(*inputs, scale=1.0, impl=impl)
    expected, lse = oracles.attention(q, k, v, scale=1.0)
    assert not state.out.isnan().any() and row_error(state.out, expected).max() < 1e-5
    same = (state.lse == lse) | ((state.lse - lse).abs() <= 1e-6 + 4 * torch.finfo(torch.float32).eps * abs(logit))
    assert same.all()
    if math.isfinite(logit):
        assert not any(g.isnan().any() for g in _gradients(state, inputs, (torch.ones_like(state.out), torch.ones_like(state.lse))))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bad_query_stays_in_its_row(impl: str, poison: float) -> None:
    q, k, v = torch.randn(2, 2, 40, 8), torch.randn(2, 2, 100, 8), torch.randn(2, 2, 100, 4)
    clean = ck.attention_state(q, k, v, impl=impl)
    q[0, 1, 17, 3] = poison
    state = ck.attention_state(q, k, v, impl=impl)
    bad = torch.zeros(2, 2, 40, dtype=torch.bool)
    bad[0, 1, 17] = True
    assert torch.equal(state.out.isnan().any(-1), bad)
    assert torch.equal(state.out[~bad], clean.out[~bad]) and torch.equal(state.lse[~bad], clean.lse[~bad])


def test_a_bad_key_stays_in_its_set(impl: str) -> None:
    q, k, v = torch.randn(3, 2, 5, 8), torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 4)
    offsets = torch.tensor([0, 40, 41, 100])
    clean = ck.attention_state(q, k, v, cu_seqlens=offsets, impl=impl)
    k[0, 0, 40] = math.nan
    v[0, 1, 40] = math.nan
    state = ck.attention_state(q, k, v, cu_seqlens=offsets, impl=impl)
    assert state.out[1].isnan().all()
    assert all(torch.equal(a[[0, 2]], b[[0, 2]]) for a, b in zip(state, clean, strict=True))


# ---- P2: the error of every row is bounded


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, latents, keys, width, value_width", [(2, 5, 1000, 16, 16), (3, 33, 197, 8, 24), (1, 128, 130, 64, 64)])
def test_accuracy(impl: str, dtype: torch.dtype, law: str, heads: int, latents: int, keys: int, width: int, value_width: int) -> None:
    shapes = ((latents, width), (keys, width), (keys, value_width))
    q, k, v = (LAWS[law](2, heads, n, w).to(dtype).requires_grad_() for n, w in shapes)
    wide = tuple(t.detach().double().requires_grad_() for t in (q, k, v))
    score = oracles.largest_score(q, k)
    expected = oracles.attention(*wide)
    state = ck.attention_state(q, k, v, impl=impl)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert (row_error(state.out, expected[0]) <= bound(dtype, score, row_error(theirs, expected[0]))).all()
    eps = torch.finfo(state.out.dtype).eps
    assert (state.lse - expected[1]).abs().max() <= 8 * eps * (score + 4), "4 eps max abs(S) of the kernel, as much of the oracle"

    dout = torch.randn(theirs.shape).to(dtype)
    ours = torch.autograd.grad(state.out, (q, k, v), dout.to(state.out.dtype))
    wanted = torch.autograd.grad(expected[0], wide, dout.double())
    own = torch.autograd.grad(theirs, (q, k, v), dout)
    terms = oracles.attention_terms(dout.double(), *wide, *expected)
    for name, mine, right, other, term in zip("qkv", ours, wanted, own, terms, strict=True):
        assert mine.dtype == dtype
        size = torch.maximum(right.norm(dim=-1), 0.05 * term.norm(dim=-1)).clamp(min=1e-30 * float(term.norm(dim=-1).max()))
        error = (mine.double() - right).norm(dim=-1) / size
        allowed = bound(dtype, score, (other.double() - right).norm(dim=-1) / size, factor=4.0)
        assert (error <= allowed).all(), (name, float((error / allowed).max()))


# ---- P3: the same bits


def _bits(impl: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    inputs = tuple(t.detach().requires_grad_() for t in (q, k, v))
    state = ck.attention_state(*inputs, key_padding_mask=mask, impl=impl)
    return (*state, *_gradients(state, inputs, (torch.ones_like(state.out), torch.ones_like(state.lse))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("latents, keys", [(128, 5000), (5, 20_000), (700, 300)])
def test_same_bits_alone_and_for_any_thread_count(latents: int, keys: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(3, 2, n, 16, dtype=dtype) for n in (latents, keys, keys))
    mask = torch.rand(3, keys) < 0.1
    threads = torch.get_num_threads()
    try:
        whole = _bits("native", q, k, v, mask)
        for count in (1, 2, 4, 8):
            torch.set_num_threads(count)
            assert all(torch.equal(a, b) for a, b in zip(_bits("native", q, k, v, mask), whole, strict=True)), f"{count} threads"
    finally:
        torch.set_num_threads(threads)
    for i in range(3):
        alone = _bits("native", q[i : i + 1], k[i : i + 1], v[i : i + 1], mask[i : i + 1])
        assert all(torch.equal(a, b[i : i + 1]) for a, b in zip(alone, whole, strict=True)), f"batch element {i}"


def test_same_bits_on_a_thousand_runs() -> None:
    q, k, v = (torch.randn(2, 2, n, 8) for n in (20, 300, 300))
    first = _bits("native", q, k, v)
    for _ in range(1000):
        assert all(torch.equal(a, b) for a, b in zip(_bits("native", q, k, v), first, strict=True))


# ---- P5: any layout


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _columns_first(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT


def _every_second(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., ::2, ::2]


def _offset(by: int):
    def layout(t: Tensor) -> Tensor:
        return torch.cat([t.new_full((by,), math.nan), t.reshape(-1), t.new_full((7,), math.nan)])[by:-7].view(t.shape)

    return layout


LAYOUTS = {
    "heads inside": _transposed,
    "columns first": _columns_first,
    "step 2": _every_second,
    "flipped copy": lambda t: t.flip(-2).flip(-2),
    **{f"offset by {by}": _offset(by) for by in (1, 2, 3)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(impl: str, dtype: torch.dtype, layout: str) -> None:
    q, k, v = (torch.randn(2, 3, n, w, dtype=dtype) for n, w in ((5, 16), (133, 16), (133, 7)))
    plain = _bits(impl, q, k, v)
    strange = _bits(impl, *(LAYOUTS[layout](t) for t in (q, k, v)))
    for a, b in zip(strange, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12 if dtype == torch.float64 else 1e-2, atol=1e-5)


def test_expanded_tensors(impl: str) -> None:
    """Stride 0 in the inputs, and in the gradient of a sum."""
    q, k, v = torch.randn(3, 5, 8), torch.randn(1, 1, 70, 8), torch.randn(2, 1, 70, 1)
    inputs = tuple(t.double().requires_grad_() for t in (q, k, v))
    shared, keys, values = inputs[0], inputs[1].expand(2, 3, 70, 8), inputs[2].expand(2, 3, 70, 4)
    state = ck.attention_state(shared, keys, values, impl=impl)
    expected = oracles.attention(shared.expand(2, 3, 5, 8), keys, values)
    ours = torch.autograd.grad(state.out.sum() + state.lse.sum(), inputs)
    wanted = torch.autograd.grad(expected[0].sum() + expected[1].sum(), inputs)
    for a, b in zip((*state, *ours), (*expected, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_lazy_negation_is_seen(impl: str, position: int) -> None:
    """`x.conj().imag` is minus what stands in memory."""
    inputs = [torch.randn(1, 2, n, 8) for n in (5, 40, 40)]
    lazy = list(inputs)
    lazy[position] = torch.complex(torch.zeros_like(inputs[position]), -inputs[position]).conj().imag
    assert lazy[position].is_neg()
    torch.testing.assert_close(ck.latent_attention(*lazy, impl=impl), ck.latent_attention(*inputs, impl=impl))
    ours, wanted = (_bits(impl, *tensors) for tensors in (lazy, inputs))
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_shared_query_equals_an_expanded_one(impl: str) -> None:
    q, k, v = torch.randn(3, 5, 8), torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 8)
    assert torch.equal(ck.latent_attention(q, k, v, impl=impl), ck.latent_attention(q.expand(2, 3, 5, 8), k, v, impl=impl))


def test_more_than_65535_heads(impl: str) -> None:
    q, k, v = (torch.randn(66_000, 1, n, 2) for n in (1, 3, 3))
    assert row_error(ck.latent_attention(q, k, v, impl=impl), oracles.attention(q, k, v)[0]).max() < 1e-4


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_beyond_two_to_the_31_elements(dim: int) -> None:
    """Batch elements, heads or keys 2^30 elements apart, the third beyond the reach of 32 bits; the memory between is never touched."""
    step = 2**30
    storage = torch.empty(0, dtype=torch.float16).set_(torch.UntypedStorage(2 * (2 * step + 64)))
    shape, strides = [1, 1, 1, 8], [8, 8, 8, 1]
    shape[dim], strides[dim] = 3, step
    keys = storage.as_strided(shape, strides)
    keys.copy_(torch.randn(shape))
    values = torch.randn(shape, dtype=torch.float16)
    query = torch.randn(shape[0], shape[1], 4, 8, dtype=torch.float16)
    strided = ck.latent_attention(query, keys, values, impl="native")
    compact = ck.latent_attention(query, keys.clone(memory_format=torch.contiguous_format), values, impl="native")
    assert torch.equal(strided, compact)
    swapped = ck.latent_attention(query, values, keys, impl="native")
    assert torch.equal(swapped, ck.latent_attention(query, values, keys.clone(memory_format=torch.contiguous_format), impl="native"))


@pytest.mark.parametrize("width, value_width", [(1, 1), (3, 5), (7, 1), (17, 31), (64, 8), (100, 3), (255, 257 - 1), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_widths(impl: str, dtype: torch.dtype, width: int, value_width: int) -> None:
    q, k, v = (torch.randn(1, 2, n, w, dtype=dtype) for n, w in ((3, width), (77, width), (77, value_width)))
    results = _bits(impl, q, k, v)
    wide = tuple(t.double().requires_grad_() for t in (q, k, v))
    expected = oracles.attention(*wide)
    wanted = _gradients(ck.AttentionState(*expected), wide, (torch.ones_like(expected[0]), torch.ones_like(expected[1])))
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    for a, b in zip(results, (*expected, *wanted), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * max(1.0, float(b.detach().abs().max())))


@pytest.mark.parametrize("sizes", [[0, 3, 0, 64, 1, 129, 0], [5000, 7], [1], [0]])
def test_packed_sets(impl: str, sizes: list[int]) -> None:
    offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    total = int(offsets[-1])
    q, k, v = torch.randn(len(sizes), 2, 6, 8), torch.randn(1, 2, total, 8), torch.randn(1, 2, total, 5)
    mask = torch.rand(1, total) < 0.2
    inputs = tuple(t.double().requires_grad_() for t in (q, k, v))
    state = ck.attention_state(*inputs, cu_seqlens=offsets, key_padding_mask=mask, impl=impl)
    expected = oracles.attention(*inputs, mask, offsets)
    weights = torch.randn_like(state.out), torch.randn_like(state.lse)
    ours, wanted = _gradients(state, inputs, weights), _gradients(ck.AttentionState(*expected), inputs, weights)
    for a, b in zip((*state, *ours), (*expected, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
