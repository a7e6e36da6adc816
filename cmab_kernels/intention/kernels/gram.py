# mypy: disable-error-code="no-untyped-def"
"""The sums K'WK and K'WV of each run of keys, and their sum.

A program forms one tile of the result. Where all columns fit in one tile it forms both sums, and so reads each key once. Products of one
tile of keys are summed in float32 and added to totals in float64.
"""

import triton
import triton.language as tl

from ...triton_common import kept_keys, load_tile, product, rows_at, tile_at


@triton.jit
def _add_keys(
    totals,
    key,
    value,
    weights,
    mask,
    strides,
    place,
    start,
    last,
    D: tl.constexpr,
    E: tl.constexpr,
    GRAM: tl.constexpr,
    MOMENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The totals with one tile of keys more."""
    gram, moment = totals
    batch, head, row, column = place
    key_strides, value_strides, weight_strides, mask_strides = strides
    keep = kept_keys(mask, mask_strides, batch, start, last, BLOCK_N, True)
    left = load_tile(tile_at(key, key_strides, batch, head, start, BLOCK_N, gram.shape[0], ALIGN, row), keep, D, row).to(OPERAND)
    right = left
    if GRAM and gram.shape[0] < D:
        right = load_tile(tile_at(key, key_strides, batch, head, start, BLOCK_N, gram.shape[1], ALIGN, column), keep, D, column)
    if weights is not None:
        weight = tl.load(tile_at(weights, weight_strides, batch, head, start, BLOCK_N, 1, 1), mask=keep[:, None], other=0.0)
        left *= weight.to(OPERAND)
    if GRAM:
        gram += product(tl.trans(left), right, OPERAND, PRECISION).to(tl.float64)
    if MOMENT:
        values = load_tile(tile_at(value, value_strides, batch, head, start, BLOCK_N, moment.shape[1], ALIGN, column), keep, E, column)
        moment += product(tl.trans(left), values, OPERAND, PRECISION).to(tl.float64)
    return gram, moment


@triton.jit
def _overflown(total):
    return tl.max(tl.max((tl.abs(total) < float("inf")).to(tl.int32) ^ 1, 1), 0) != 0


@triton.jit
def _gram(
    key,
    value,
    weights,
    mask,
    gram,
    moment,
    strides,
    heads,
    keys,
    cut,
    D: tl.constexpr,
    E: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLOW_N: tl.constexpr,
    ALIGN: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of one run's sums."""
    GRAM: tl.constexpr = gram is not None
    MOMENT: tl.constexpr = moment is not None
    DOWN: tl.constexpr = triton.cdiv(D, TILE_D)
    ACROSS: tl.constexpr = DOWN if GRAM else triton.cdiv(E, TILE_E)
    runs, length = cut
    tile = tl.program_id(0) % (DOWN * ACROSS)
    slot = tl.program_id(0) // (DOWN * ACROSS)
    row = tile // ACROSS * TILE_D
    column = tile % ACROSS * (TILE_D if GRAM else TILE_E)
    if GRAM and column > row:  # the tile opposite gives this one too
        return
    place = (slot // runs // heads, slot // runs % heads, row, column)
    first = slot % runs * length
    last = tl.minimum(first + length, keys)

    totals = (tl.zeros([TILE_D, TILE_D], tl.float64), tl.zeros([TILE_D, TILE_E], tl.float64))
    for start in range(first, last, BLOCK_N):
        totals = _add_keys(
            totals, key, value, weights, mask, strides, place, start, last, D, E, GRAM, MOMENT, BLOCK_N, ALIGN, OPERAND, PRECISION
        )
    if tl.float64 != OPERAND:  # finite keys have finite sums: what is beyond float32 is added up again
        again = _overflown(totals[0]) | _overflown(totals[1])
        totals = (tl.where(again, 0.0, totals[0]), tl.where(again, 0.0, totals[1]))
        for start in tl.range(first, tl.where(again, last, first), SLOW_N, num_stages=1):
            totals = _add_keys(
                totals, key, value, weights, mask, strides, place, start, last, D, E, GRAM, MOMENT, SLOW_N, ALIGN, tl.float64, "ieee"
            )

    rows = row + tl.arange(0, TILE_D)
    matrix_rows = slot.to(tl.int64) * D + rows
    if GRAM:
        columns = column + tl.arange(0, TILE_D)
        lower = (rows[:, None] >= columns[None, :]) & (rows < D)[:, None]
        tl.store(rows_at(gram, matrix_rows, D, TILE_D, column), totals[0], mask=lower)
        opposite = rows_at(gram, slot.to(tl.int64) * D + columns, D, TILE_D, row)
        tl.store(tl.trans(opposite), totals[0], mask=lower)
    if MOMENT:
        columns = column + tl.arange(0, TILE_E)
        tl.store(rows_at(moment, matrix_rows, E, TILE_E, column), totals[1], mask=(rows < D)[:, None] & (columns < E)[None, :])


@triton.jit
def _add_runs(parts, total, runs, ELEMENTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of all runs, in their order."""
    BLOCKS: tl.constexpr = triton.cdiv(ELEMENTS, BLOCK)
    matrix = (tl.program_id(0) // BLOCKS).to(tl.int64)
    element = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = element < ELEMENTS
    acc = tl.zeros([BLOCK], tl.float64)
    for chunk in range(0, runs, CHUNK):
        run = chunk + tl.arange(0, CHUNK)
        pointers = parts + ((matrix * runs + run)[:, None] * ELEMENTS + element[None, :])
        acc += tl.sum(tl.load(pointers, mask=(run < runs)[:, None] & inside[None, :], other=0.0), 0)
    tl.store(total + matrix * ELEMENTS + element, acc, mask=inside)
