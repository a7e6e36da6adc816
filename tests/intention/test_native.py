"""The streams over rows in C++ against their formulas in float64: every instruction set,
type and layout, borders of blocks and runs."""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cmab_kernels.intention.contract import ApplyRows, Gram, GramBackward
from cmab_kernels.measure import peak_memory

native = pytest.importorskip(
    "cmab_kernels.intention.native", reason="the extension was not built", exc_type=ImportError
)

BOTH = (True, True)
ALL = (True, True, True)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# The error allowed, relative to the sum of the sizes of an element's terms. Sums are in the second type; rows are
# rounded to the first.
SUMS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}
ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


pytestmark = pytest.mark.usefixtures("threads")


class Case(NamedTuple):
    key: Tensor
    value: Tensor
    weights: Tensor | None = None
    mask: Tensor | None = None


def _case(
    batch: int, heads: int, keys: int, width: int, value_width: int, dtype: torch.dtype, weighted: bool = False
) -> Case:
    """Return random rows whose columns have different means, so that sums of many keys do not cancel."""
    key, value = (
        (torch.randn(batch, heads, keys, w, dtype=torch.float64) + torch.linspace(-2, 2, w, dtype=torch.float64)).to(
            dtype
        )
        for w in (width, value_width)
    )
    weights = torch.rand(batch, heads, keys, dtype=native.state_dtype(dtype)) if weighted else None
    return Case(key, value, weights)


def _present(rows: Tensor, mask: Tensor | None) -> Tensor:
    return rows.double() if mask is None else rows.double().masked_fill(mask[:, None, :, None], 0.0)


def _wide(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and weights (as a column) in float64, with zeros where keys are masked."""
    weights = torch.ones(case.key.shape[:-1]) if case.weights is None else case.weights
    return _present(case.key, case.mask), _present(case.value, case.mask), _present(weights.unsqueeze(-1), case.mask)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left' right, added up in parts: over 1e5 keys BLAS is off by 1e-13, ten times what is allowed here."""
    parts = zip(left.split(256, 2), right.split(256, 2), strict=True)
    return torch.stack([a.mT @ b for a, b in parts]).sum(0)


def _within(ours: Tensor, right: Tensor, sizes: Tensor, tolerance: float) -> None:
    """Check every element by itself, relative to the sizes of its terms."""
    assert ours.shape == right.shape and ours.is_contiguous()
    excess = (ours.double() - right).abs() - tolerance * sizes
    assert (excess <= 1e-300).all(), float(((ours.double() - right).abs() / sizes).nan_to_num(0.0).max())


def _check_sums(case: Case, exact: bool) -> None:
    k, v, w = _wide(case)
    gram, moment = native.gram(Gram(*case, None, BOTH, exact))
    assert gram.dtype == moment.dtype == torch.float64 and torch.equal(gram, gram.mT)
    tolerance = 1e-14 if exact else SUMS[case.key.dtype]
    _within(gram, _product(w * k, k), _product((w * k).abs(), k.abs()), tolerance)
    _within(moment, _product(w * k, v), _product((w * k).abs(), v.abs()), tolerance)


def _slopes(case: Case) -> tuple[Tensor, Tensor]:
    """Return incoming gradients that are the same for all heads, so that a slice of a batch gives the same bits."""
    width, value_width = case.key.shape[-1], case.value.shape[-1]
    make = torch.Generator().manual_seed(1)
    shapes = (*case.key.shape[:2], -1, -1)
    dgram, dmoment = (
        torch.randn(width, w, generator=make, dtype=torch.float64).expand(shapes) for w in (width, value_width)
    )
    return dgram, dmoment


def _check_gradients(case: Case, exact: bool) -> None:
    k, v, w = _wide(case)
    dgram, dmoment = _slopes(case)
    dkey, dvalue, dweights = native.gram_backward(GramBackward(dgram, dmoment, *case, None, ALL, exact))
    slope = dgram + dgram.mT
    u, y = k @ slope + v @ dmoment.mT, k @ dmoment
    u_size, y_size = k.abs() @ slope.abs() + v.abs() @ dmoment.abs().mT, k.abs() @ dmoment.abs()
    dtype, state = case.key.dtype, native.state_dtype(case.key.dtype)
    assert dkey.dtype == dvalue.dtype == dtype and dweights.dtype == state
    _within(dkey, w * u, w * u_size, 2 * ROUNDING[dtype])
    _within(dvalue, w * y, w * y_size, 2 * ROUNDING[dtype])
    sizes = ((k.abs() * u_size).sum(-1) + (v.abs() * y_size).sum(-1)) / 2
    _within(dweights, ((k * u).sum(-1) + (v * y).sum(-1)) / 2, sizes, 2 * SUMS[state])


def _check_rows(query: Tensor, weight: Tensor) -> None:
    out = native.apply_rows(ApplyRows(query, weight))
    assert out.dtype == query.dtype
    q = query.double()
    _within(out, q @ weight, q.abs() @ weight.abs(), 2 * ROUNDING[query.dtype])


def _check(case: Case) -> None:
    for exact in (False, True):
        _check_sums(case, exact)
        _check_gradients(case, exact)
    batch, heads, _, width = case.key.shape
    _check_rows(case.key, torch.randn(batch, heads, width, case.value.shape[-1], dtype=torch.float64))


def _everything(case: Case, exact: bool = False) -> list[Tensor]:
    dgram, dmoment = _slopes(case)
    return [
        *native.gram(Gram(*case, None, BOTH, exact)),
        *native.gram_backward(GramBackward(dgram, dmoment, *case, None, ALL, exact)),
        native.apply_rows(ApplyRows(case.key, dmoment)),
    ]


def _same(ours: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))


WIDTHS = [
    (1, 1),
    (3, 2),
    (8, 8),
    (9, 7),
    (16, 16),
    (17, 65),
    (24, 40),
    (33, 3),
    (64, 64),
    (65, 17),
    (80, 96),
    (130, 8),
    (5, 300),
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, value_width", WIDTHS)
def test_widths(isa: str, dtype: torch.dtype, width: int, value_width: int, weighted: bool) -> None:
    _check(_case(1, 2, 75, width, value_width, dtype, weighted))


@pytest.mark.parametrize("keys", [1, 2, 31, 32, 33, 127, 129, 511, 512, 513, 1025, 2047, 2049, 8191, 8192, 12289])
def test_borders_of_blocks_runs_and_pieces(isa: str, keys: int) -> None:
    _check(_case(1, 2, keys, 8, 5, torch.float64, weighted=True))
    _check(_case(1, 1, keys, 64, 16, torch.float32))


# In units of eps. Equal terms are all rounded in the same direction: after n of them a sum is off by up to n / 4 eps,
# and n is 128.
LAWS = {"normal": 4, "shifted": 4, "outlier": 4, "equal": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("law", LAWS)
def test_a_million_keys(dtype: torch.dtype, law: str) -> None:
    key, value, *_ = _case(1, 1, 10**6, 8, 4, dtype)
    if law == "normal":
        key, value = torch.randn_like(key), torch.randn_like(value)
    if law == "outlier":
        key[0, 0, 123_456] = 1e3
    if law == "equal":
        key, value = torch.full_like(key, 1.3), torch.full_like(value, 0.7)
    k, v, _ = _wide(Case(key, value))
    for exact, tolerance in ((False, LAWS[law] * 2.0**-23), (True, 1e-13)):
        gram, moment = native.gram(Gram(key, value, None, None, None, BOTH, exact))
        _within(gram, _product(k, k), _product(k.abs(), k.abs()), tolerance)
        _within(moment, _product(k, v), _product(k.abs(), v.abs()), tolerance)


def _poison(rows: Tensor, offset: int) -> Tensor:
    return torch.cat([rows.new_full((offset,), math.nan), rows.flatten()])[offset:].view(rows.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "keys inside": lambda t: t.transpose(-1, 2).contiguous().transpose(-1, 2),
    "step 2": lambda t: torch.stack([t, torch.full_like(t, math.nan)], -1).flatten(-2)[..., ::2],
    "rows of step 2": lambda t: torch.stack([t, torch.full_like(t, math.nan)], 3).flatten(2, 3)[:, :, ::2],
    "offset 1": lambda t: _poison(t, 1),
    "offset 3": lambda t: _poison(t, 3),
    "offset 8": lambda t: _poison(t, 8),
    "batch inside": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("width, value_width", [(8, 12), (64, 16)])
def test_layouts_change_no_bit(isa: str, layout: str, dtype: torch.dtype, width: int, value_width: int) -> None:
    plain = _case(2, 3, 200, width, value_width, dtype, weighted=True)._replace(mask=torch.rand(2, 200) < 0.1)
    assert plain.weights is not None and plain.mask is not None
    change = LAYOUTS[layout]
    weights = change(plain.weights.unsqueeze(-1)).squeeze(-1)
    moved = Case(change(plain.key), change(plain.value), weights, torch.stack([plain.mask, ~plain.mask], -1)[..., 0])
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    for exact in (False, True):
        assert _same(_everything(plain, exact), _everything(moved, exact))
        bare, moved_bare = (Case(case.key, case.value) for case in (plain, moved))
        assert _same(_everything(bare, exact), _everything(moved_bare, exact))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("keys", [0, 1100])
def test_interleaved_heads_of_many_runs(isa: str, keys: int, dtype: torch.dtype) -> None:
    """Heads take turns, and rows of the next run are copied meanwhile."""
    plain = _case(1, 8, keys, 64, 40, dtype)
    moved = Case(*(LAYOUTS["heads inside"](rows) for rows in plain[:2]))
    for parts in (BOTH, (True, False), (False, True)):
        assert _same(
            list(native.gram(Gram(*plain, None, parts, False))), list(native.gram(Gram(*moved, None, parts, False)))
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("inside", [(0,), (1,), (0, 1)], ids=["keys", "values", "both"])
def test_interleaved_heads_take_turns(isa: str, inside: tuple[int, ...], dtype: torch.dtype) -> None:
    """Groups of heads and pieces of rows are ragged; a piece ends within a turn; prefetching changes nothing."""
    plain = _case(2, 9, 2500, 16, 8, dtype, weighted=True)._replace(mask=torch.rand(2, 2500) < 0.3)
    moved = plain._replace(
        **{name: LAYOUTS["heads inside"](getattr(plain, name)) for name in (plain._fields[i] for i in inside)}
    )
    dgram, dmoment = torch.randn(2, 9, 16, 16, dtype=torch.float64), torch.randn(2, 9, 16, 8, dtype=torch.float64)
    assert _same(
        *(list(native.gram_backward(GramBackward(dgram, dmoment, *case, None, ALL, False))) for case in (plain, moved))
    )
    assert torch.equal(
        native.apply_rows(ApplyRows(plain.key, dmoment)), native.apply_rows(ApplyRows(moved.key, dmoment))
    )
    assert torch.equal(
        native.apply_rows(ApplyRows(plain.key.flip(1), dmoment)),
        native.apply_rows(ApplyRows(moved.key.flip(1), dmoment)),
    )


def test_slopes_of_any_layout() -> None:
    case = _case(2, 3, 50, 9, 6, torch.float32, weighted=True)
    dgram, dmoment = torch.randn(2, 3, 9, 9, dtype=torch.float64), torch.randn(2, 3, 9, 6, dtype=torch.float64)
    right = native.gram_backward(GramBackward(dgram, dmoment, *case, None, ALL, False))
    for change in (LAYOUTS["keys inside"], LAYOUTS["step 2"], LAYOUTS["batch inside"]):
        assert _same(
            list(native.gram_backward(GramBackward(change(dgram), change(dmoment), *case, None, ALL, False))),
            list(right),
        )
        assert torch.equal(
            native.apply_rows(ApplyRows(case.key, change(dmoment))), native.apply_rows(ApplyRows(case.key, dmoment))
        )
    one = torch.ones((), dtype=torch.float64)
    spread = native.gram_backward(GramBackward(one.expand(2, 3, 9, 9), one.expand(2, 3, 9, 6), *case, None, ALL, False))
    dense = native.gram_backward(
        GramBackward(torch.ones_like(dgram), torch.ones_like(dmoment), *case, None, ALL, False)
    )
    assert _same(list(spread), list(dense))


def test_expanded_operands(isa: str) -> None:
    key, value, weights, _ = _case(2, 2, 130, 16, 8, torch.float32, weighted=True)
    assert weights is not None
    _check(
        Case(key[:1].expand(2, -1, -1, -1), value[:, :1].expand(-1, 2, -1, -1), weights[:, :, :1].expand(-1, -1, 130))
    )
    _check(Case(key[:, :, :1].expand(-1, -1, 130, -1), value[..., :1].expand(-1, -1, -1, 8)))


MASKED = {
    "first run": slice(0, 512),
    "tail": slice(900, 1030),
    "all but one": slice(1, None),
    "all": slice(None),
    "none": slice(0, 0),
}


@pytest.mark.parametrize("where", MASKED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_of_an_ignored_key_is_seen(isa: str, where: str, dtype: torch.dtype, bad: float) -> None:
    case = _case(2, 2, 1030, 8, 17, dtype, weighted=True)
    assert case.weights is not None
    mask = torch.rand(2, 1030) < 0.3 if where != "none" else torch.zeros(2, 1030, dtype=torch.bool)
    mask[0, MASKED[where]] = True
    key, value = (rows.masked_fill(mask[:, None, :, None], bad) for rows in case[:2])
    for weights in (None, case.weights.masked_fill(mask[:, None], bad)):
        masked = Case(key, value, weights, mask)
        _check_sums(masked, False)
        _check_gradients(masked, False)
        dkey, dvalue, dweights = native.gram_backward(GramBackward(*_slopes(masked), *masked, None, ALL, True))
        assert all(d.movedim(2, 1)[mask].eq(0).all() for d in (dkey, dvalue, dweights))


def test_a_bad_key_stays_in_its_rows_and_columns(isa: str) -> None:
    key, value, *_ = _case(1, 2, 700, 40, 20, torch.float32)
    clean = _everything(Case(key, value))
    key[0, 0, 600, 3] = math.nan
    gram, moment, dkey, dvalue, dweights, out = _everything(Case(key, value))
    others = torch.arange(40) != 3
    assert gram[0, 0, 3].isnan().all() and gram[0, 0, :, 3].isnan().all() and moment[0, 0, 3].isnan().all()
    assert torch.allclose(gram[0, 0][others][:, others], clean[0][0, 0][others][:, others], rtol=1e-5)
    assert torch.allclose(moment[0, 0][others], clean[1][0, 0][others], rtol=1e-5)
    rows = torch.arange(700) != 600
    for ours, right in zip((dkey, dvalue, dweights, out), clean[2:], strict=True):
        assert ours[0, 0, 600].isnan().all() and torch.equal(ours[0, 0, rows], right[0, 0, rows])
        assert torch.equal(ours[0, 1], right[0, 1])


def test_weights_of_zero_and_of_one(isa: str) -> None:
    case = _case(1, 2, 600, 16, 8, torch.float32, weighted=True)
    assert case.weights is not None
    nothing = case._replace(weights=torch.zeros_like(case.weights))
    assert all(
        not t.any()
        for t in (
            *native.gram(Gram(*nothing, None, BOTH, False)),
            *native.gram_backward(GramBackward(*_slopes(nothing), *nothing, None, ALL, False))[:2],
        )
    )
    ones = case._replace(weights=torch.ones_like(case.weights))
    assert _same(_everything(ones), _everything(case._replace(weights=None)))
    some = case.weights * (torch.rand_like(case.weights) < 0.5)
    _check(case._replace(weights=some))


@pytest.mark.parametrize("size", [1e19, 1e30, 3e38])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_beyond_float32(isa: str, size: float, weighted: bool, dtype: torch.dtype) -> None:
    """A run of keys that overflows float32 is summed in float64; the other runs keep their bits."""
    case = _case(1, 1, 1200, 40, 9, dtype, weighted)
    key, value = (rows.clone() for rows in case[:2])
    key[0, 0, 700, 5], value[0, 0, 30, 3] = size, size
    if case.weights is not None:
        case.weights[0, 0, 30] = 1e38
    _check_sums(Case(key, value, case.weights), False)


@pytest.mark.parametrize("parts", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("keys", [700, 9000])
def test_parts(isa: str, parts: tuple[bool, bool], keys: int) -> None:
    case = _case(1, 2, keys, 12, 20, torch.float32, weighted=True)
    for want, mine, full in zip(
        parts, native.gram(Gram(*case, None, parts, False)), native.gram(Gram(*case, None, BOTH, False)), strict=True
    ):
        assert torch.equal(mine, full) if want else mine.shape == (0,) and mine.dtype == torch.float64


@pytest.mark.parametrize("needs", list(product([True, False], repeat=3)))
@pytest.mark.parametrize("weighted", [True, False])
def test_needs(isa: str, needs: tuple[bool, bool, bool], weighted: bool) -> None:
    case = _case(1, 2, 300, 16, 20, torch.float32, weighted)
    everything = native.gram_backward(GramBackward(*_slopes(case), *case, None, ALL, False))
    some = native.gram_backward(GramBackward(*_slopes(case), *case, None, needs, False))
    for need, mine, full in zip(needs, some, everything, strict=True):
        assert torch.equal(mine, full) if need else mine.shape == (0,) and mine.dtype == full.dtype


@pytest.mark.parametrize("extents", list(product((0, 2), (0, 2), (0, 3), (0, 5))))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_empty_extents(extents: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Batch, heads, keys or columns of the values may be empty; sums over no keys are zeros."""
    batch, heads, keys, value_width = extents
    _check(_case(batch, heads, keys, 4, value_width, dtype, weighted=True))
    _check(_case(batch, heads, keys, 4, value_width, dtype))


@pytest.mark.parametrize("keys, width, heads", [(20_000, 8, 4), (9000, 64, 1), (300, 16, 40), (5, 3, 7)])
@pytest.mark.parametrize("layout", ["plain", "heads inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_any_threads_and_alone(
    keys: int, width: int, heads: int, layout: str, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    case = _case(3, heads, keys, width, 12, dtype, weighted=True)._replace(mask=torch.rand(3, keys) < 0.1)
    if layout != "plain":
        case = case._replace(key=LAYOUTS[layout](case.key), value=LAYOUTS[layout](case.value))
    right = _everything(case)
    alone = Case(*(None if t is None else t[1:2] for t in case))
    for count in (1, 2, 3, 4, 8):
        threads(count)
        assert _same(_everything(case), right), count
        assert _same(_everything(alone), [t[1:2] for t in right]), count


def test_more_than_65535_heads(threads: Callable[[int], None]) -> None:
    case = _case(300, 220, 2, 2, 1, torch.float32)
    threads(2)
    _check(case)


def test_offsets_beyond_32_bits() -> None:
    """Rows, columns, heads or batch elements lie 2^31 elements apart: an offset of 32 bits would wrap.

    Memory between them is reserved and never touched.
    """
    plain = _case(2, 2, 2, 2, 2, torch.float32)
    with tempfile.TemporaryFile() as sparse:
        sparse.truncate((2**31 + 64) * 4)
        memory = torch.frombuffer(mmap.mmap(sparse.fileno(), 0), dtype=torch.float32)
        for dim in range(4):
            strides = [2**i for i in range(4)]
            strides[dim] = 2**31
            far = Case(
                *(
                    memory[offset:].as_strided((2, 2, 2, 2), strides).copy_(t)
                    for offset, t in ((0, plain.key), (32, plain.value))
                )
            )
            assert _same(_everything(far), _everything(plain)), dim
            del far
        del memory


def _sums_of(keys: int) -> Callable[[], tuple[Tensor, ...]]:
    key = torch.randn(1, 1, keys, 64)
    return lambda: native.gram(Gram(key, key, None, None, None, BOTH, False))


def _gradient_of(keys: int) -> Callable[[], tuple[Tensor, ...]]:
    key, slope = torch.randn(1, 1, keys, 16), torch.randn(1, 1, 16, 16, dtype=torch.float64)
    return lambda: (
        *native.gram_backward(GramBackward(slope, slope, key, key, None, None, None, ALL, False)),
        native.apply_rows(ApplyRows(key, slope)),
    )


def test_memory_beyond_results_is_constant() -> None:
    few, many = (peak_memory(_sums_of, keys, warm_up=(1000,)) for keys in (200_000, 1_000_000))
    assert many.extra - few.extra < 2**19 and many.extra < 2**22
    gradient = peak_memory(_gradient_of, 1_000_000, warm_up=(1000,))
    assert gradient.extra - gradient.results < 2**20
