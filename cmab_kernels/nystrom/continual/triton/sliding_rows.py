# mypy: disable-error-code="no-untyped-def"
"""Rows of sums that slide with the window, one for each query.

A row holds exp(-c) Delta V, exp(-c) phi(Delta), the log-scale c, the peak of the scaled phi since the row was last
recomputed, the size exp(-c) sum exp(S) |v|_1 of the values, and the peak of this size.

A new token is added, and the token that leaves is subtracted. When phi or the size falls below half of its peak, the
rounding errors of earlier sums become visible, so the row is recomputed from the window. It is also recomputed at
regular intervals.
"""

import triton
import triton.language as tl

from ..state import EXTRA_SUMS
from .window import logits, row_of, span, window_sums

EXTRA = tl.constexpr(EXTRA_SUMS)
"""The columns of a row beside the columns of the values."""

RECORD = tl.constexpr(3)
"""The columns of a recorded row beside those of the values: phi, the log-scale, and 1 if the row was recomputed."""

LARGEST_SURE, LARGEST_SURE_IN_FLOAT64 = tl.constexpr(2.0**18), tl.constexpr(2.0**47)
"""The largest log-scales at which a subtraction reliably removes what was added.

The token that leaves may have been added by other code, which may have rounded its logit to a neighbouring number.
Above these log-scales, the weight of such a logit is completely different.
"""

HEADROOM = tl.constexpr(1.0)
"""The amount by which a logit must exceed the log-scale of a row to replace it.

Each change rounds all sums of the row to one side, but not the weight of the token that leaves. If slowly rising logits
changed the log-scale at every token, such errors would add up.
"""


@triton.jit
def _slid(keep, add, drop, sums, comes, goes):
    return tl.fma(-drop, goes, tl.fma(add, comes, keep * sums))


@triton.jit
def slide(
    rows_at_hand,
    rows,
    shift,
    due,
    source,
    target,
    window,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Update a tile of rows after a token was added to the window.

    Row r of `target` becomes row r + shift of `source`, updated. It is recomputed if there is no such row or it is
    `due`; return which rows are recomputed. `target` may be `source`: tiles go upwards, and each is read before it is
    written. `rows_at_hand` are (queries, offset, row): the queries of the rows `row` (ROWS,) are at `queries + offset`.
    """
    queries, offset, row = rows_at_hand
    _, values, oldest, capacity, tokens, D, E, scale = window
    at_phi = E.to(tl.int64)
    newest, gone = row_of(tokens - 1, oldest, capacity), row_of(-1, oldest, capacity)
    known = row + shift < rows
    left = (queries + offset)[:, None]
    comes = logits(left, window[0] + newest * D + tl.zeros([1, 1], tl.int64), D, scale, LARGEST, OPERAND)
    goes = logits(left, window[0] + gone * D + tl.zeros([1, 1], tl.int64), D, scale, LARGEST, OPERAND)
    old = source + (row + shift) * (E + EXTRA)
    phi_before = tl.load(old + at_phi, mask=known, other=0.0)
    top_before = tl.load(old + (at_phi + 1), mask=known, other=0.0)
    top = tl.where(comes > top_before + HEADROOM, comes, top_before)
    keep, add, drop = tl.exp(top_before - top), tl.exp(comes - top), tl.exp(goes - top)
    phi = _slid(keep, add, drop, phi_before, tl.full([1], 1.0, OPERAND), tl.full([1], 1.0, OPERAND))
    peak = keep * tl.load(old + (at_phi + 2), mask=known, other=0.0)

    columns = span(0, WIDTH)[None, :]
    there = known[:, None] & (columns < E)
    value_in = tl.load(values + newest * E + columns, mask=columns < E, other=0.0).to(OPERAND)
    value_out = tl.load(values + gone * E + columns, mask=columns < E, other=0.0).to(OPERAND)
    size_before = tl.load(old + (at_phi + 3), mask=known, other=0.0)
    size = _slid(keep, add, drop, size_before, tl.sum(tl.abs(value_in), 1), tl.sum(tl.abs(value_out), 1))
    largest = keep * tl.load(old + (at_phi + 4), mask=known, other=0.0)
    before = tl.load(old[:, None] + columns, mask=there, other=0.0)
    sums = _slid(keep[:, None], add[:, None], drop[:, None], before, value_in, value_out)
    sure = tl.abs(top) <= (LARGEST_SURE if tl.float32 == OPERAND else LARGEST_SURE_IN_FLOAT64)
    sound = sure & (phi >= 0.5 * peak) & (size >= 0.5 * largest) & (size <= LARGEST)  # also False for NaN
    stale = (row < rows) & (due | (row + shift >= rows) | (sound == 0))

    tl.debug_barrier()  # now all rows have been read
    new = target + row * (E + EXTRA)
    tl.store(new[:, None] + columns, sums, mask=there)
    tl.store(new + at_phi, phi, mask=known)
    tl.store(new + (at_phi + 1), top, mask=known)
    tl.store(new + (at_phi + 2), tl.where(phi > peak, phi, peak), mask=known)
    tl.store(new + (at_phi + 3), size, mask=known)
    tl.store(new + (at_phi + 4), tl.where(size > largest, size, largest), mask=known)
    tl.debug_barrier()

    next_row = tl.min(tl.where(stale, row, rows), 0)
    while next_row < rows:
        query = queries + tl.sum(tl.where(row == next_row, offset, 0), 0)
        _recompute(query, target + next_row * (E + EXTRA), window, BLOCK_N, WIDTH, LARGEST, OPERAND)
        next_row = tl.min(tl.where(stale & (row > next_row), row, rows), 0)
    tl.debug_barrier()
    return stale


@triton.jit
def record(history, sums, row, rows, stale, E, WIDTH: tl.constexpr):
    """Copy a tile of rows, as far as a gradient reads them, to a record of this token."""
    columns, known = span(0, WIDTH)[None, :], row < rows
    there = known[:, None] & (columns < E)
    source, target = sums + row * (E + EXTRA), history + row * (E + RECORD)
    tl.store(target[:, None] + columns, tl.load(source[:, None] + columns, mask=there), mask=there)
    at_phi = E.to(tl.int64)
    for column in tl.static_range(2):
        tl.store(target + (at_phi + column), tl.load(source + (at_phi + column), mask=known), mask=known)
    tl.store(target + (at_phi + 2), stale.to(target.dtype.element_ty), mask=known)


@triton.jit
def _recompute(
    query, target, window, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr, OPERAND: tl.constexpr
):
    E = window[6]
    top, phi, size, sums = window_sums(query, window, BLOCK_N, WIDTH, LARGEST, OPERAND)
    columns = span(0, WIDTH)
    tl.store(target + columns, sums, mask=columns < E)
    tl.store(target + E, phi)
    tl.store(target + (E + 1), top)
    tl.store(target + (E + 2), phi)
    tl.store(target + (E + 3), size)
    tl.store(target + (E + 4), size)
