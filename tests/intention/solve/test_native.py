"""The batched solve in C++ against float64, for every instruction set, width, layout and kind of bad matrix.

Both of its paths are tested: one matrix at a time, and one matrix in each vector lane.
"""

from __future__ import annotations

import itertools
import math
import mmap
import tempfile
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from cmab_kernels.intention.solve.contract import RegularisedSolve

native = pytest.importorskip(
    "cmab_kernels.intention.solve.native", reason="the extension was not built", exc_type=ImportError
)

DTYPES = [torch.float64, torch.float32]
USUAL = 5.0
"""The largest ratio of a residual that is accepted here; LAPACK's own tests accept 30."""


pytestmark = pytest.mark.usefixtures("threads")


def _gram(count: int, width: int, dtype: torch.dtype) -> Tensor:
    keys = torch.randn(count, width, width + 4, dtype=torch.float64)
    return (keys @ keys.mT / width).to(dtype)


def _case(count: int, width: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _gram(count, width, dtype),
        torch.randn(count, width, columns, dtype=torch.float64).to(dtype),
        torch.rand(count, dtype=torch.float64).to(dtype),
    )


def _regularised(gram: Tensor, alpha: Tensor) -> Tensor:
    """Return the matrix of the system in float64, penalty included."""
    lower = gram.double().tril()
    return lower + lower.tril(-1).mT + alpha.double()[:, None, None] * torch.eye(gram.shape[-1], dtype=torch.float64)


def _ratio(gram: Tensor, rhs: Tensor, alpha: Tensor, weight: Tensor) -> float:
    """Return the largest ||b - A x|| / (||A|| ||x|| n eps) of any column, in the 1-norm."""
    if weight.numel() == 0:
        return 0.0
    matrix, size = _regularised(gram, alpha), weight.double().abs().sum(-2)
    residual = (rhs.double() - matrix @ weight.double()).abs().sum(-2)
    scale = matrix.abs().sum(-2).amax(-1, keepdim=True) * size * gram.shape[-1] * torch.finfo(gram.dtype).eps
    return float((residual / scale).nan_to_num(nan=math.inf).max())


def _same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    """Return whether two solutions have the same bits; the NaNs of failed matrices count as equal."""
    return torch.equal(first[1], second[1]) and torch.equal(
        first[0].nan_to_num(nan=1e30), second[0].nan_to_num(nan=1e30)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [0, 1, 3, 16, 17, 65])
def test_every_width(isa: str, dtype: torch.dtype, columns: int) -> None:
    for width in [*range(1, 71), 100, 128, 129, 200]:
        gram, rhs, alpha = _case(17 if width <= 70 else 2, width, columns, dtype)
        weight, info = native.regularised_solve(RegularisedSolve(gram, rhs, alpha))
        assert weight.shape == rhs.shape and weight.dtype == dtype and weight.is_contiguous()
        assert info.shape == gram.shape[:1] and info.dtype == torch.int32 and not info.any(), width
        assert _ratio(gram, rhs, alpha, weight) <= USUAL, width


def _orthogonal(width: int) -> Tensor:
    return torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q


def _reflection(width: int) -> Tensor:
    """Return an orthogonal matrix whose last column has half of its weight in one element and half spread over all."""
    column = torch.ones(width, dtype=torch.float64)
    column[0] = width**0.5
    normal = column / column.norm() - torch.eye(width, dtype=torch.float64)[-1]
    return torch.eye(width, dtype=torch.float64) - 2 * torch.outer(normal, normal) / (normal @ normal).clamp(min=1e-300)


def _spectra(width: int, condition: float) -> dict[str, Tensor]:
    one_small, one_large = (
        torch.ones(width, dtype=torch.float64),
        torch.full((width,), 1 / condition, dtype=torch.float64),
    )
    one_small[-1], one_large[0] = 1 / condition, 1
    return {
        "geometric": torch.logspace(0, -math.log10(condition), width, dtype=torch.float64),
        "arithmetic": torch.linspace(1, 1 / condition, width, dtype=torch.float64),
        "one small": one_small,
        "one large": one_large,
    }


@cache
def _matrices(width: int, exponent: int) -> tuple[list[str], Tensor]:
    """Return positive definite matrices of many kinds, (kinds, width, width),
    with condition numbers of about 10^exponent."""
    names, batch = zip(*_kinds(width, 10.0**exponent), strict=True)
    return list(names), torch.stack(batch)


@cache
def _with_condition(width: int, exponent: int, dtype: torch.dtype) -> tuple[list[str], Tensor, list[float]]:
    """Return the matrices in `dtype`, and their condition numbers after rounding,
    in the 1-norm; NaN for singular ones."""
    names, batch = _matrices(width, exponent)
    gram = batch.to(dtype)
    inverse, failure = torch.linalg.inv_ex(gram.double())
    condition = gram.double().abs().sum(-2).amax(-1) * inverse.abs().sum(-2).amax(-1)
    return names, gram, torch.where(failure == 0, condition, math.nan).tolist()


def _kinds(width: int, condition: float) -> Iterator[tuple[str, Tensor]]:
    for name, spectrum in _spectra(width, condition).items():
        for basis, q in ("random", _orthogonal(width)), ("reflected", _reflection(width)):
            yield f"{name}, {basis}", (q * spectrum) @ q.mT
        yield f"{name}, diagonal", torch.diag(spectrum[torch.randperm(width)])
    grade = torch.logspace(0, -math.log10(condition) / 2, width, dtype=torch.float64)
    well = _gram(1, width, torch.float64)[0] + 0.1 * torch.eye(width, dtype=torch.float64)
    yield "graded", grade[:, None] * well * grade
    yield "graded upwards", grade.flip(0)[:, None] * well * grade.flip(0)
    sine, cosine = math.sin(1.2), math.cos(1.2)
    kahan = torch.eye(width, dtype=torch.float64) - cosine * torch.ones(width, width, dtype=torch.float64).triu(1)
    kahan = (sine ** torch.arange(width, dtype=torch.float64))[:, None] * kahan
    yield "Kahan", kahan.mT @ kahan
    yield "Kahan, transposed", kahan @ kahan.mT
    number = torch.arange(1.0, width + 1, dtype=torch.float64)
    yield "Hilbert", 1 / (number[:, None] + number - 1) + torch.eye(width, dtype=torch.float64) / condition
    yield "min(i, j)", torch.minimum(number[:, None], number)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 33, 64, 70])
@pytest.mark.parametrize("alpha", [0.0, 1e-12, 1e-3])
def test_the_residual_is_small_for_any_condition(isa: str, dtype: torch.dtype, width: int, alpha: float) -> None:
    for exponent in range(1, 13 if dtype == torch.float64 else 7):
        names, batch = _matrices(width, exponent)
        gram = batch[["Kahan" not in name for name in names]].to(dtype)  # these have condition numbers of their own
        rhs = torch.randn(len(gram), width, 4, dtype=torch.float64).to(dtype)
        alphas = torch.full((len(gram),), alpha, dtype=dtype)
        weight, info = native.regularised_solve(RegularisedSolve(gram, rhs, alphas))
        assert (info != 1).all()
        assert _ratio(gram, rhs, alphas, weight) <= USUAL, exponent


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 5, 16, 33, 64, 70])
@pytest.mark.parametrize("scale", [1.0, 2.0**-50, 2.0**50])
def test_the_condition_is_judged(isa: str, dtype: torch.dtype, width: int, scale: float) -> None:
    """The estimated condition number is a lower bound within a factor of ten.

    So `info` is 0 below the limit, and not 0 from ten times the limit on.
    """
    eps = torch.finfo(dtype).eps
    seen = set()
    for exponent in range(1, 16 if dtype == torch.float64 else 9):
        names, gram, conditions = _with_condition(width, exponent, dtype)
        _, info = native.regularised_solve(RegularisedSolve(gram * scale, gram[..., :0], gram.new_zeros(len(gram))))
        for name, condition, verdict in zip(names, conditions, info.tolist(), strict=True):
            if condition * eps < 0.9e-2:
                assert verdict == 0, (name, condition)
            if not condition * eps <= 1e-1:
                assert verdict != 0, (name, condition)
            assert verdict != 1 or not condition * eps <= 1e-2, (name, condition)
            seen.add(verdict)
    assert {0, 2} <= seen or width == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 64, 80])
def test_the_norm_is_that_of_whole_columns(isa: str, dtype: torch.dtype, width: int) -> None:
    """The norm of an arrow matrix is the norm of its first column, and almost the whole column lies below the
    diagonal."""
    arrow = torch.eye(width, dtype=torch.float64)
    arrow[0, 1:] = arrow[1:, 0] = (1 - (1 + width**0.5) ** 2 / 6e-2 * torch.finfo(dtype).eps) / (width - 1) ** 0.5
    gram = arrow.to(dtype)
    assert 2.5e-2 < torch.linalg.cond(gram.double(), p=1) * torch.finfo(dtype).eps < 3.5e-2
    for count in (1, 16):
        many = gram.expand(count, -1, -1)
        assert native.regularised_solve(RegularisedSolve(many, many, gram.new_zeros(count)))[1].eq(2).all()


@pytest.mark.parametrize("width", [3, 16, 40, 64, 80])
def test_condition_1e8_in_float32_has_no_digit(isa: str, width: int) -> None:
    q = _orthogonal(width)
    for name, spectrum in _spectra(width, 1e8).items():
        gram = ((q * spectrum) @ q.mT)[None]
        for dtype, right in (torch.float32, (1, 2)), (torch.float64, (0,)):
            info = native.regularised_solve(
                RegularisedSolve(gram.to(dtype), gram.to(dtype), gram.new_zeros(1, dtype=dtype))
            )[1]
            assert info.item() in right, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 7, 32, 64, 90])
def test_rank_deficient(isa: str, dtype: torch.dtype, width: int) -> None:
    few = torch.randn(width // 2, width, dtype=torch.float64).to(dtype)
    twice = torch.randn(2 * width, width, dtype=torch.float64).to(dtype)
    twice[:, -1] = twice[:, 0]
    gram = torch.stack(
        [few.mT @ few, twice.mT @ twice, torch.zeros(width, width, dtype=dtype), torch.ones(width, width, dtype=dtype)]
    )
    rhs = torch.randn(len(gram), width, 3, dtype=dtype)
    info = native.regularised_solve(RegularisedSolve(gram, rhs, torch.zeros(len(gram), dtype=dtype)))[1]
    assert (info != 0).all()
    alpha = torch.ones(len(gram), dtype=dtype)
    weight, info = native.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    assert (info == 0).all() and _ratio(gram, rhs, alpha, weight) <= USUAL


def _negative(gram: Tensor) -> None:
    gram.neg_()


def _indefinite_at_the_end(gram: Tensor) -> None:
    gram[-1, -1] = -1


def _set(row: int, column: int, value: float) -> Callable[[Tensor], None]:
    def spoil(gram: Tensor) -> None:
        gram[row, column] = value

    return spoil


SPOILED = {
    "negative definite": _negative,
    "indefinite": _indefinite_at_the_end,
    "NaN": _set(-1, 0, math.nan),
    "NaN on the diagonal": _set(0, 0, math.nan),
    "inf": _set(-1, 0, math.inf),
    "inf on the diagonal": _set(-1, -1, math.inf),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SPOILED)
@pytest.mark.parametrize("width", [2, 16, 33, 64, 70, 129])
def test_a_bad_matrix_leaves_its_neighbours_alone(isa: str, dtype: torch.dtype, kind: str, width: int) -> None:
    gram, rhs, alpha = _case(19, width, 5, dtype)
    right = native.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    for at in (0, 7, 18):
        spoiled = gram.clone()
        SPOILED[kind](spoiled[at])
        weight, info = native.regularised_solve(RegularisedSolve(spoiled, rhs, alpha))
        others = torch.arange(19) != at
        assert weight[at].isnan().all() and info[at] == 1
        assert torch.equal(weight[others], right[0][others]) and not info[others].any()
        alpha_too = alpha.clone()
        alpha_too[at] = math.nan
        weight, info = native.regularised_solve(RegularisedSolve(gram, rhs, alpha_too))
        assert weight[at].isnan().all() and info[at] == 1 and torch.equal(weight[others], right[0][others])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("width", [3, 16, 65])
def test_a_bad_right_hand_side_stays_in_its_column(isa: str, bad: float, width: int) -> None:
    gram, rhs, alpha = _case(17, width, 20, torch.float64)
    right = native.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    rhs[16, 1, 6] = bad
    weight, info = native.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    assert not info.any() and not weight[16, :, 6].isfinite().any()
    weight[16, :, 6] = right[0][16, :, 6]
    assert torch.equal(weight, right[0])


@pytest.mark.parametrize("width", [1, 17, 65])
def test_an_infinity_over_a_number(isa: str, width: int) -> None:
    """An infinity in the last row stays an infinity, although systems are padded there."""
    for count, columns in itertools.product((1, 16), (1, 2)):
        rhs = torch.zeros(count, width, columns)
        rhs[:, -1] = math.inf
        weight, _ = native.regularised_solve(
            RegularisedSolve((4 * torch.eye(width)).expand(count, -1, -1), rhs, torch.zeros(count))
        )
        assert (weight[:, -1] == math.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 5, 17, 64, 67])
def test_only_the_lower_triangle_is_read(isa: str, dtype: torch.dtype, width: int) -> None:
    gram, rhs, alpha = _case(18, width, 3, dtype)
    right = native.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    above = torch.ones(width, width).triu(1).bool()
    for garbage in (math.nan, math.inf, -1e30):
        plain = gram.masked_fill(above, garbage)
        assert _same(native.regularised_solve(RegularisedSolve(plain, rhs, alpha)), right)
        assert _same(native.regularised_solve(RegularisedSolve(plain.mT.contiguous().mT, rhs, alpha)), right)
    assert (
        native.regularised_solve(RegularisedSolve(gram.mT.masked_fill(above, math.nan).mT, rhs, alpha))[0].isnan().all()
    )


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns inside": lambda t: t.mT.contiguous().mT,
    "step 2": lambda t: torch.stack([t, torch.full_like(t, math.nan)], -1).flatten(-2)[..., ::2],
    "rows of step 2": lambda t: torch.stack([t, torch.full_like(t, math.nan)], 2).flatten(1, 2)[:, ::2],
    "offset 1": lambda t: torch.cat([t.new_full((1,), math.nan), t.flatten()])[1:].view(t.shape),
    "offset 3": lambda t: torch.cat([t.new_full((3,), math.nan), t.flatten()])[3:].view(t.shape),
    "batch inside": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 19])
def test_layouts_change_no_bit(isa: str, layout: str, dtype: torch.dtype, columns: int) -> None:
    for width in (1, 3, 16, 29, 64, 66):
        gram, rhs, alpha = _case(18, width, columns, dtype)
        right = native.regularised_solve(RegularisedSolve(gram, rhs, alpha))
        move = LAYOUTS[layout]
        assert _same(native.regularised_solve(RegularisedSolve(move(gram), rhs, alpha)), right)
        assert _same(native.regularised_solve(RegularisedSolve(gram, move(rhs), alpha)), right)
        assert _same(
            native.regularised_solve(
                RegularisedSolve(gram, rhs, torch.stack([alpha, torch.full_like(alpha, math.nan)], -1)[:, 0])
            ),
            right,
        )


@pytest.mark.parametrize("width", [4, 16, 65])
def test_expanded_operands(isa: str, width: int) -> None:
    gram, rhs, alpha = _case(1, width, 3, torch.float64)
    one, column = rhs.new_ones(()), rhs[..., :1]
    for spread in (
        (gram.expand(20, -1, -1), rhs.expand(20, -1, -1), alpha.expand(20)),
        (
            gram.expand(20, -1, -1),
            column.expand(20, -1, 7),
            one.expand(20),
        ),
    ):
        weight, info = native.regularised_solve(RegularisedSolve(*spread))
        assert _same(
            (weight, info),
            native.regularised_solve(
                RegularisedSolve(*(t.clone(memory_format=torch.contiguous_format) for t in spread))
            ),
        )
        assert (weight == weight[:1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 5, 40])
def test_same_bits_in_any_batch(isa: str, dtype: torch.dtype, columns: int) -> None:
    """A matrix takes another path alone than in a batch, and must have the same bits."""
    for width in (1, 2, 5, 16, 23, 32, 50, 63, 64, 65):
        gram, rhs, alpha = _case(40, width, columns, dtype)
        alpha[::3] = 0
        gram[5] = gram[5, :, :1] * gram[5, :1] / gram[5, 0, 0]  # of rank 1
        right = native.regularised_solve(RegularisedSolve(gram, rhs, alpha))
        for count in (1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40):
            for first in {0, 1, 5, 40 - count} if count < 40 else {0}:
                part = slice(first, first + count)
                ours = native.regularised_solve(RegularisedSolve(gram[part], rhs[part], alpha[part]))
                assert _same(ours, (right[0][part], right[1][part])[: len(ours)]), (width, count)


@pytest.mark.parametrize("columns", [1, 2, 3, 20, 33])
def test_same_bits_for_every_column(isa: str, columns: int) -> None:
    for width in (3, 16, 40, 64, 65, 100):
        gram, rhs, alpha = _case(16, width, columns, torch.float32)
        right, _ = native.regularised_solve(RegularisedSolve(gram, rhs, alpha))
        for column in range(columns):
            for part in slice(0, 1), slice(None):
                alone, _ = native.regularised_solve(
                    RegularisedSolve(gram[part], rhs[part, :, column : column + 1], alpha[part])
                )
                assert torch.equal(alone, right[part, :, column : column + 1]), (width, column)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, count", [(8, 3000), (32, 300), (64, 90), (65, 70), (200, 9)])
def test_same_bits_for_any_threads(dtype: torch.dtype, width: int, count: int, threads: Callable[[int], None]) -> None:
    gram, rhs, alpha = _case(count, width, width, dtype)
    threads(1)
    right = native.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    for team in (2, 4, 2):
        threads(team)
        assert _same(native.regularised_solve(RegularisedSolve(gram, rhs, alpha)), right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count, columns", [(0, 4), (0, 0), (3, 0), (20, 0)])
def test_empty_extents(isa: str, dtype: torch.dtype, count: int, columns: int) -> None:
    gram, rhs, alpha = _case(count, 6, columns, dtype)
    if count:
        gram[1].neg_()
    weight, info = native.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    assert weight.shape == (count, 6, columns) and info.tolist() == [int(i == 1) for i in range(count)]


@pytest.mark.parametrize("exponent", [-37, -30, 30, 37])
@pytest.mark.parametrize("width", [1, 16, 33, 70])
def test_sizes_near_the_ends_of_the_range(isa: str, exponent: int, width: int) -> None:
    gram, rhs, alpha = _case(17, width, 2, torch.float32)
    gram += torch.eye(width)
    right, _ = native.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    scale = 2.0 ** int(exponent * math.log2(10))
    weight, info = native.regularised_solve(RegularisedSolve(gram * scale, rhs * scale, alpha * scale))
    assert not info.any() and torch.allclose(weight, right, rtol=1e-4, atol=1e-5)


def test_more_than_65535_matrices() -> None:
    gram, rhs, alpha = _case(70_001, 2, 1, torch.float32)
    weight, info = native.regularised_solve(RegularisedSolve(gram, rhs, alpha + 1))
    assert not info.any() and _ratio(gram, rhs, alpha + 1, weight) <= USUAL


@pytest.mark.parametrize("far", [0, 1, 2])
@pytest.mark.parametrize("count", [2, 9])
def test_offsets_beyond_32_bits(far: int, count: int) -> None:
    """Elements lie 2^31 apart in one dimension: an offset of 32 bits would wrap.

    Memory between them is reserved and never touched.
    """
    shape, strides = (count, 2, 2), [5, 2, 1]
    strides[far] = 2**31 // (count - 1) if far == 0 else 2**31
    with tempfile.TemporaryFile() as sparse:
        sparse.truncate((2**31 + 64) * 4)
        memory = torch.frombuffer(mmap.mmap(sparse.fileno(), 0), dtype=torch.float32)
        gram, rhs, alpha = _case(count, 2, 2, torch.float32)
        right = native.regularised_solve(RegularisedSolve(gram, rhs, alpha))
        spread = memory.as_strided(shape, strides)
        assert _same(native.regularised_solve(RegularisedSolve(spread.copy_(gram), rhs, alpha)), right)
        assert _same(native.regularised_solve(RegularisedSolve(gram, spread.copy_(rhs), alpha)), right)
        del memory, spread


def test_what_is_not_supported() -> None:
    gram = torch.zeros(1, 2, 2)
    assert native.unsupported(gram, gram) is None
    assert "meta" in native.unsupported(gram.to("meta"), gram)
    assert "bfloat16" in native.unsupported(gram.bfloat16(), gram)
