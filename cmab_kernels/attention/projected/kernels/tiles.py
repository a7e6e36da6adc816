# mypy: disable-error-code="no-untyped-def"
"""A tile of rows of the inputs, normed, and projected to the keys and values of one head.

Rows are read in pieces of columns, so that they may be of any width: twice for the mean and the variance, once for the products.
"""

import triton
import triton.language as tl

from ....triton_common import load_tile, product, rows_at, tile_at


@triton.jit
def _row_columns(
    inputs, strides, batch, start, keep, column, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr
):
    return load_tile(tile_at(inputs, strides, batch, 0, start, ROWS, COLUMNS, ALIGN, column), keep, C, column)


@triton.jit
def row_norms(
    inputs,
    strides,
    batch,
    start,
    keep,
    eps,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    NORMED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The mean of each row and 1 / sqrt(variance + eps); 0 and 1 where rows are not normed."""
    mean = tl.zeros([ROWS], DTYPE)
    factor = tl.full([ROWS], 1.0, DTYPE)
    if NORMED:
        for column in range(0, C, COLUMNS):
            mean += tl.sum(_row_columns(inputs, strides, batch, start, keep, column, C, ROWS, COLUMNS, ALIGN).to(DTYPE), 1)
        mean = mean / C
        variance = tl.zeros([ROWS], DTYPE)
        for column in range(0, C, COLUMNS):
            rows = _row_columns(inputs, strides, batch, start, keep, column, C, ROWS, COLUMNS, ALIGN).to(DTYPE)
            centred = tl.where(column + tl.arange(0, COLUMNS)[None, :] < C, rows - mean[:, None], 0.0)
            variance += tl.sum(centred * centred, 1)
        factor = tl.rsqrt(variance / C + tl.full([1], eps, DTYPE))
    return mean, factor


@triton.jit
def normed_columns(
    inputs,
    strides,
    batch,
    start,
    keep,
    column,
    mean,
    factor,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Columns of x^ from `column` on; those from C on hold no number of their own, and meet weights that are 0."""
    rows = _row_columns(inputs, strides, batch, start, keep, column, C, mean.shape[0], COLUMNS, ALIGN).to(mean.dtype)
    return (rows - mean[:, None]) * factor[:, None] if NORMED else rows


@triton.jit
def head_rows(block, head, heads, D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr):
    """The rows of the weights that make the keys and the values of a head."""
    first = tl.cast(block, tl.int64) * heads * (D + E)
    return first + head * D + tl.arange(0, D_PAD), first + heads * D + head * E + tl.arange(0, E_PAD)


@triton.jit
def head_columns(
    weight,
    block,
    head,
    heads,
    column,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Columns of the weights (D_PAD, COLUMNS) and (E_PAD, COLUMNS) of a head's keys and values."""
    keys, values = head_rows(block, head, heads, D, E, D_PAD, E_PAD)
    key_weight = load_tile(rows_at(weight, keys, C, COLUMNS, column), tl.arange(0, D_PAD) < D, C, column)
    return key_weight, load_tile(rows_at(weight, values, C, COLUMNS, column), tl.arange(0, E_PAD) < E, C, column)


@triton.jit
def head_bias(bias, block, head, heads, D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr):
    """The biases (D_PAD,) and (E_PAD,) of a head's keys and values."""
    keys, values = head_rows(block, head, heads, D, E, D_PAD, E_PAD)
    key_bias = tl.load(bias + keys, mask=tl.arange(0, D_PAD) < D, other=0.0)
    return key_bias, tl.load(bias + values, mask=tl.arange(0, E_PAD) < E, other=0.0)


@triton.jit
def projected(
    inputs,
    strides,
    weight,
    batch,
    start,
    keep,
    mean,
    factor,
    block,
    head,
    heads,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    NORMED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x^ W' of a tile of rows, for the keys and the values of a head, without the bias."""
    keys = tl.zeros([mean.shape[0], D_PAD], mean.dtype)
    values = tl.zeros([mean.shape[0], E_PAD], mean.dtype)
    for column in range(0, C, COLUMNS):
        rows = normed_columns(inputs, strides, batch, start, keep, column, mean, factor, C, COLUMNS, ALIGN, NORMED)
        key_weight, value_weight = head_columns(weight, block, head, heads, column, C, D, E, D_PAD, E_PAD, COLUMNS)
        keys += product(rows, tl.trans(key_weight), OPERAND, PRECISION)
        values += product(rows, tl.trans(value_weight), OPERAND, PRECISION)
    return keys, values
