# mypy: disable-error-code="no-untyped-def"
"""A block of rows of a layer: the residual, the gradient of the norm, and products with matrices of features."""

import triton
import triton.language as tl

from ...attention.projected.triton.row_pieces import normed_piece, unweighted, vector
from ...runtime.triton_products import product
from ...runtime.triton_rows import load_tile, rows_at, rows_from


@triton.jit
def residual_rows(given, at, C: tl.constexpr, C_PAD: tl.constexpr, NORMED: tl.constexpr):
    """The residual of a layer: whole rows of x, or of norm(x) if NORMED."""
    if NORMED:
        rows = normed_piece(given, at, 0, C, C_PAD)
    else:
        rows = load_tile(rows_at(given[0], at[0], C, C_PAD), at[1], C).to(at[2].dtype)
    return rows


@triton.jit
def store_row_gradients(
    dnormed, given, at, dy, gradients, rows, share, C: tl.constexpr, NORMED: tl.constexpr, DTYPE: tl.constexpr
):
    """Store `gradients`: dx of rows from the gradient of the normed rows, and a share of those of the norm.

    `dy` is the gradient of the residual. If NORMED, it is added to the gradient of the normed rows, else to dx unless
    it is None. The norm gives nothing to rows that are not `inside`.
    """
    C_PAD: tl.constexpr = dnormed.shape[1]
    x, norm_weight, _ = given
    row, inside, _, factor = at
    dx, dnorm_weight, dnorm_bias = gradients
    column = tl.arange(0, C_PAD)
    if NORMED:
        dnormed += load_tile(rows_at(dy, row, C, C_PAD), inside, C).to(DTYPE)
    to = share.to(tl.int64) * C + column
    plain = unweighted(x, at, 0, C, C_PAD)
    if dnorm_weight is not None:
        tl.store(dnorm_weight + to, tl.sum(dnormed * plain, 0), mask=column < C)
    if dnorm_bias is not None:
        tl.store(dnorm_bias + to, tl.sum(dnormed, 0), mask=column < C)
    if dx is not None:
        if norm_weight is not None:
            dnormed = dnormed * vector(norm_weight, C, C_PAD, DTYPE)[None, :]
            along = tl.sum(dnormed * plain, 1) / C
            dnormed = (dnormed - (tl.sum(dnormed, 1) / C)[:, None] - plain * along[:, None]) * factor[:, None]
        dnormed = tl.where(inside[:, None], dnormed, 0.0)
        if dy is not None and not NORMED:
            dnormed += load_tile(rows_at(dy, row, C, C_PAD), row < rows, C).to(DTYPE)
        tl.store(
            rows_at(dx, row, C, C_PAD),
            dnormed.to(dx.dtype.element_ty),
            mask=(row < rows)[:, None] & (column < C)[None, :],
        )


@triton.jit
def back_to_columns(
    dy,
    weight,
    row,
    inside,
    start,
    C: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    DTYPE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dy times TILE columns, from `start` on, of a matrix (C, M)."""
    result = tl.zeros([row.shape[0], TILE], DTYPE)
    for column in range(0, C, PIECE):
        slopes = load_tile(rows_at(dy, row, C, PIECE, column), inside, C, column)
        tile = load_tile(rows_from(weight, column, PIECE, M, TILE, start), column + tl.arange(0, PIECE) < C, M, start)
        result += product(slopes, tile, OPERAND, PRECISION)
    return result
