# mypy: disable-error-code="no-untyped-def"
"""The solution X of (A + alpha I) X = B for each matrix of a batch, in the dtype of A.

A + alpha I is factored STEP lines of L' at a time: first the lines above are eliminated from a tile of lines, then the
tile's own lines, one after the other. L is kept in a square of scratch memory, with L' above the diagonal and 1 / l_kk
on it. Substitutions with L and with L' then read the same lines of the square, and are the same elimination. A tile
holds lines as columns, and a thread has whole rows of it.

The right-hand sides are the columns of [s I, B], with s the largest diagonal element. The largest sum of magnitudes in
a column of the solution of s I is s times the 1-norm of the inverse, so the condition number is exact and not an
estimate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....runtime.constants import ILL_CONDITIONED, INFO_ILL_CONDITIONED, INFO_NOT_POSITIVE_DEFINITE, INFO_SOUND
from ....runtime.triton_launch import kernel, on_device
from ..contract import RegularisedSolve
from .launch import options, scratch_for

STEP = tl.constexpr(16)
"""The lines of a tile."""

LIMIT = tl.constexpr(ILL_CONDITIONED)
SOUND, FAILED, DOUBTFUL = (
    tl.constexpr(code) for code in (INFO_SOUND, INFO_NOT_POSITIVE_DEFINITE, INFO_ILL_CONDITIONED)
)


@triton.jit
def _tile(base, line, line_stride, column, column_stride, COLUMNS: tl.constexpr):
    """Pointers to STEP lines, from line `line` and column `column` on."""
    lines, columns = (line + tl.arange(0, STEP)).to(tl.int64), (column + tl.arange(0, COLUMNS)).to(tl.int64)
    return base + (lines[None, :] * line_stride + columns[:, None] * column_stride)


@triton.jit
def _store(pointers, tile, mask):
    """Store a tile to scratch memory once all threads have read what was there, and let all threads see it."""
    tl.debug_barrier()
    tl.store(pointers, tile, mask=mask)
    tl.debug_barrier()


@triton.jit
def _eliminate(tile, square, solved, columns, k, first, last, PITCH: tl.constexpr):
    """Eliminate the solved lines from `first` up to `last`, which have `columns` columns, from lines k, k + 1, ..."""
    column = tl.arange(0, tile.shape[0])
    for m in range(first, last):
        factors = tl.load(square + (tl.cast(m, tl.int64) * PITCH + k) + tl.arange(0, STEP).to(tl.int64))
        known = tl.load(solved + tl.cast(m, tl.int64) * PITCH + column.to(tl.int64), mask=column < columns, other=0.0)
        tile -= known[:, None] * factors[None, :]
    return tile


@triton.jit
def _line(tile, J: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, STEP)[None, :] == J, tile, 0.0), 1)


@triton.jit
def _solve_line(tile, solved, factors, J: tl.constexpr, FORWARD: tl.constexpr):
    """Replace line J of a tile by `solved`, and eliminate it from the lines after it, or before it.

    The other lines are not touched, because 0 times an infinity is NaN.
    """
    line = tl.arange(0, STEP)[None, :]
    left = line > J if FORWARD else line < J
    solved = solved[:, None]
    return tl.where(line == J, solved, tl.where(left, tile - solved * factors, tile))


@triton.jit
def _substitute(tile, square, k, PITCH: tl.constexpr, FORWARD: tl.constexpr):
    """Solve lines k, k + 1, ... for the block of L, or of L', on the diagonal."""
    for step in tl.static_range(STEP):
        j = step if FORWARD else STEP - 1 - step
        block = square + (tl.cast(k + j, tl.int64) * PITCH + k)
        factors = tl.load(block + tl.arange(0, STEP).to(tl.int64))
        tile = _solve_line(tile, _line(tile, j) * tl.load(block + j), factors[None, :], j, FORWARD)
    return tile


@triton.jit
def _factor_lines(tile, k):
    """Lines k, k + 1, ... of L' by Cholesky, with 1 / l_kk on the diagonal.

    That is NaN, infinity or 0 if the pivot is not positive and finite.
    """
    number, every_row = tl.arange(0, STEP)[None, :], tl.zeros([tile.shape[0]], tl.int32)
    reciprocals = tl.zeros_like(tile)
    for j in tl.static_range(STEP):
        line = _line(tile, j)
        factors = tl.gather(line, k + tl.arange(0, STEP), 0)  # the diagonal block is symmetric
        reciprocal = tl.rsqrt(tl.gather(line, k + j + every_row, 0))
        tile = _solve_line(tile, line * reciprocal, factors[None, :] * reciprocal[:, None], j, True)
        reciprocals = tl.where(number == j, reciprocal[:, None], reciprocals)
    return tl.where(tl.arange(0, tile.shape[0])[:, None] == k + number, reciprocals, tile)


@triton.jit
def _lines_of_matrix(gram, row_stride, column_stride, k, D, alpha, COLUMNS: tl.constexpr):
    """Lines k, k + 1, ... of A + alpha I, from the lower triangle of A; zeros beyond line and column D."""
    line, column = (k + tl.arange(0, STEP))[None, :], tl.arange(0, COLUMNS)[:, None]
    below, above = tl.maximum(line, column), tl.minimum(line, column)
    pointers = gram + (below.to(tl.int64) * row_stride + above.to(tl.int64) * column_stride)
    tile = tl.load(pointers, mask=below < D, other=0.0)
    return tl.where((line == column) & (line < D), tile + alpha, tile)


@triton.jit
def _factor(
    gram,
    strides,
    alpha,
    root,
    square,
    scratch_strides,
    D,
    end,
    PITCH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Write L and L' to the square; return (the 1-norm of A + alpha I over root^2, whether it is positive definite)."""
    _, row_stride, column_stride = strides
    pitch, unit = scratch_strides
    column = tl.arange(0, COLUMNS)[:, None]
    norm = tl.full((), 0.0, DTYPE)
    for k in range(0, end, STEP):
        line = (k + tl.arange(0, STEP))[None, :]
        tile = _lines_of_matrix(gram, row_stride, column_stride, k, D, alpha, COLUMNS)
        norm = tl.maximum(norm, tl.max(tl.sum(tl.abs(tile) / root, 0), 0) / root)
        tile = tl.where((line == column) & (line >= D), 1.0, tile)
        tile = _factor_lines(_eliminate(tile, square, square, end, k, 0, k, PITCH), k)
        above = (column >= line) & (column < end)
        _store(_tile(square, k, pitch, 0, unit, COLUMNS), tile, above)
        _store(_tile(square, k, unit, 0, pitch, COLUMNS), tile, above)
    number = tl.arange(0, COLUMNS)
    reciprocals = tl.load(square + number.to(tl.int64) * (PITCH + 1), mask=number < D, other=1.0)
    failures = tl.sum(tl.where((reciprocals > 0.0) & (reciprocals < float("inf")), 0, 1), 0)
    return norm, (failures == 0) & (alpha >= 0.0)


@triton.jit
def _solve_sides(
    rhs,
    strides,
    weight,
    square,
    solved,
    scratch_strides,
    first,
    shape,
    scale,
    sound,
    PITCH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Solve columns of [s I, B] from `first` on, and write those of X to `weight`, as NaN if the matrix is not `sound`.

    Return the largest sum of magnitudes in a column that solves s I, or infinity for a NaN.
    """
    _, row_stride, column_stride = strides
    pitch, unit = scratch_strides
    D, E, end = shape
    column = first + tl.arange(0, COLUMNS)
    given = ((column >= D) & (column < D + E))[:, None]
    for k in range(0, end, STEP):
        line = (k + tl.arange(0, STEP))[None, :]
        tile = tl.load(_tile(rhs, k, row_stride, first - D, column_stride, COLUMNS), mask=given & (line < D), other=0.0)
        tile = tl.where((line == column[:, None]) & (line < D), scale, tile)
        tile = _substitute(_eliminate(tile, square, solved, COLUMNS, k, 0, k, PITCH), square, k, PITCH, True)
        tile = tl.where(line < D, tile, 0.0)  # an infinity has left NaNs beyond
        _store(_tile(solved, k, pitch, 0, unit, COLUMNS), tile, None)
    sums = tl.zeros([COLUMNS], DTYPE)
    for back in range(0, end, STEP):
        k = end - STEP - back
        line = (k + tl.arange(0, STEP))[None, :]
        tile = tl.load(_tile(solved, k, pitch, 0, unit, COLUMNS))
        tile = _substitute(_eliminate(tile, square, solved, COLUMNS, k, k + STEP, end, PITCH), square, k, PITCH, False)
        _store(_tile(solved, k, pitch, 0, unit, COLUMNS), tile, None)
        sums += tl.sum(tl.abs(tile), 1)
        tl.store(
            _tile(weight, k, E, first - D, unit, COLUMNS), tl.where(sound, tile, float("nan")), mask=given & (line < D)
        )
    return tl.max(tl.where(column < D, tl.where(sums == sums, sums, float("inf")), 0.0), 0)


@kernel("gram", "rhs", "alpha")
def _solve(
    gram,
    rhs,
    alpha,
    weight,
    info,
    scratch,
    strides: tl.int64,
    systems: tl.int32,
    D: tl.int32,
    E: tl.int32,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Solve the systems p, p + n, p + 2 n, ... as program p of n.

    Triton gives a thread whole rows of a tile, because the strides of tiles are not known when it compiles.
    """
    PITCH: tl.constexpr = SIZE + COLUMNS
    gram_strides, rhs_strides, alpha_strides, scratch_strides = strides
    square = scratch + tl.program_id(0).to(tl.int64) * (SIZE * PITCH)
    shape = (D, E, tl.cdiv(D, STEP) * STEP)
    number = tl.arange(0, SIZE)
    for system in range(tl.program_id(0), systems, tl.num_programs(0)):
        matrix = tl.cast(system, tl.int64)
        own, sides = gram + matrix * gram_strides[0], rhs + matrix * rhs_strides[0]
        penalty = tl.load(alpha + matrix * alpha_strides[0])
        diagonal = tl.load(own + number.to(tl.int64) * (gram_strides[1] + gram_strides[2]), mask=number < D, other=0.0)
        scale = tl.max(diagonal, 0) + penalty
        root = tl.sqrt(scale)
        norm, sound = _factor(
            own, gram_strides, penalty, root, square, scratch_strides, D, shape[2], PITCH, COLUMNS, DTYPE
        )
        inverse = tl.full((), 0.0, DTYPE)
        for first in range(0, D + E, COLUMNS):
            largest = _solve_sides(
                sides,
                rhs_strides,
                weight + matrix * D * E,
                square,
                square + SIZE,
                scratch_strides,
                first,
                shape,
                scale,
                sound,
                PITCH,
                COLUMNS,
                DTYPE,
            )
            inverse = tl.maximum(inverse, largest)
        told = tl.where(norm * inverse * EPSILON <= LIMIT, SOUND, DOUBTFUL)
        tl.store(info + matrix, tl.where(sound, told, FAILED))


def regularised_solve(inputs: RegularisedSolve) -> tuple[Tensor, Tensor]:
    """Return (weight, info): weight = (gram + alpha I)^-1 rhs, from the lower triangle of gram; info as in `native`."""
    gram, rhs, alpha, _ = inputs
    weight, info = rhs.new_empty(rhs.shape), rhs.new_empty(rhs.shape[:1], dtype=torch.int32)
    if info.numel():
        chosen = options(gram)
        scratch = scratch_for(gram, chosen["SIZE"], chosen["COLUMNS"])
        strides = (gram.stride(), rhs.stride(), alpha.stride(), scratch.stride()[1:])
        with on_device(gram):
            _solve(scratch.shape[0], gram, rhs, alpha, weight, info, scratch, strides, *rhs.shape, **chosen)
    return weight, info
