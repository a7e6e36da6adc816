# mypy: disable-error-code="no-untyped-def"
"""A block of rows in pieces of columns: the norm, products with matrices, and the layout of heads.

`given` are (x, norm_weight, norm_bias), each weight and bias a tensor or None. `at` are the numbers of the rows of a
block, whether each is inside, and the mean and factor of each from `row_norms`.
"""

import triton
import triton.language as tl

from ....runtime.triton_products import product, quotient
from ....runtime.triton_rows import load_tile, rows_at, rows_from


@triton.jit
def kept_rows(mask, row, rows):
    """Whether each row exists and is not ignored by the mask."""
    inside = row < rows
    if mask is not None:
        inside = tl.load(mask + row.to(tl.int64), mask=inside, other=1) == 0
    return inside


@triton.jit
def vector(base, WIDTH: tl.constexpr, LENGTH: tl.constexpr, DTYPE: tl.constexpr, start=0):
    """Elements of a vector from `start` on, with zeros from WIDTH on, or zeros if there is no vector."""
    at = start + tl.arange(0, LENGTH)
    return (
        tl.zeros([LENGTH], DTYPE)
        if base is None
        else tl.load(base + at.to(tl.int64), mask=at < WIDTH, other=0.0).to(DTYPE)
    )


@triton.jit
def rows_of_heads(base, row, length, HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, column=0):
    """Pointers to columns of rows (B L, HEADS WIDTH) that are stored as heads (B, HEADS, L, WIDTH), L = `length`.

    With one head they are rows.
    """
    if HEADS == 1:
        pointers = rows_at(base, row, WIDTH, COLUMNS, column)
    else:
        columns = column + tl.arange(0, COLUMNS)
        first = ((row // length).to(tl.int64) * HEADS * length + row % length) * WIDTH
        across = (columns // WIDTH).to(tl.int64) * length * WIDTH + columns % WIDTH
        pointers = base + (first[:, None] + across[None, :])
    return pointers


# ---- the norm


@triton.jit
def row_norms(x, row, inside, eps, C: tl.constexpr, PIECE: tl.constexpr, NORMED: tl.constexpr, DTYPE: tl.constexpr):
    """The mean of each row and 1 / sqrt(variance + eps), or 0 and 1 if rows are not normed.

    Both are 0 for rows that are not `inside`.
    """
    mean = tl.zeros([row.shape[0]], DTYPE)
    factor = tl.full([row.shape[0]], 1.0, DTYPE)
    if NORMED:
        for column in range(0, C, PIECE):
            mean += tl.sum(load_tile(rows_at(x, row, C, PIECE, column), inside, C, column).to(DTYPE), 1)
        mean = quotient(mean, C)
        variance = tl.zeros([row.shape[0]], DTYPE)
        for column in range(0, C, PIECE):
            piece = load_tile(rows_at(x, row, C, PIECE, column), inside, C, column).to(DTYPE)
            piece = tl.where(column + tl.arange(0, PIECE)[None, :] < C, piece - mean[:, None], 0.0)
            # A maximum separates the products from their sum. Fused with the first addition, they would give the
            # threads of a row different sums.
            variance += tl.sum(tl.maximum(piece * piece, 0.0), 1)
        factor = tl.where(inside, tl.rsqrt(variance / C + tl.full([1], eps, DTYPE)), 0.0)
    return mean, factor


@triton.jit
def unweighted(x, at, column, C: tl.constexpr, PIECE: tl.constexpr):
    """Columns of x^, or of x if rows are not normed; 0 from column C on and in rows that are not `inside`."""
    row, inside, mean, factor = at
    piece = load_tile(rows_at(x, row, C, PIECE, column), inside, C, column).to(mean.dtype)
    return tl.where(column + tl.arange(0, PIECE)[None, :] < C, (piece - mean[:, None]) * factor[:, None], 0.0)


@triton.jit
def normed_piece(given, at, column, C: tl.constexpr, PIECE: tl.constexpr):
    """Columns of the rows after their norm; finite in rows that are not `inside`."""
    x, norm_weight, norm_bias = given
    piece = unweighted(x, at, column, C, PIECE)
    if norm_weight is not None:
        piece *= vector(norm_weight, C, PIECE, piece.dtype, column)[None, :]
    if norm_bias is not None:
        piece += vector(norm_bias, C, PIECE, piece.dtype, column)[None, :]
    return piece


# ---- products with matrices


@triton.jit
def project_rows(
    given,
    at,
    weight,
    bias,
    first,
    start,
    C: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The normed rows times TILE rows of a matrix, from `start` on, of the M rows that begin at row `first`."""
    DTYPE: tl.constexpr = at[2].dtype
    result = tl.zeros([at[0].shape[0], TILE], DTYPE)
    made = start + tl.arange(0, TILE) < M
    for column in range(0, C, PIECE):
        normed = normed_piece(given, at, column, C, PIECE)
        tile = load_tile(rows_from(weight, first + start, TILE, C, PIECE, column), made, C, column)
        result += product(normed, tl.trans(tile), OPERAND, PRECISION)
    if bias is not None:
        result += vector(bias + first, M, TILE, DTYPE, start)[None, :]
    return result
