# mypy: disable-error-code="no-untyped-def"
"""The projections before and after the heads of an attention layer.

One kernel computes the norm and the projections, another the output projection and the residual. A program holds a
block of rows and reads the matrices in tiles. Rows of heads are read and written in the layout of the attention
kernels. The gradient of a matrix is a sum over rows; each program stores a share of it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.triton_launch import kernel
from ...runtime.triton_products import product
from ...runtime.triton_rows import load_tile, rows_at, rows_from
from .launch import aligned, back, forward, of_matrix, shares_of_rows
from .rows import (
    back_to_columns,
    kept_rows,
    normed_piece,
    project_rows,
    residual_rows,
    row_norms,
    rows_of_heads,
    store_row_gradients,
    vector,
)
from .shares import shares_of


@triton.jit
def _store_projection(
    x,
    norm_weight,
    norm_bias,
    weight,
    bias,
    result,
    row,
    inside,
    rows,
    mean,
    factor,
    C: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store the normed rows times a matrix (M, C), TILE columns at a time."""
    for start in range(0, M, TILE):
        given = (x, norm_weight, norm_bias, weight, bias, row, inside, mean, factor)
        made = project_rows(*given, 0, start, C, M, TILE, PIECE, OPERAND, PRECISION)
        there = (row < rows)[:, None] & (start + tl.arange(0, TILE) < M)[None, :]
        tl.store(rows_at(result, row, M, TILE, start), made.to(result.dtype.element_ty), mask=there)


@kernel()
def _project(
    x,
    mask,
    norm_weight,
    norm_bias,
    first_weight,
    first_bias,
    first,
    second_weight,
    second_bias,
    second,
    third_weight,
    third_bias,
    third,
    rows: tl.int32,
    eps: tl.float64,
    C: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The projections of a block of rows, after their norm, by up to three matrices; ignored rows count as 0."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = kept_rows(mask, row, rows)
    mean, factor = row_norms(x, row, inside, eps, C, PIECE, norm_weight is not None, DTYPE)
    given = (x, norm_weight, norm_bias)
    at = (row, inside, rows, mean, factor)
    _store_projection(*given, first_weight, first_bias, first, *at, C, FIRST, TILE, PIECE, OPERAND, PRECISION)
    if second is not None:
        _store_projection(*given, second_weight, second_bias, second, *at, C, SECOND, TILE, PIECE, OPERAND, PRECISION)
    if third is not None:
        _store_projection(*given, third_weight, third_bias, third, *at, C, THIRD, TILE, PIECE, OPERAND, PRECISION)


@kernel()
def _join(
    heads,
    weight,
    bias,
    x,
    norm_weight,
    norm_bias,
    y,
    rows: tl.int32,
    length: tl.int32,
    eps: tl.float64,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """y = r + the rows of all heads times a matrix (C, HEADS WIDTH) + bias; r is x, or norm(x) if NORMED."""
    C_PAD: tl.constexpr = max(triton.next_power_of_2(C), 16)
    JOINED: tl.constexpr = HEADS * WIDTH
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < rows
    column = tl.arange(0, C_PAD)
    mean, factor = row_norms(x, row, inside, eps, C, PIECE, NORMED, DTYPE)
    result = tl.zeros([BLOCK_R, C_PAD], DTYPE)
    for start in range(0, JOINED, TILE):
        outs = load_tile(rows_of_heads(heads, row, length, HEADS, WIDTH, TILE, start), inside, JOINED, start)
        tile = load_tile(rows_from(weight, 0, C_PAD, JOINED, TILE, start), column < C, JOINED, start)
        result += product(outs, tl.trans(tile), OPERAND, PRECISION)
    result += vector(bias, C, C_PAD, DTYPE)[None, :]
    result += residual_rows(x, norm_weight, norm_bias, row, inside, mean, factor, C, C_PAD, NORMED)
    tl.store(rows_at(y, row, C, C_PAD), result.to(y.dtype.element_ty), mask=inside[:, None] & (column < C)[None, :])


@kernel()
def _part(
    dy,
    weight,
    dheads,
    rows: tl.int32,
    length: tl.int32,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The gradient of the heads that `_join` joins: dy times its matrix."""
    JOINED: tl.constexpr = HEADS * WIDTH
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < rows
    for start in range(0, JOINED, TILE):
        douts = back_to_columns(dy, weight, row, inside, start, C, JOINED, TILE, PIECE, DTYPE, OPERAND, PRECISION)
        there = inside[:, None] & (start + tl.arange(0, TILE) < JOINED)[None, :]
        tl.store(rows_of_heads(dheads, row, length, HEADS, WIDTH, TILE, start), douts.to(dheads.dtype.element_ty), mask=there)


@triton.jit
def _back_through(
    dnormed,
    dheads,
    weight,
    row,
    inside,
    length,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`dnormed` plus the gradient of heads times the matrix (HEADS WIDTH, C) that made them."""
    for start in range(0, HEADS * WIDTH, TILE):
        slopes = load_tile(rows_of_heads(dheads, row, length, HEADS, WIDTH, TILE, start), inside, HEADS * WIDTH, start)
        tile = load_tile(rows_from(weight, start, TILE, C, dnormed.shape[1]), start + tl.arange(0, TILE) < HEADS * WIDTH, C)
        dnormed += product(slopes, tile, OPERAND, PRECISION)
    return dnormed


@kernel()
def _project_back(
    x,
    mask,
    norm_weight,
    norm_bias,
    first_weight,
    first,
    second_weight,
    second,
    third_weight,
    third,
    dy,
    dx,
    dnorm_weight,
    dnorm_bias,
    rows: tl.int32,
    length: tl.int32,
    eps: tl.float64,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """dx of a block of rows from the gradients of up to three projections, and a share of the norm's gradients."""
    C_PAD: tl.constexpr = max(triton.next_power_of_2(C), 16)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = kept_rows(mask, row, rows)
    dnormed = tl.zeros([BLOCK_R, C_PAD], DTYPE)
    dnormed = _back_through(dnormed, first, first_weight, row, inside, length, C, HEADS, FIRST, TILE, OPERAND, PRECISION)
    if second is not None:
        dnormed = _back_through(dnormed, second, second_weight, row, inside, length, C, HEADS, SECOND, TILE, OPERAND, PRECISION)
    if third is not None:
        dnormed = _back_through(dnormed, third, third_weight, row, inside, length, C, HEADS, THIRD, TILE, OPERAND, PRECISION)
    mean, factor = row_norms(x, row, inside, eps, C, PIECE, norm_weight is not None, DTYPE)
    store_row_gradients(
        dnormed,
        x,
        norm_weight,
        mean,
        factor,
        dy,
        dx,
        dnorm_weight,
        dnorm_bias,
        row,
        inside,
        rows,
        tl.program_id(0),
        C,
        NORMED,
        DTYPE,
    )


@kernel()
def _matrix_gradient(
    left,
    right,
    mask,
    norm_weight,
    norm_bias,
    dweight,
    dbias,
    rows: tl.int32,
    lengths: tl.int32,
    shares: tl.int32,
    eps: tl.float64,
    M: tl.constexpr,
    LEFT: tl.constexpr,
    C: tl.constexpr,
    RIGHT: tl.constexpr,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
):
    """A share of dW = left' right, and of the sum of `left`: TILE rows and PIECE columns, over every `shares`-th block.

    `left` are rows (R, M) of LEFT heads. `right` are rows (R, C) of RIGHT heads; with one head, they are rows after
    their norm.
    """
    PIECES: tl.constexpr = triton.cdiv(C, PIECE)
    TILES: tl.constexpr = triton.cdiv(M, TILE)
    left_length, right_length = lengths
    piece = tl.program_id(0) % PIECES * PIECE
    start = tl.program_id(0) // PIECES % TILES * TILE
    share = tl.program_id(0) // PIECES // TILES
    total = tl.zeros([TILE, PIECE], DTYPE)
    sums = tl.zeros([TILE], DTYPE)
    for block in tl.range(share, tl.cdiv(rows, BLOCK_R), shares, num_stages=1):
        row = block * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = kept_rows(mask, row, rows)
        slopes = load_tile(rows_of_heads(left, row, left_length, LEFT, M // LEFT, TILE, start), inside, M, start)
        if RIGHT == 1:
            mean, factor = row_norms(right, row, inside, eps, C, PIECE, norm_weight is not None, DTYPE)
            read = normed_piece(right, norm_weight, norm_bias, row, inside, piece, mean, factor, C, PIECE)
        else:
            read = load_tile(rows_of_heads(right, row, right_length, RIGHT, C // RIGHT, PIECE, piece), inside, C, piece)
        total += product(tl.trans(slopes), read, OPERAND, PRECISION)
        sums += tl.sum(slopes.to(DTYPE), 0)
    made = start + tl.arange(0, TILE)
    if dweight is not None:
        there = (made < M)[:, None] & (piece + tl.arange(0, PIECE) < C)[None, :]
        tl.store(rows_at(dweight, share.to(tl.int64) * M + made, C, PIECE, piece), total, mask=there)
    if dbias is not None:
        tl.store(dbias + (share.to(tl.int64) * M + made), sums, mask=(made < M) & (piece == 0))


class Rows(NamedTuple):
    """Rows (B, N, C) that are normed and projected; rows that the mask (B N,) ignores count as 0."""

    x: Tensor
    mask: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    eps: float

    @property
    def number(self) -> int:
        return self.x.shape[0] * self.x.shape[1]


def rows_of(x: Tensor, mask: Tensor | None, norm: Sequence[Tensor | None], eps: float) -> Rows:
    """The rows in the form that kernels take: contiguous, with the bytes of the mask,
    and with a norm (weight, bias)."""
    given, ignored, weight, bias = aligned(x, None if mask is None else mask.contiguous().view(torch.uint8), *norm)
    return Rows(given, ignored, weight, bias, eps)


def plain_rows(x: Any) -> Rows:
    """Rows (B, N, C), or heads, without a norm and without ignored rows."""
    return Rows(x, None, None, None, 0.0)


Projection = tuple[Tensor, Tensor | None]
"""Weight (M, C) and bias (M,) or None."""


def project(rows: Rows, projections: Sequence[Projection]) -> list[Tensor]:
    """The projections (B, N, M) of the normed rows, at most three."""
    x, mask, norm_weight, norm_bias, eps = rows
    sizes = [weight.shape[0] for weight, _ in projections]
    made = [x.new_empty(*x.shape[:2], size) for size in sizes]
    absent = [None] * (3 - len(made))
    given = [t for (weight, bias), result in zip(projections, made, strict=True) for t in (*aligned(weight, bias), result)]
    FIRST, SECOND, THIRD = *sizes, *[0] * len(absent)
    run, tiles = forward(_project, x, x.shape[2], max(sizes), FIRST=FIRST, SECOND=SECOND, THIRD=THIRD)
    run(-(-rows.number // tiles.BLOCK_R), x, mask, norm_weight, norm_bias, *given, *absent * 3, rows.number, eps)
    return made


def is_normed(residual: str, norm_weight: Tensor | None) -> bool:
    """Whether a layer adds its result to its normed rows instead of the rows themselves."""
    return residual == "normed" and norm_weight is not None


def join(out: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, residual: str) -> Tensor:
    """The residual of rows x (B, L, C), plus the output projection of heads (B, H, L, E)."""
    x, _, norm_weight, norm_bias, eps = rows
    (B, H, L, E), C, y = out.shape, x.shape[2], torch.empty_like(x)
    normed = is_normed(residual, norm_weight)
    norm = (norm_weight, norm_bias) if normed else (None, None)
    run, tiles = forward(_join, x, C, H * E, HEADS=H, WIDTH=E, NORMED=normed)
    run(-(-B * L // tiles.BLOCK_R), out, *aligned(weight, bias), x, *norm, y, B * L, max(L, 1), eps)
    return y


def part(dy: Tensor, weight: Tensor, heads: int) -> Tensor:
    """The gradient of the heads (B, H, L, E) that `join` joined."""
    (B, L, C), E = dy.shape, weight.shape[1] // heads
    douts = dy.new_empty(B, heads, L, E)
    run, tiles = back(_part, dy, C, heads * E, HEADS=heads, WIDTH=E)
    run(-(-B * L // tiles.BLOCK_R), dy, *aligned(weight), douts, B * L, max(L, 1))
    return douts


def project_back(
    rows: Rows, projections: Sequence[tuple[Tensor, Tensor]], dy: Tensor | None, needs: Sequence[bool], residual: str = "input"
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of x, and shares of the gradients of its norm's weight and bias.

    They follow from weights and gradients of heads (B, H, N, D). `dy` is the gradient of the residual, or None.
    """
    x, mask, norm_weight, norm_bias, eps = rows
    sizes = [dheads.shape[3] for _, dheads in projections]
    heads, given = projections[0][1].shape[1], [t for weight, dheads in projections for t in (*aligned(weight), dheads)]
    FIRST, SECOND, THIRD = *sizes, *[0] * (3 - len(sizes))
    normed = is_normed(residual, norm_weight)
    run, tiles = back(_project_back, x, x.shape[2], heads * max(sizes), HEADS=heads, FIRST=FIRST, SECOND=SECOND, THIRD=THIRD, NORMED=normed)
    programs = -(-rows.number // tiles.BLOCK_R)
    dx = torch.empty_like(x) if needs[0] else None
    dnorm_weight, dnorm_bias = (shares_of(x, programs, x.shape[2]) if need else None for need in needs[1:])
    absent = [None] * (2 * (3 - len(projections)))
    lengths = rows.number, max(x.shape[1], 1)
    run(programs, x, mask, norm_weight, norm_bias, *given, *absent, dy, dx, dnorm_weight, dnorm_bias, *lengths, eps)
    return dx, dnorm_weight, dnorm_bias


def matrix_gradient(left: Any, right: Rows, needs: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Shares of the gradients of weight (M, C) and bias (M,) of a projection, from the gradients of its results.

    `left` and the x of `right` are rows (B, N, M) and (B, N, C), or heads (B, H, N, D) with M = H D.
    """
    if not any(needs):
        return None, None
    (LEFT, M), (RIGHT, C) = _heads(left), _heads(right.x)
    run, tiles = of_matrix(_matrix_gradient, left, M, C, LEFT=LEFT, RIGHT=RIGHT)
    count, parts = left.numel() // M, -(-M // tiles.TILE) * -(-C // tiles.PIECE)
    shares = shares_of_rows(-(-count // tiles.BLOCK_R), parts)
    dweight, dbias = shares_of(left, shares, M, C) if needs[0] else None, shares_of(left, shares, M) if needs[1] else None
    lengths = max(left.shape[-2], 1), max(right.x.shape[-2], 1)
    given = left, right.x, right.mask, right.norm_weight, right.norm_bias
    run(shares * parts, *given, dweight, dbias, count, lengths, shares, right.eps)
    return dweight, dbias


def _heads(rows: Tensor) -> tuple[int, int]:
    """The number of heads, and the columns of all heads, of rows (B, N, M) or heads (B, H, N, D)."""
    heads = rows.shape[1] if rows.dim() == 4 else 1
    return heads, heads * rows.shape[-1]
