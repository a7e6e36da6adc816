# mypy: disable-error-code="no-untyped-def"
"""The projection after the heads of an attention layer with its residual, and the way back through those before.

A program holds a block of rows and reads the matrices in tiles. Rows of heads are read and written in the layout of the
attention kernels.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.projected.triton.launch import aligned, back, forward
from ...attention.projected.triton.projections import Rows, rows_of
from ...attention.projected.triton.row_pieces import kept_rows, row_norms, rows_of_heads, vector
from ...attention.projected.triton.shares import shares_of
from ...runtime.triton_launch import kernel
from ...runtime.triton_products import product
from ...runtime.triton_rows import load_tile, rows_at, rows_from
from .residuals import back_to_columns, residual_rows, store_row_gradients


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
    given, at = (x, norm_weight, norm_bias), (row, inside, mean, factor)
    result += residual_rows(given, at, C, C_PAD, NORMED)
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
        tl.store(
            rows_of_heads(dheads, row, length, HEADS, WIDTH, TILE, start), douts.to(dheads.dtype.element_ty), mask=there
        )


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
        pointers = rows_from(weight, start, TILE, C, dnormed.shape[1])
        tile = load_tile(pointers, start + tl.arange(0, TILE) < HEADS * WIDTH, C)
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
    dnormed = _back_through(
        dnormed, first, first_weight, row, inside, length, C, HEADS, FIRST, TILE, OPERAND, PRECISION
    )
    if second is not None:
        dnormed = _back_through(
            dnormed, second, second_weight, row, inside, length, C, HEADS, SECOND, TILE, OPERAND, PRECISION
        )
    if third is not None:
        dnormed = _back_through(
            dnormed, third, third_weight, row, inside, length, C, HEADS, THIRD, TILE, OPERAND, PRECISION
        )
    mean, factor = row_norms(x, row, inside, eps, C, PIECE, norm_weight is not None, DTYPE)
    given, at, to = (x, norm_weight, norm_bias), (row, inside, mean, factor), (dx, dnorm_weight, dnorm_bias)
    store_row_gradients(dnormed, given, at, dy, to, rows, tl.program_id(0), C, NORMED, DTYPE)


def normed_rows(x: Tensor, mask: Tensor | None, norm: Sequence[Tensor | None], eps: float) -> Rows:
    """The rows of a layer, whose norm (weight, bias) is there if its weight is."""
    return rows_of(x, mask, norm, None if norm[0] is None else eps)


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
    run(-(-B * L // tiles.BLOCK_R), out, *aligned(weight, bias), x, *norm, y, B * L, max(L, 1), eps or 0.0)
    return y


def part(dy: Tensor, weight: Tensor, heads: int) -> Tensor:
    """The gradient of the heads (B, H, L, E) that `join` joined."""
    (B, L, C), E = dy.shape, weight.shape[1] // heads
    douts = dy.new_empty(B, heads, L, E)
    run, tiles = back(_part, dy, C, heads * E, HEADS=heads, WIDTH=E)
    run(-(-B * L // tiles.BLOCK_R), dy, *aligned(weight), douts, B * L, max(L, 1))
    return douts


def project_back(
    rows: Rows,
    projections: Sequence[tuple[Tensor, Tensor]],
    dy: Tensor | None,
    needs: Sequence[bool],
    residual: str = "input",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradient of x, and shares of the gradients of its norm's weight and bias.

    They follow from weights and gradients of heads (B, H, N, D). `dy` is the gradient of the residual, or None.
    """
    x, mask, norm_weight, norm_bias, eps = rows
    sizes = [dheads.shape[3] for _, dheads in projections]
    heads, given = projections[0][1].shape[1], [t for weight, dheads in projections for t in (*aligned(weight), dheads)]
    FIRST, SECOND, THIRD = *sizes, *[0] * (3 - len(sizes))
    normed = is_normed(residual, norm_weight)
    run, tiles = back(
        _project_back,
        x,
        x.shape[2],
        heads * max(sizes),
        HEADS=heads,
        FIRST=FIRST,
        SECOND=SECOND,
        THIRD=THIRD,
        NORMED=normed,
    )
    programs = -(-rows.number // tiles.BLOCK_R)
    dx = torch.empty_like(x) if needs[0] else None
    dnorm_weight, dnorm_bias = (shares_of(x, programs, x.shape[2]) if need else None for need in needs[1:])
    absent = [None] * (2 * (3 - len(projections)))
    lengths = rows.number, max(x.shape[1], 1)
    run(
        programs,
        x,
        mask,
        norm_weight,
        norm_bias,
        *given,
        *absent,
        dy,
        dx,
        dnorm_weight,
        dnorm_bias,
        *lengths,
        eps or 0.0,
    )
    return dx, dnorm_weight, dnorm_bias
