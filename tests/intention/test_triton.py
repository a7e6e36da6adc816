"""The Triton kernels in Triton's interpreter. tests/test_interpreter.py runs this file with TRITON_INTERPRET=1.

The interpreter checks no bounds: inputs lie between margins of NaN, results between margins that must stay as they
were.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.intention import triton as kernels
from cmab_kernels.intention.contract import ApplyRows, Gram, GramBackward, PrefixRidge, PrefixRidgeBackward, RidgeUpdate
from cmab_kernels.intention.reference import prefix_ridge_backward_reference
from cmab_kernels.intention.triton import launch, scan, sums
from cmab_kernels.testing import between_margins, guarded_results

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"

EVERYTHING = (True, True, True)


@pytest.fixture(autouse=True)
def margins() -> Iterator[None]:
    """Put results between margins of memory, and check at the end of the test that no kernel wrote to the margins."""
    with guarded_results():
        yield


def _close(ours: Tensor, right: Tensor, terms: Tensor, tolerance: float) -> None:
    """Check that each element is within `tolerance`, relative to the sum of the sizes of its terms."""
    assert ours.shape == right.shape and ours.is_contiguous()
    assert ((ours.double() - right).abs() <= tolerance * terms).all(), (
        f"{float(((ours.double() - right).abs() / terms).max()):.1e}"
    )


class Case:
    """Inputs, and the two sums and their gradients in float64 by the formulas; `tolerance` is that of one product."""

    def __init__(self, key: Tensor, value: Tensor, weights: Tensor | None = None, mask: Tensor | None = None) -> None:
        self.inputs = (key, value, weights, mask)
        hide = torch.zeros(key.shape[:3], dtype=torch.bool) if mask is None else mask[:, None].expand(key.shape[:3])
        self.kept = ~hide
        self.k, self.v = (t.double().masked_fill(hide[..., None], 0.0) for t in (key, value))
        self.w = (torch.ones(key.shape[:3]) if weights is None else weights).double().masked_fill(hide, 0.0)[..., None]

    def gram(self, exact: bool, tolerance: float, parts: tuple[bool, bool] = (True, True)) -> tuple[Tensor, Tensor]:
        sums = kernels.gram(Gram(*self.inputs, None, parts, exact))
        for ours, part, other in zip(sums, parts, (self.k, self.v), strict=True):
            assert ours.dtype == torch.float64
            if part:
                _close(ours, (self.w * self.k).mT @ other, (self.w * self.k).abs().mT @ other.abs(), tolerance)
            else:
                assert ours.shape == (0,)
        assert torch.equal(sums[0], sums[0].mT) if parts[0] else True, "exactly symmetric"
        return sums

    def gradients(
        self,
        exact: bool,
        tolerance: float,
        needs: tuple[bool, bool, bool] = EVERYTHING,
        cotangents: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        key, value, *_ = self.inputs
        batch, heads, _, width = key.shape
        dgram, dmoment = cotangents or (torch.randn(batch, heads, width, n).double() for n in (width, value.shape[-1]))
        grads = kernels.gram_backward(GramBackward(dgram, dmoment, *self.inputs, None, needs, exact))
        slope = dgram + dgram.mT

        def formulas(k: Tensor, v: Tensor, slope: Tensor, dmoment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            a, b = k @ slope, v @ dmoment.mT
            return self.w * (a + b), self.w * (k @ dmoment), (k * (a / 2 + b)).sum(-1)

        right = formulas(self.k, self.v, slope, dmoment)
        terms = formulas(*(t.abs() for t in (self.k, self.v, slope, dmoment)))
        dtypes = key.dtype, value.dtype, torch.promote_types(key.dtype, torch.float32)
        for ours, wanted, size, need, dtype in zip(grads, right, terms, needs, dtypes, strict=True):
            assert ours.dtype == dtype
            if need:
                _close(ours, wanted, size, max(tolerance, torch.finfo(dtype).eps))
                assert (ours[~self.kept] == 0).all(), "masked keys get exact zeros"
            else:
                assert ours.shape == (0,)
        return grads


def _inputs(
    batch: int, heads: int, keys: int, width: int, value_width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    key, value = (between_margins(torch.randn(batch, heads, keys, n).to(dtype)) for n in (width, value_width))
    return key, value


def _weights(batch: int, heads: int, keys: int, dtype: torch.dtype) -> Tensor:
    return between_margins(torch.rand(batch, heads, keys, dtype=torch.promote_types(dtype, torch.float32)))


TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-6}
"""The error allowed in a sum, by the type of the inputs; half types are summed in float32."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "keys, width, value_width",
    [(70, 8, 8), (1, 1, 1), (65, 3, 17), (40, 16, 65), (63, 64, 1), (33, 100, 7), (17, 65, 130)],
)
def test_shapes(dtype: torch.dtype, keys: int, width: int, value_width: int) -> None:
    """The last tile of keys is not full, and widths are odd or span several tiles;
    with weights and a mask, and without."""
    batch = 2 if width < 32 else 1
    given = _inputs(batch, 1, keys, width, value_width, dtype)
    for weights, mask in ((None, None), (_weights(batch, 1, keys, dtype), torch.rand(batch, keys) < 0.3)):
        case = Case(*given, weights, mask)
        case.gram(False, TOLERANCE[dtype])
        case.gradients(False, TOLERANCE[dtype])
    weight = torch.randn(batch, 1, value_width, width).double().mT
    out = kernels.apply_rows(ApplyRows(given[0], weight))
    assert out.dtype == dtype
    k = given[0].double()
    _close(out, k @ weight, k.abs() @ weight.abs(), max(TOLERANCE[dtype], torch.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_exact_sums(dtype: torch.dtype) -> None:
    """With `exact` every product and sum is float64, whatever the type of the inputs."""
    case = Case(*_inputs(1, 2, 70, 9, 33, dtype), _weights(1, 2, 70, dtype), torch.rand(1, 70) < 0.3)
    case.gram(True, 1e-15)
    case.gradients(True, 1e-15)


@pytest.mark.parametrize("dtype, keys", [(torch.float64, 1030), (torch.float32, 1025), (torch.float16, 2048)])
def test_several_runs(dtype: torch.dtype, keys: int) -> None:
    case = Case(*_inputs(1, 2, keys, 4, 3, dtype))
    case.gram(False, TOLERANCE[dtype])
    case.gradients(False, TOLERANCE[dtype])


def test_runs_of_tiles() -> None:
    """Keys wider than a tile are summed tile by tile, each over its own runs of keys."""
    Case(*_inputs(1, 1, 1100, 70, 3, torch.float32)).gram(False, TOLERANCE[torch.float32])


@pytest.mark.parametrize("parts", [(True, False), (False, True)])
@pytest.mark.parametrize("width", [8, 70])
def test_one_sum_alone(parts: tuple[bool, bool], width: int) -> None:
    case = Case(*_inputs(1, 1, 40, width, 5, torch.float64))
    both = kernels.gram(Gram(*case.inputs, None, (True, True), True))
    alone = case.gram(True, 1e-14, parts)
    assert all(torch.equal(one, whole) for one, whole, part in zip(alone, both, parts, strict=True) if part)


@pytest.mark.parametrize("keys, width", [(1, 5), (40, 16), (2100, 16), (3, 70), (0, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_sums_on_top_of_others(keys: int, width: int, masked: bool) -> None:
    """In one run and several, in one tile and several; the sums before need not be symmetric, contiguous or aligned."""
    case = Case(*_inputs(2, 1, keys, width, 3, torch.float32), mask=torch.rand(2, keys) < 0.3 if masked else None)
    gram, moment = (between_margins(torch.randn(2, 1, width, n, dtype=torch.float64)) for n in (width, 3))
    count = torch.tensor([[7], [2**40]])
    alone, on_top = (
        kernels.ridge_update(RidgeUpdate(*case.inputs, None, None, None, None)),
        kernels.ridge_update(RidgeUpdate(*case.inputs, None, gram.mT, moment, count)),
    )
    assert torch.equal(alone[0], kernels.gram(Gram(*case.inputs, None, (True, True), True))[0])
    for new, part, before in zip(on_top, alone, (gram.mT, moment, count), strict=True):
        assert torch.equal(new, before + part) and new.is_contiguous()
    assert torch.equal(alone[2], case.kept.sum(-1))


def _check_prefixes(
    case: Case, every: int, state: tuple[Tensor, Tensor] | None = None, needs: tuple[bool, ...] = (True,) * 5
) -> None:
    """Check the sums over all prefixes, and their gradients, by the definition in float64."""
    key, value, *rest = case.inputs
    before = state or (None, None)
    ours = kernels.prefix_ridge(PrefixRidge(*case.inputs, *before, every))
    ends = torch.arange(every, key.shape[2] + every, every).clamp(max=key.shape[2])
    for sums_, base, other in zip(ours, before, (case.k, case.v), strict=True):
        terms = (case.w * case.k)[..., None] * other[..., None, :]
        right, size = terms.cumsum(2)[:, :, ends - 1], terms.abs().cumsum(2)[:, :, ends - 1]
        _close(
            sums_,
            right if base is None else base[:, :, None] + right,
            size if base is None else base[:, :, None].abs() + size,
            1e-15,
        )
    assert torch.equal(ours[0], ours[0].mT) or state is not None, "exactly symmetric"
    cotangents = tuple(torch.randn_like(part) for part in ours)
    grads = kernels.prefix_ridge_backward(PrefixRidgeBackward(*cotangents, *case.inputs, every, needs))
    weights, mask = rest
    wide = None if weights is None else weights.double()
    right = prefix_ridge_backward_reference(*cotangents, key.double(), value.double(), wide, mask, every)
    kinds = key.dtype, value.dtype, torch.promote_types(key.dtype, torch.float32), torch.float64, torch.float64
    for grad, wanted, need, dtype in zip(grads, right, needs, kinds, strict=True):
        assert grad.dtype == dtype and grad.is_contiguous()
        if need:
            assert grad.shape == wanted.shape
            assert (
                not grad.numel()
                or ((grad.double() - wanted).abs() <= 2 * max(torch.finfo(dtype).eps, 1e-14) * wanted.abs().max()).all()
            )
        else:
            assert grad.shape == (0,)
    assert all((grad[~case.kept] == 0).all() for grad, need in zip(grads[:3], needs, strict=False) if need), (
        "masked keys get exact zeros"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "keys, width, value_width, every", [(21, 5, 3, 1), (23, 18, 33, 3), (40, 3, 17, 16), (1, 1, 1, 1)]
)
def test_prefixes(keys: int, width: int, value_width: int, every: int, dtype: torch.dtype) -> None:
    """A state after every key, every few and every many: the last chunk and tile are not full,
    and widths span several tiles."""
    given = _inputs(1, 2, keys, width, value_width, dtype)
    _check_prefixes(Case(*given, _weights(1, 2, keys, dtype), torch.rand(1, keys) < 0.3), every)
    _check_prefixes(Case(*given), every)


@pytest.mark.parametrize("every", [1, 5, 17])
def test_prefixes_of_several_runs_on_top_of_a_state(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "GRAIN", 2)
    state = (torch.randn(2, 1, 6, 6).double().mT, torch.randn(2, 1, 6, 3).double())
    mask = torch.rand(2, 70) < 0.3
    mask[0, :40] = True
    _check_prefixes(Case(*_inputs(2, 1, 70, 6, 3, torch.float32), None, mask), every, state)


@pytest.mark.parametrize("every", [2, 20])
@pytest.mark.parametrize("needed", range(5))
def test_only_the_gradients_of_prefixes_that_are_asked_for(needed: int, every: int) -> None:
    case = Case(*_inputs(1, 1, 25, 4, 3, torch.float32), _weights(1, 1, 25, torch.float32))
    _check_prefixes(case, every, needs=tuple(i == needed for i in range(5)))


@pytest.mark.parametrize("every", [1, 16])
@pytest.mark.parametrize("extents", [(0, 2, 3, 2), (2, 1, 0, 2), (2, 1, 20, 0)])
def test_prefixes_of_nothing(extents: tuple[int, int, int, int], every: int) -> None:
    """No set, no key, or no values: the state still gets its gradient."""
    batch, heads, keys, value_width = extents
    state = torch.randn(batch, heads, 5, 5).double(), torch.randn(batch, heads, 5, value_width).double()
    _check_prefixes(Case(*_inputs(batch, heads, keys, 5, value_width, torch.float32)), every, state)


def test_a_nan_reaches_no_earlier_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN in the gradient of a prefix does not reach a later key, whether it is in the same tile, in the same run, or
    after them."""
    monkeypatch.setattr(scan, "GRAIN", 12)
    key, value = _inputs(1, 1, 40, 3, 2, torch.float32)
    key[0, 0, 20] = math.nan
    gram, moment = kernels.prefix_ridge(PrefixRidge(key, value, None, None, None, None, 1))
    assert all(part[:, :, :20].isfinite().all() and part[:, :, 20:].isnan().all() for part in (gram, moment))
    key[0, 0, 20] = 0.0
    dgram, dmoment = torch.ones_like(gram), torch.ones_like(moment)
    dgram[0, 0, 20] = math.nan
    for grad in kernels.prefix_ridge_backward(
        PrefixRidgeBackward(dgram, dmoment, key, value, None, None, 1, (True, False, True, False, False))
    )[::2][:2]:
        assert grad[:, :, 21:].isfinite().all() and grad[:, :, :21].isnan().all()


@pytest.mark.parametrize("needs", [n for n in itertools.product((False, True), repeat=3) if n != EVERYTHING])
def test_unneeded_gradients(needs: tuple[bool, bool, bool]) -> None:
    Case(*_inputs(1, 1, 30, 4, 3, torch.float64), _weights(1, 1, 30, torch.float64)).gradients(False, 1e-14, needs)


@pytest.mark.parametrize(
    "keys, masked",
    [(200, slice(0, 64)), (200, slice(64, 128)), (1100, slice(1024, 1100)), (70, slice(1, None)), (70, slice(None))],
)
def test_masks_hide_nan(keys: int, masked: slice) -> None:
    """Masks hide a first or middle tile, a whole run, all keys but one, or all keys.

    Hidden keys, values, weights and then gradients are NaN.
    """
    key, value = _inputs(2, 1, keys, 3, 2, torch.float32)
    weights = _weights(2, 1, keys, torch.float32)
    mask = torch.zeros(2, keys, dtype=torch.bool)
    mask[1, masked] = True
    key[1, :, masked], value[1, :, masked], weights[1, :, masked] = math.nan, math.inf, math.nan
    case = Case(key, value, weights, between_margins(mask))
    case.gram(False, 1e-6)
    case.gradients(False, 1e-6)
    nan = torch.full((2, 1, 3, 3), math.nan).double()
    spoilt = kernels.gram_backward(GramBackward(nan, nan[..., :2], *case.inputs, None, EVERYTHING, False))
    assert all((grad[1, :, masked] == 0).all() for grad in spoilt)


@pytest.mark.parametrize("extents", list(itertools.product((0, 2), (0, 1), (0, 3), (0, 2))))
def test_empty_extents(extents: tuple[int, int, int, int]) -> None:
    batch, heads, keys, value_width = extents
    case = Case(
        *_inputs(batch, heads, keys, 5, value_width, torch.float32), _weights(batch, heads, keys, torch.float32)
    )
    case.gram(False, 1e-6)
    case.gradients(False, 1e-6)
    assert (
        kernels.apply_rows(ApplyRows(case.inputs[0], torch.randn(batch, heads, 5, value_width).double())).shape
        == case.inputs[1].shape
    )


@pytest.mark.parametrize("dtype, big", [(torch.float32, 3e19), (torch.float32, 3e38), (torch.float16, 6e4)])
@pytest.mark.parametrize("keys", [3, 1100])
def test_finite_keys_have_finite_sums(dtype: torch.dtype, big: float, keys: int) -> None:
    """A run that overflows float32 is summed again in float64; the other runs keep their sums."""
    key, value = _inputs(1, 1, keys, 4, 3, dtype)
    key[0, 0, keys // 2] = big
    Case(key, value).gram(False, TOLERANCE[dtype])


def test_a_nan_stays_in_its_matrix() -> None:
    """A NaN in a key reaches only its row and column of the sum of its own batch element."""
    key, value = _inputs(2, 1, 40, 4, 3, torch.float32)
    clean = kernels.gram(Gram(key, value, None, None, None, (True, True), False))
    key[1, 0, 7, 2] = math.nan
    gram, moment = kernels.gram(Gram(key, value, None, None, None, (True, True), False))
    touched = torch.zeros(4, 4, dtype=torch.bool)
    touched[2], touched[:, 2] = True, True
    assert (
        torch.equal(gram[1, 0].isnan(), touched)
        and moment[1, 0, 2].isnan().all()
        and not moment[1, 0, [0, 1, 3]].isnan().any()
    )
    assert torch.equal(gram[0], clean[0][0]) and torch.equal(moment[0], clean[1][0])


def test_long_runs_lose_no_digits() -> None:
    """A float32 sum of 20,000 equal keys always rounds in one direction,
    so it must be added to a float64 total every 512 keys."""
    key = torch.full((1, 1, 20_000, 1), 1 + 1.33e-5)
    with mock.patch.object(sums, "cut_keys", lambda keys, *_: launch.Cut(1, keys)):
        gram, _ = kernels.gram(Gram(key, key, None, None, None, (True, False), False))
    assert abs(float(gram) / (20_000 * float(key[0, 0, 0, 0].double()) ** 2) - 1) < 1e-6


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns first": lambda t: t.mT.contiguous().mT,
    "step 2": lambda t: t.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., ::2, ::2],
    "offset by 3": lambda t: torch.cat([t.new_full((3,), math.nan), t.reshape(-1)])[3:].view(t.shape),
    "expanded": lambda t: t[:1, :1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Inputs, weights, matrices and incoming gradients may have any strides; the gradient of a sum has stride 0."""
    arrange = LAYOUTS[layout]
    key, value = (arrange(t) for t in _inputs(2, 2, 70, 16, 7, torch.float64))
    weights, mask = (
        arrange(_weights(2, 2, 70, torch.float64)[..., None])[..., 0],
        (torch.rand(1, 70, 2) < 0.3)[..., 0].expand(2, 70),
    )
    case = Case(key, value, weights, mask)
    case.gram(False, 1e-14)
    dgram, dmoment = torch.randn(2, 2, 16, 16).double(), torch.randn(2, 2, 16, 7).double()
    case.gradients(False, 1e-14, cotangents=(arrange(dgram), arrange(dmoment)))
    one = dgram.new_ones(1, 1, 1, 1)
    case.gradients(False, 1e-14, cotangents=(one.expand(dgram.shape), one.expand(dmoment.shape)))
    weight = arrange(dmoment)
    _close(kernels.apply_rows(ApplyRows(key, weight)), key @ weight, key.abs() @ weight.abs(), 1e-14)


@pytest.mark.usefixtures("_sums_in_one_order")
def test_same_bits_again_and_alone() -> None:
    """The bits are the same on every run, and for a batch element by itself,
    with weights, a mask and several runs of keys."""
    key, value = _inputs(2, 1, 1100, 5, 3, torch.float32)
    weights, mask = _weights(2, 1, 1100, torch.float32), torch.rand(2, 1100) < 0.2
    cotangents = torch.randn(2, 1, 5, 5).double(), torch.randn(2, 1, 5, 3).double()

    def everything(part: slice) -> tuple[Tensor, ...]:
        inputs = [t[part] for t in (key, value, weights, mask)]
        sums = kernels.gram(Gram(*inputs, None, (True, True), False))
        grads = kernels.gram_backward(GramBackward(*(t[part] for t in cotangents), *inputs, None, EVERYTHING, False))
        return *sums, *grads, kernels.apply_rows(ApplyRows(inputs[0], sums[1]))

    whole = everything(slice(None))
    assert all(torch.equal(a, b) for a, b in zip(everything(slice(None)), whole, strict=True))
    for part in (slice(0, 1), slice(1, 2)):
        assert all(torch.equal(a, b[part]) for a, b in zip(everything(part), whole, strict=True))


@pytest.mark.parametrize("width, programs", [(1, 1), (64, 1), (128, 4), (256, 16), (256, 64)])
def test_runs_cover_the_keys(width: int, programs: int) -> None:
    """For any number of keys only the last run may be short, and the memory of partial sums is bounded."""
    for keys in (0, 1, 1023, 1024, 1025, 262_144, 262_145, 10**6, 2**31 - 1):
        runs, length = launch.cut_keys(keys, width, programs)
        assert length % 128 == 0 and runs * length >= keys and (runs == 1 or (runs - 1) * length < keys)
        assert runs * programs <= max(launch.MOST_PROGRAMS, programs), "the workspace does not grow with the keys"
        assert runs == 1 or runs * 16 * width <= keys + 16 * width, (
            "and is a small part of them: 16 float64 numbers for 64 of float32"
        )


def test_the_public_functions() -> None:
    """The operators stream, solve and differentiate with these kernels."""
    q, k, v = torch.randn(2, 2, 5, 6).double(), torch.randn(2, 2, 40, 6).double(), torch.randn(2, 2, 40, 3).double()
    mask, weights = torch.rand(2, 40) < 0.2, torch.rand(2, 2, 40).double()
    leaves = [t.clone().requires_grad_() for t in (q, k, v, weights)]
    results = {}
    for impl in ("triton", "reference"):
        out = ck.intention(*leaves[:3], 0.5, weights=leaves[3], key_padding_mask=mask, form="primal", impl=impl)
        state = ck.ridge_state(k, v, weights=weights, key_padding_mask=mask, impl=impl)
        results[impl] = (out.detach(), *torch.autograd.grad(out.square().sum(), leaves), state.gram, state.moment)
    for ours, right in zip(results["triton"], results["reference"], strict=True):
        assert torch.allclose(ours, right, rtol=1e-10, atol=1e-12)


def test_what_is_refused() -> None:
    q = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    assert "bfloat16" in str(kernels.unsupported(q, q, q))
    assert kernels.unsupported(q.float(), q.float(), q.float()) is None
    assert "256" in str(kernels.unsupported(*(torch.zeros(1, 1, 1, 257),) * 3))
    assert "32 bits" in str(kernels.unsupported(*(torch.zeros(1, 1, 1, 1).expand(1, 1, 2**31 - 1, 1),) * 3))
