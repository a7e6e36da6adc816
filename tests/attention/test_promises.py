"""Promises of attention alone: extreme logits, packed sets, memory far apart, odd widths. test_suite.py tests the other
promises."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import oracles, row_error


def _gradients(
    state: ck.AttentionState, inputs: tuple[Tensor, ...], weights: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(tuple(state), inputs, weights)


# ---- P1: finite or masked inputs never give a NaN


@pytest.mark.parametrize("logit", [0.0, 88.8, -88.8, 104.0, -104.0, 1e4, -1e4, 1e38, -1e38, -math.inf])
@pytest.mark.parametrize("among", [False, True])
def test_extreme_logits(impl: str, logit: float, among: bool) -> None:
    """Either all keys have the extreme logit, or one key has it and the others have logit 0."""
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
        assert not any(
            g.isnan().any() for g in _gradients(state, inputs, (torch.ones_like(state.out), torch.ones_like(state.lse)))
        )


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


# ---- P5: any layout


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_beyond_two_to_the_31_elements(dim: int) -> None:
    """Batch elements, heads or keys are 2^30 elements apart, so that the offset of the third exceeds 32 bits.

    The memory between them is never accessed.
    """
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
    assert torch.equal(
        swapped, ck.latent_attention(query, values, keys.clone(memory_format=torch.contiguous_format), impl="native")
    )


@pytest.mark.parametrize(
    "width, value_width", [(1, 1), (3, 5), (7, 1), (17, 31), (64, 8), (100, 3), (255, 257 - 1), (256, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_widths(impl: str, dtype: torch.dtype, width: int, value_width: int) -> None:
    q, k, v = (torch.randn(1, 2, n, w, dtype=dtype) for n, w in ((3, width), (77, width), (77, value_width)))
    inputs = tuple(t.requires_grad_() for t in (q, k, v))
    state = ck.attention_state(*inputs, impl=impl)
    results = (*state, *_gradients(state, inputs, (torch.ones_like(state.out), torch.ones_like(state.lse))))
    wide = tuple(t.double().requires_grad_() for t in (q, k, v))
    expected = oracles.attention(*wide)
    wanted = _gradients(
        ck.AttentionState(*expected), wide, (torch.ones_like(expected[0]), torch.ones_like(expected[1]))
    )
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    for a, b in zip(results, (*expected, *wanted), strict=True):
        torch.testing.assert_close(
            a.double(), b, rtol=tolerance, atol=tolerance * max(1.0, float(b.detach().abs().max()))
        )


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


@pytest.mark.parametrize("sizes", [[0, 3, 64, 1], [50, 7], [0], []])
def test_packed_rows_beyond_the_sets(impl: str, sizes: list[int]) -> None:
    """A buffer may be longer than its sets: the rows beyond, which hold NaN, are not read, and have gradient 0."""
    offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    total = int(offsets[-1])
    q, k, v = torch.randn(len(sizes), 2, 6, 8), torch.randn(1, 2, total + 70, 8), torch.randn(1, 2, total + 70, 5)
    mask = torch.rand(1, total + 70) < 0.2
    k[:, :, total:], v[:, :, total:] = math.nan, math.inf
    inputs = tuple(t.double().requires_grad_() for t in (q, k, v))
    state = ck.attention_state(*inputs, cu_seqlens=offsets, key_padding_mask=mask, impl=impl)
    exact = (inputs[0], *(t.detach()[:, :, :total].requires_grad_() for t in inputs[1:]))
    wanted = ck.attention_state(*exact, cu_seqlens=offsets, key_padding_mask=mask[:, :total], impl=impl)
    weights = torch.randn_like(state.out), torch.randn_like(state.lse)
    ours, right = _gradients(state, inputs, weights), _gradients(wanted, exact, weights)
    for a, b in zip((*state, ours[0]), (*wanted, right[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    for a, b in zip(ours[1:], right[1:], strict=True):
        torch.testing.assert_close(a[:, :, :total], b, rtol=1e-11, atol=1e-12)
        assert not a[:, :, total:].any()
