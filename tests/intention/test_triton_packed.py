"""The Triton kernels of packed sets in Triton's interpreter, as in test_triton.py: each set has the same results as
alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import triton
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.intention import triton as kernels
from cmab_kernels.intention.contract import Gram, GramBackward, RidgeUpdate
from cmab_kernels.testing import between_margins, guarded_results

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"

EVERYTHING = (True, True, True)
OFFSETS = torch.tensor([0, 70, 70, 71, 135])


@pytest.fixture(autouse=True)
def margins() -> Iterator[None]:
    """Put results between margins of memory, and check at the end of the test that no kernel wrote to the margins."""
    with guarded_results():
        yield


def _rows(keys: int, width: int, value_width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return keys, values and weights of two heads, and a mask."""
    wide = torch.promote_types(dtype, torch.float32)
    key, value = (torch.randn(1, 2, keys, n).to(dtype) for n in (width, value_width))
    weights, mask = torch.rand(1, 2, keys, dtype=wide), torch.rand(1, keys) < 0.3
    return tuple(map(between_margins, (key, value, weights, mask)))


def _cotangents(sets: int, width: int, value_width: int) -> tuple[Tensor, Tensor]:
    gram, moment = (torch.randn(sets, 2, width, n).double() for n in (width, value_width))
    return gram, moment


@pytest.mark.usefixtures("_sums_in_one_order")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("width, value_width", [(5, 3), (16, 65), (70, 2)])
@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_each_set_alone(dtype: torch.dtype, width: int, value_width: int, wide: torch.dtype) -> None:
    """Same bits for sets of one run; the rows after the last set get zeros."""
    rows = _rows(140, width, value_width, dtype)
    cotangents = _cotangents(4, width, value_width)
    sums = kernels.gram(Gram(*rows, OFFSETS.to(wide), (True, True), False))
    grads = kernels.gram_backward(GramBackward(*cotangents, *rows, OFFSETS.to(wide), EVERYTHING, False))
    for s, (first, end) in enumerate(itertools.pairwise(OFFSETS.tolist())):
        alone = [t[:, first:end] if t.dtype == torch.bool else t[:, :, first:end] for t in rows]
        own = [t[s : s + 1] for t in cotangents]
        for ours, right in zip(sums, kernels.gram(Gram(*alone, None, (True, True), False)), strict=True):
            assert torch.equal(ours[s : s + 1], right)
        for ours, right in zip(
            grads, kernels.gram_backward(GramBackward(*own, *alone, None, EVERYTHING, False)), strict=True
        ):
            assert torch.equal(ours[:, :, first:end], right)
    assert all(not grad[:, :, 135:].any() for grad in grads)


@pytest.mark.parametrize("width", [4, 70])
@pytest.mark.parametrize("masked", [False, True])
def test_sums_on_top_of_others(width: int, masked: bool) -> None:
    *rows, mask = _rows(140, width, 3, torch.float32)
    given = (*rows, mask if masked else None, OFFSETS)
    gram, moment = _cotangents(4, width, 3)
    count = torch.arange(8).view(4, 2) + 2**40
    alone = kernels.ridge_update(RidgeUpdate(*given, None, None, None))
    on_top = kernels.ridge_update(RidgeUpdate(*given, gram.mT, moment, count))
    for new, part, before in zip(on_top, alone, (gram.mT, moment, count), strict=True):
        assert torch.equal(new, before + part) and new.is_contiguous()
    seen = [int((~mask[0, a:b]).sum()) if masked else b - a for a, b in itertools.pairwise(OFFSETS.tolist())]
    assert alone[2].tolist() == [[n, n] for n in seen]


def test_a_long_set() -> None:
    """A set of several runs alone is one run here: it has the same sums, up to rounding."""
    rows = _rows(2300, 4, 3, torch.float32)
    ours = kernels.gram(Gram(*rows, torch.tensor([0, 100, 2300]), (True, True), False))
    alone = [t[:, 100:] if t.dtype == torch.bool else t[:, :, 100:] for t in rows]
    right = kernels.gram(Gram(*alone, None, (True, True), True))
    assert all(torch.allclose(a[1], b[0], rtol=1e-6, atol=1e-4) for a, b in zip(ours, right, strict=True))


@pytest.mark.parametrize("parts", [(True, False), (False, True)])
def test_one_sum_alone(parts: tuple[bool, bool]) -> None:
    rows = _rows(140, 5, 3, torch.float64)
    both = kernels.gram(Gram(*rows, OFFSETS, (True, True), True))
    alone = kernels.gram(Gram(*rows, OFFSETS, parts, True))
    assert all(torch.equal(one, whole) for one, whole, part in zip(alone, both, parts, strict=True) if part)


@pytest.mark.parametrize(
    "offsets", [[0, 70, 60, 71, 135], [1, 70, 70, 71, 135], [0, 70, 70, 71, 141], [0, -1, 70, 71, 135], [0, 2**33] * 2]
)
def test_wrong_offsets(offsets: list[int]) -> None:
    """Every sum and every gradient is NaN, and nothing out of bounds is read."""
    rows, wrong = _rows(140, 5, 3, torch.float32), torch.tensor(offsets)
    sets = len(offsets) - 1
    before = (*_cotangents(sets, 5, 3), torch.zeros(sets, 2, dtype=torch.int64))
    gram, moment, count = kernels.ridge_update(RidgeUpdate(*rows, wrong, *before))
    grads = kernels.gram_backward(GramBackward(*before[:2], *rows, wrong, EVERYTHING, False))
    assert all(part.isnan().all() for part in (gram, moment, *grads)) and count.shape == (sets, 2)


@pytest.mark.parametrize("keys, offsets", [(9, [0]), (0, [0, 0]), (0, [0]), (9, [0, 0, 0])])
def test_nothing(keys: int, offsets: list[int]) -> None:
    rows, sets = _rows(keys, 5, 3, torch.float32), len(offsets) - 1
    sums = kernels.gram(Gram(*rows, torch.tensor(offsets), (True, True), False))
    grads = kernels.gram_backward(
        GramBackward(*_cotangents(sets, 5, 3), *rows, torch.tensor(offsets), EVERYTHING, False)
    )
    assert [tuple(t.shape) for t in sums] == [(sets, 2, 5, 5), (sets, 2, 5, 3)]
    assert [t.shape for t in grads] == [t.shape for t in rows[:3]]
    assert not any(t.any() for t in (*sums, *grads))


def test_bad_rows_stay_in_their_set() -> None:
    key, value, weights, mask = _rows(140, 5, 3, torch.float32)
    mask[:, 20], mask[:, 30] = True, False
    clean = kernels.gram(Gram(key, value, weights, mask, OFFSETS, (True, True), False))
    key[:, :, [20, 30, 137]] = math.nan
    bad = kernels.gram(Gram(key, value, weights, mask, OFFSETS, (True, True), False))
    for ours, right in zip(bad, clean, strict=True):
        assert ours[0].isnan().all() and torch.equal(ours[1:], right[1:])


def test_the_public_functions() -> None:
    """The operators stream, solve and differentiate with these kernels, to second order by the definition."""
    q, k, v = torch.randn(4, 2, 5, 6).double(), torch.randn(1, 2, 140, 6).double(), torch.randn(1, 2, 140, 3).double()
    mask, weights = torch.rand(1, 140) < 0.2, torch.rand(1, 2, 140).double()
    leaves = [t.clone().requires_grad_() for t in (q, k, v, weights)]
    results = {}
    for impl in ("triton", "reference"):
        given = {"key_padding_mask": mask, "cu_seqlens": OFFSETS, "impl": impl}
        out = ck.intention(*leaves[:3], 0.5, weights=leaves[3], **given)
        state = ck.ridge_state(k, v, weights=weights, **given)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        results[impl] = (out, *first, *second, *state)
    for ours, right in zip(results["triton"], results["reference"], strict=True):
        assert torch.allclose(ours, right, rtol=1e-9, atol=1e-11)
