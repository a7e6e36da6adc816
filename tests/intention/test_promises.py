"""Promises P1 (finite), P2 (accurate), P3 (repeatable), P5 (any layout) and P6 (what a solve is worth), for every implementation here."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import measure
from cmab_kernels.testing import LAWS, bound, lapack_ratio, oracles, row_error

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


# ---- P1: nothing finite or masked gives a NaN


@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("batch, heads, rows, keys", list(itertools.product((0, 2), (0, 3), (0, 4), (0, 5))))
def test_empty_extents(impl: str, batch: int, heads: int, rows: int, keys: int, form: str) -> None:
    q, k, v = (torch.randn(batch, heads, n, w, requires_grad=True) for n, w in ((rows, 6), (keys, 6), (keys, 3)))
    out, sigma = ck.intention(q, k, v, 0.5, form=form, impl=impl), ck.sigma_intention(q, k, v, 0.5, impl=impl)
    state = ck.ridge_state(k, v, impl=impl)
    assert out.shape == sigma.shape == (batch, heads, rows, 3) and state.gram.shape == (batch, heads, 6, 6)
    assert ck.solve_ridge(state, 0.5, impl=impl).info.eq(0).all()
    grads = torch.autograd.grad(out.sum() + sigma.sum() + state.gram.sum(), (q, k, v))
    assert [g.shape for g in grads] == [t.shape for t in (q, k, v)] and not any(g.isnan().any() for g in grads)
    if keys == 0:
        assert out.eq(0).all() and sigma.eq(0).all() and grads[0].eq(0).all() and state.moment.eq(0).all()


@pytest.mark.parametrize("start, stop", [(0, 64), (64, 128), (128, 200), (0, 200), (3, 197), (0, 199), (1, 200)])
def test_masked_blocks(impl: str, start: int, stop: int) -> None:
    """All-masked block first, middle, last; NaN and infinity under the mask; gradients of ignored keys are 0."""
    q, k, v = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 200, 8), torch.randn(2, 2, 200, 4)
    mask = torch.zeros(2, 200, dtype=torch.bool)
    mask[0, start:stop] = True
    weights = torch.rand(2, 200)
    k[0, :, start:stop:2], v[0, :, start:stop:2], weights[0, start:stop:3] = math.nan, math.inf, math.nan
    inputs = tuple(t.requires_grad_() for t in (q, k, v, weights))
    for form in ("primal", "dual"):
        out = ck.intention(q, k, v, 0.7, form=form, weights=weights, key_padding_mask=mask, impl=impl)
        visible = [t.masked_fill(mask[:, None, :, None], 0.0).double() for t in (k, v)]
        wanted = oracles.intention(q.double(), *visible, 0.7, weights.masked_fill(mask, 0.0).double(), mask)
        torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-5)
        grads = torch.autograd.grad(out, inputs, torch.randn_like(out))
        assert not any(g.isnan().any() for g in grads)
        assert all(g[0, ..., start:stop, :].eq(0).all() for g in grads[1:3]) and grads[3][0, start:stop].eq(0).all()
    state = ck.ridge_state(k, v, weights=weights, key_padding_mask=mask, impl=impl)
    assert state.gram.isfinite().all() and state.count[0].eq(200 - (stop - start)).all() and state.count[1].eq(200).all()


@pytest.mark.parametrize("size", [1e-10, 1.0, 1e4, 1e15, 1e25])
def test_keys_of_any_size(impl: str, size: float) -> None:
    """Products of float32 keys beyond 1e19 overflow in float32; the sums do not."""
    q, k, v = torch.randn(1, 2, 5, 4), size * torch.randn(1, 2, 700, 4), torch.randn(1, 2, 700, 3)
    state = ck.ridge_state(k, v, impl=impl)
    assert state.gram.isfinite().all()
    if impl == "reference" and size > 1e19:
        return  # dense float32 products: the definition does not survive what the kernels do
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


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, rows, keys, width, value_width", [(2, 5, 1000, 16, 16), (3, 33, 197, 8, 24), (1, 128, 130, 64, 64)])
def test_accuracy(impl: str, dtype: torch.dtype, law: str, heads: int, rows: int, keys: int, width: int, value_width: int) -> None:
    """Rows of a head share one solution, whose error all of them show: torch's own error is the largest of a head's rows.

    Where torch's own products are not positive definite any more, or overflow, it has no digit right, and neither must we.
    """
    alpha = 10.0
    q, k, v = (LAWS[law](2, heads, n, w).to(dtype).requires_grad_() for n, w in ((rows, width), (keys, width), (keys, value_width)))
    wide = tuple(t.detach().double().requires_grad_() for t in (q, k, v))
    expected, theirs = oracles.intention(*wide, alpha), oracles.intention_in_torch(q, k, v, alpha)
    ours = ck.intention(q, k, v, alpha, impl=impl)
    dout = torch.randn(theirs.shape).to(dtype)
    results = (ours, *torch.autograd.grad(ours, (q, k, v), dout))
    own = (theirs, *torch.autograd.grad(theirs, (q, k, v), dout))
    wanted = (expected, *torch.autograd.grad(expected, wide, dout.double()))
    for name, mine, right, other in zip("oqkv", results, wanted, own, strict=True):
        assert mine.dtype == dtype
        size = right.norm(dim=-1).clamp(min=0.05 * float(right.norm(dim=-1).max()))
        error, others = ((t.double() - right).norm(dim=-1) / size for t in (mine, other))
        allowed = bound(dtype, 0.0, others.nan_to_num(1.0, 1.0).amax(-1, keepdim=True), factor=1.0 if name == "o" else 4.0)
        assert (error <= allowed).all(), (name, float((error / allowed).max()))


@pytest.mark.parametrize("exponent", [1, 3, 5, 7, 9, 11])
def test_float64_through_a_condition_of(impl: str, exponent: int) -> None:
    """Backward stable: what the normal equations lose is the condition number's and nothing else's."""
    basis = torch.linalg.qr(torch.randn(2, 1, 50, 8, dtype=torch.float64))[0]
    key = basis * torch.logspace(0, -exponent / 2, 8, dtype=torch.float64)
    value = torch.randn(2, 1, 50, 3, dtype=torch.float64)
    weight, info = ck.solve_ridge(ck.ridge_state(key, value, impl=impl), 0.0, impl=impl)
    wanted = torch.linalg.lstsq(key, value).solution
    assert info.eq(0).all() and ((weight - wanted).norm() / wanted.norm()) < 1e-14 * 10**exponent


# ---- P3: the same bits


def _bits(impl: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> tuple[Tensor, ...]:
    inputs = tuple(t.detach().requires_grad_() for t in (q, k, v))
    out = ck.intention(*inputs, 0.5, form="primal", key_padding_mask=mask, weights=weights, impl=impl)
    state = ck.ridge_state(*inputs[1:], key_padding_mask=mask, weights=weights, impl=impl)
    solution = ck.solve_ridge(state, 0.5, impl=impl).weight
    grads = torch.autograd.grad((out, state.gram, solution), inputs, [torch.ones_like(t) for t in (out, state.gram, solution)])
    return out, *state[:2], solution, *grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch, keys, width", [(3, 20_000, 16), (17, 100, 16), (9, 700, 40), (3, 300, 100)])
def test_same_bits_alone_and_for_any_thread_count(batch: int, keys: int, width: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(batch, 2, n, w, dtype=dtype) for n, w in ((50, width), (keys, width), (keys, 24)))
    mask, weights = torch.rand(batch, keys) < 0.1, torch.rand(batch, keys)
    threads = torch.get_num_threads()
    try:
        whole = _bits("native", q, k, v, mask, weights)
        for count in (1, 2, 4, 8):
            torch.set_num_threads(count)
            assert all(torch.equal(a, b) for a, b in zip(_bits("native", q, k, v, mask, weights), whole, strict=True)), f"{count} threads"
    finally:
        torch.set_num_threads(threads)
    for i in range(batch):
        alone = _bits("native", *(t[i : i + 1] for t in (q, k, v, mask, weights)))
        names = ("out", "gram", "moment", "weight", "dquery", "dkey", "dvalue")
        for name, a, b in zip(names, alone, whole, strict=True):
            assert torch.equal(a, b[i : i + 1]), f"{name} of batch element {i}"


def test_same_bits_on_a_thousand_runs() -> None:
    q, k, v = (torch.randn(2, 2, n, 8) for n in (20, 300, 300))
    first = _bits("native", q, k, v)
    for _ in range(1000):
        assert all(torch.equal(a, b) for a, b in zip(_bits("native", q, k, v), first, strict=True))


# ---- P5: any layout


def _offset(by: int):
    def layout(t: Tensor) -> Tensor:
        return torch.cat([t.new_full((by,), math.nan), t.reshape(-1), t.new_full((7,), math.nan)])[by:-7].view(t.shape)

    return layout


LAYOUTS = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns first": lambda t: t.mT.contiguous().mT,
    "step 2": lambda t: t.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., ::2, ::2],
    "flipped copy": lambda t: t.flip(-2).flip(-2),
    **{f"offset by {by}": _offset(by) for by in (1, 2, 3)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(impl: str, dtype: torch.dtype, layout: str) -> None:
    q, k, v = (torch.randn(2, 3, n, w, dtype=dtype) for n, w in ((5, 16), (133, 16), (133, 7)))
    plain, strange = _bits(impl, q, k, v), _bits(impl, *(LAYOUTS[layout](t) for t in (q, k, v)))
    for a, b in zip(strange, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11 if dtype == torch.float64 else 1e-2, atol=1e-4)


def test_expanded_tensors(impl: str) -> None:
    """Stride 0 in the inputs, and in the gradient of a sum."""
    q, k, v, alpha = (torch.randn(s).double() for s in ((3, 5, 8), (1, 1, 70, 8), (2, 1, 70, 1), ()))
    inputs = tuple(t.requires_grad_() for t in (q, k, v, alpha.abs()))

    def run(function, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, **options: str) -> tuple[Tensor, ...]:
        out = function(q.expand(2, 3, 5, 8), k.expand(2, 3, 70, 8), v.expand(2, 3, 70, 4), alpha, **options)
        return out, *torch.autograd.grad(out.sum(), inputs)

    for a, b in zip(run(ck.intention, *inputs, impl=impl), run(oracles.intention, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    shared = ck.intention(inputs[0], inputs[1].expand(2, 3, 70, 8), inputs[2].expand(2, 3, 70, 4), alpha.abs(), impl=impl)
    torch.testing.assert_close(shared, run(oracles.intention, *inputs)[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_lazy_negation_is_seen(impl: str, position: int) -> None:
    """`x.conj().imag` is minus what stands in memory."""
    inputs = [torch.randn(1, 2, n, 8) for n in (5, 40, 40)]
    lazy = list(inputs)
    lazy[position] = torch.complex(torch.zeros_like(inputs[position]), -inputs[position]).conj().imag
    assert lazy[position].is_neg()
    for a, b in zip(_bits(impl, *lazy), _bits(impl, *inputs), strict=True):
        torch.testing.assert_close(a, b)
    alpha = torch.complex(torch.zeros(1), torch.full((1,), -0.5)).conj().imag
    torch.testing.assert_close(ck.intention(*inputs, alpha, impl=impl), ck.intention(*inputs, 0.5, impl=impl))


def test_more_than_65535_heads(impl: str) -> None:
    q, k, v = (torch.randn(66_000, 1, n, 2) for n in (1, 3, 3))
    wanted = oracles.intention(q.double(), k.double(), v.double(), 1.0)
    assert (ck.intention(q, k, v, 1.0, form="primal", impl=impl) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("width, value_width", [(1, 1), (3, 5), (7, 1), (17, 31), (64, 8), (100, 3), (129, 40), (300, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_widths(impl: str, dtype: torch.dtype, width: int, value_width: int) -> None:
    q, k, v = (torch.randn(1, 2, n, w, dtype=dtype) for n, w in ((3, width), (77, width), (77, value_width)))
    wide = tuple(t.double() for t in (q, k, v))
    out = ck.intention(q, k, v, 5.0, form="primal", impl=impl)
    assert row_error(out, oracles.intention(*wide, 5.0)).max() < (1e-12 if dtype == torch.float64 else 2e-5)


def _read_off(rows: int):
    """A ridge regression over `rows` keys, read off at one point; its gradient to alpha and to the query."""
    k, v = torch.randn(1, 1, rows, 32), torch.randn(1, 1, rows, 32)
    q, alpha = torch.randn(1, 1, 1, 32, requires_grad=True), torch.ones((), requires_grad=True)
    return lambda: torch.autograd.grad(ck.intention(q, k, v, alpha, impl="native").sum(), (q, alpha))


def test_constant_memory() -> None:
    """A million keys, forward and backward: nothing of size N beside what was asked for."""
    few, many = (measure.peak_memory(_read_off, rows, warm_up=(1000,)).extra / 2**20 for rows in (10_000, 1_000_000))
    assert many < few + 1.0, f"{few:.1f} MiB, {many:.1f} MiB"


# ---- P6: what a solve is worth


def _conditioned(systems: int, width: int, condition: float, dtype: torch.dtype) -> Tensor:
    basis = torch.linalg.qr(torch.randn(systems, width, width, dtype=torch.float64))[0]
    return ((basis * torch.logspace(0, -math.log10(condition), width, dtype=torch.float64)) @ basis.mT).to(dtype)


@pytest.mark.parametrize("width", [2, 16, 33, 64, 100])
@pytest.mark.parametrize("exponent", range(1, 13))
def test_lapack_ratio(impl: str, exponent: int, width: int) -> None:
    for alpha in (0.0, 1e-14, 1e-3):
        matrix, rhs = _conditioned(5, width, 10.0**exponent, torch.float64), torch.randn(5, width, 3, dtype=torch.float64)
        weight, info = ck.regularised_solve(matrix, rhs, alpha, impl=impl)
        assert info.eq(0).all()
        assert lapack_ratio(matrix + alpha * torch.eye(width, dtype=torch.float64), weight, rhs).max() < 5, "LAPACK's limit is 30"


@pytest.mark.parametrize("dtype, sound, doubtful", [(torch.float32, 1e3, 1e7), (torch.float64, 1e12, 1e15)])
@pytest.mark.parametrize("width", [3, 16, 64, 80])
def test_info_tells_failed_from_ill_conditioned(impl: str, width: int, dtype: torch.dtype, sound: float, doubtful: float) -> None:
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
