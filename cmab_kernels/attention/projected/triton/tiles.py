# mypy: disable-error-code="no-untyped-def"
"""A tile of rows of the inputs, normed, and projected to the keys and values of one head.

Rows are read in pieces of columns, so that they may have any width: twice for the mean and the variance, once for the
products. Wide heads are projected chunk by chunk: D_PAD columns of a key and E_PAD columns of a value, with zeros past
their last column.
"""

import triton
import triton.language as tl

from ....runtime.triton_products import product, quotient
from ....runtime.triton_rows import load_tile, rows_at, tile_at

CHUNK = tl.constexpr(64)
"""The most columns of a key or a value that are processed at once: wider heads are cut into chunks."""


@triton.constexpr_function
def columns_of_chunk(width):
    """The columns of a chunk of a head."""
    return min(max(triton.next_power_of_2(width), 16), CHUNK.value)


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
    """The mean of each row and 1 / sqrt(variance + eps), or 0 and 1 if rows are not normed."""
    mean = tl.zeros([ROWS], DTYPE)
    factor = tl.full([ROWS], 1.0, DTYPE)
    if NORMED:
        for column in range(0, C, COLUMNS):
            mean += tl.sum(_row_columns(inputs, strides, batch, start, keep, column, C, ROWS, COLUMNS, ALIGN).to(DTYPE), 1)
        mean = quotient(mean, C)
        variance = tl.zeros([ROWS], DTYPE)
        for column in range(0, C, COLUMNS):
            rows = _row_columns(inputs, strides, batch, start, keep, column, C, ROWS, COLUMNS, ALIGN).to(DTYPE)
            centred = tl.where(column + tl.arange(0, COLUMNS)[None, :] < C, rows - mean[:, None], 0.0)
            # A maximum separates the products from their sum. Fused with the first addition, they would give the
            # threads of a row different sums.
            variance += tl.sum(tl.maximum(centred * centred, 0.0), 1)
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
    """Columns of x^ from `column` on; those from C on are meaningless, and meet weights that are 0."""
    rows = _row_columns(inputs, strides, batch, start, keep, column, C, mean.shape[0], COLUMNS, ALIGN).to(mean.dtype)
    return (rows - mean[:, None]) * factor[:, None] if NORMED else rows


@triton.jit
def head_rows(block, head, heads, chunk, D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr):
    """The rows of the weights for a chunk of a head's keys and values, and whether the chunk has each of them."""
    first = tl.cast(block, tl.int64) * heads * (D + E)
    key, value = chunk * D_PAD + tl.arange(0, D_PAD), chunk * E_PAD + tl.arange(0, E_PAD)
    return first + head * D + key, first + heads * D + head * E + value, key < D, value < E


@triton.jit
def head_columns(
    weight,
    block,
    head,
    heads,
    chunk,
    column,
    C: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Columns of the weights (D_PAD, COLUMNS) and (E_PAD, COLUMNS) of a chunk of a head's keys and values."""
    keys, values, has_key, has_value = head_rows(block, head, heads, chunk, D, E, D_PAD, E_PAD)
    key_weight = load_tile(rows_at(weight, keys, C, COLUMNS, column), has_key, C, column)
    return key_weight, load_tile(rows_at(weight, values, C, COLUMNS, column), has_value, C, column)


@triton.jit
def head_bias(bias, block, head, heads, chunk, D: tl.constexpr, E: tl.constexpr, D_PAD: tl.constexpr, E_PAD: tl.constexpr):
    """The biases (D_PAD,) and (E_PAD,) of a chunk of a head's keys and values."""
    keys, values, has_key, has_value = head_rows(block, head, heads, chunk, D, E, D_PAD, E_PAD)
    key_bias = tl.load(bias + keys, mask=has_key, other=0.0)
    return key_bias, tl.load(bias + values, mask=has_value, other=0.0)


@triton.jit
def projected(
    inputs,
    strides,
    weight,
    batch,
    start,
    mean,
    factor,
    block,
    head,
    heads,
    chunk,
    keep,
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
    VALUES: tl.constexpr = True,
):
    """x^ W' of a tile of rows, for a chunk of the keys and the values of a head, without the bias.

    Even if OPERAND is a half type, keys are multiplied in float32, because scores need their full precision.
    """
    keys = tl.zeros([mean.shape[0], D_PAD], mean.dtype)
    values = tl.zeros([mean.shape[0], E_PAD], mean.dtype)
    for column in range(0, C, COLUMNS):
        rows = normed_columns(inputs, strides, batch, start, keep, column, mean, factor, C, COLUMNS, ALIGN, NORMED)
        key_weight, value_weight = head_columns(weight, block, head, heads, chunk, column, C, D, E, D_PAD, E_PAD, COLUMNS)
        if rows.dtype == OPERAND:
            keys += product(rows, tl.trans(key_weight), OPERAND, PRECISION)
        else:
            keys += product(rows, tl.trans(key_weight), rows.dtype, "tf32x3")
        if VALUES:
            values += product(rows, tl.trans(value_weight), OPERAND, PRECISION)
    return keys, values
