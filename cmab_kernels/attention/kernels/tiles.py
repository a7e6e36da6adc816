# mypy: disable-error-code="no-untyped-def"
"""Loads of any strides and offsets, and matrix products."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_at(base, strides, batch, head, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers to rows of a (B, H, rows, columns) tensor. Rows may lie 2**31 elements and more apart, so every product is 64-bit.

    Strides are multiples of ALIGN elements; unless Triton is told, it loads a row of 8 element by element.
    """
    origin = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1] + tl.cast(row, tl.int64) * strides[2]
    rows = tl.multiple_of(tl.arange(0, ROWS).to(tl.int64) * strides[2], ALIGN)
    columns = tl.arange(0, COLUMNS).to(tl.int64) * strides[3]
    return base + tl.multiple_of(origin, ALIGN) + (rows[:, None] + columns[None, :])


@triton.jit
def rows_at(base, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to rows of a contiguous (rows, WIDTH) tensor."""
    return base + (rows.to(tl.int64)[:, None] * WIDTH + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def load_tile(pointers, keep, WIDTH: tl.constexpr):
    """A tile, zero from column WIDTH on and in rows that are not kept: their memory is not read. `keep` is None where all are."""
    columns = tl.arange(0, pointers.shape[1])[None, :] < WIDTH
    if keep is None:
        tile = tl.load(pointers) if pointers.shape[1] == WIDTH else tl.load(pointers, mask=columns, other=0.0)
    elif pointers.shape[1] == WIDTH:
        tile = tl.load(pointers, mask=keep[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=keep[:, None] & columns, other=0.0)
    return tile


@triton.jit
def kept_keys(mask, strides, batch, start, last, BLOCK: tl.constexpr, RAGGED: tl.constexpr):
    """Which keys of a tile take part; None where all do, which spares the code: tiles reach beyond `last` only if RAGGED."""
    keys = start + tl.arange(0, BLOCK)
    keep = None
    if mask is not None:
        ignored = tl.load(mask + (tl.cast(batch, tl.int64) * strides[0] + keys.to(tl.int64) * strides[1]), mask=keys < last, other=1)
        keep = ignored == 0
    elif RAGGED:
        keep = keys < last
    return keep


@triton.jit
def product(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision=PRECISION)
