# mypy: disable-error-code="no-untyped-def"
"""The landmarks of a stream in Triton: when they are replaced, their pseudo-inverse, and the outputs through them.

`landmarks` are a tuple (landmark_keys, inverse, sums, m) of one head, and `window` is that of window.py.
"""

import triton
import triton.language as tl

from ....runtime.triton_products import product
from ...triton.blocks import iterate_in_blocks
from ...triton.squares import iterate
from .sliding_rows import EXTRA
from .window import COLUMNS, logits, row_of, span

TILE = tl.constexpr(16)
"""Rows, or columns, that enter a matrix product at a time."""


@triton.jit
def segment_ending(position, window, landmarks):
    """The length of the segment that ends when the stream is `position` tokens long, or 0 if none ends there.

    The first window % landmarks segments of a window have one token more.
    """
    size, longer = window // landmarks, window % landmarks
    phase = (position - 1) % window + 1
    short = phase - longer * (size + 1)
    length = tl.where(short <= 0, size + 1, size)
    return tl.where(tl.where(short <= 0, phase, short) % length == 0, length, 0)


@triton.jit
def copy(source, target, count):
    """Copy `count` elements; the source may be after the target in the same memory."""
    for first in range(0, count, 4 * COLUMNS):
        i = span(first, 4 * COLUMNS)
        held = tl.load(source + i, mask=i < count)
        tl.debug_barrier()
        tl.store(target + i, held, mask=i < count)


@triton.jit
def replace_oldest(landmarks, m, ring, oldest, capacity, window, segment, width, OPERAND: tl.constexpr):
    """Drop the oldest landmark, and append the mean of the newest `segment` rows of the ring."""
    copy(landmarks + width, landmarks, (m - 1) * width)
    tl.debug_barrier()
    share = tl.full([1, 1], 1.0, OPERAND) / segment.to(OPERAND)  # in each term, because the plain sum could overflow
    for column in range(0, width, COLUMNS):
        columns = span(column, COLUMNS)
        mean = tl.zeros([COLUMNS], OPERAND)
        for first in range(0, segment, 16):
            i = first + tl.arange(0, 16)
            row = row_of(window - segment + tl.minimum(i, segment - 1), oldest, capacity)
            there = (i < segment)[:, None] & (columns < width)[None, :]
            mean += tl.sum(
                share * tl.load(ring + ((row * width)[:, None] + columns[None, :]), mask=there, other=0.0).to(OPERAND),
                0,
            )
        tl.store(landmarks + (m - 1) * width + columns, mean, mask=columns < width)


@triton.jit
def _softmax_over(
    queries,
    keys,
    there,
    width,
    scale,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Softmax of queries (rows,) over the landmarks that are `there` (SIZE,); other landmarks get 0.

    The queries are pointers to their first elements.
    """
    factor = tl.full([1, 1], scale, tl.float64).to(OPERAND)
    score = tl.zeros([queries.shape[0], SIZE], OPERAND)
    for column in range(0, width, TILE):
        columns = span(column, TILE)
        q = tl.load(queries[:, None] + columns[None, :], mask=(columns < width)[None, :], other=0.0).to(OPERAND)
        k = tl.load(keys[None, :] + columns[:, None], mask=there[None, :] & (columns < width)[:, None], other=0.0)
        score += product(factor * q, k.to(OPERAND), OPERAND, PRECISION)
    largest = tl.full([1, 1], LARGEST, OPERAND)
    score = tl.where(score > largest, largest, tl.where(score < -largest, -largest, score))
    peak = tl.max(tl.where(there[None, :], score, -largest), 1)
    weight = tl.where(there[None, :], tl.exp(score - peak[:, None]), 0.0)
    return weight / tl.sum(weight, 1)[:, None]


@triton.jit
def invert(
    landmark_queries,
    landmark_keys,
    inverse,
    scratch,
    m,
    width,
    scale,
    ITERATIONS: tl.constexpr,
    SIZE: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    LARGEST: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store the pseudo-inverse of the softmax over the landmarks. It is computed in registers, or in blocks in
    `scratch`."""
    if IN_REGISTERS:
        row = span(0, SIZE)
        there, offset = row < m, tl.minimum(row, m - 1) * width
        a = _softmax_over(
            landmark_queries + offset, landmark_keys + offset, there, width, scale, SIZE, LARGEST, OPERAND, PRECISION
        )
        both = there[:, None] & there[None, :]
        z = iterate(tl.where(both, a, 0.0), ITERATIONS, OPERAND, PRECISION)
        tl.store(inverse + (row[:, None] * m + row[None, :]), z, mask=both)
    else:
        column = span(0, SIZE)
        keys = landmark_keys + tl.minimum(column, m - 1) * width
        for first in range(0, m, TILE):
            row = span(first, TILE)
            queries = landmark_queries + tl.minimum(row, m - 1) * width
            a = _softmax_over(queries, keys, column < m, width, scale, SIZE, LARGEST, OPERAND, PRECISION)
            tl.store(scratch + (row[:, None] * m + column[None, :]), a, mask=(row < m)[:, None] & (column < m)[None, :])
        tl.debug_barrier()
        copy(iterate_in_blocks(scratch, m, ITERATIONS, OPERAND, PRECISION), inverse, m * m)


@triton.jit
def near_landmarks(query, keys, there, D, scale, LARGEST: tl.constexpr, OPERAND: tl.constexpr):
    """Softmax of one query over the landmarks that are `there` (SIZE,), in which pairs have the bits of `logits`.

    The keys are pointers to their first elements."""
    score = logits(query + tl.zeros([1, 1], tl.int64), keys[:, None], D, scale, LARGEST, OPERAND)
    peak = tl.max(tl.where(there, score, -LARGEST), 0)
    weight = tl.where(there, tl.exp(score - peak), 0.0)
    return weight / tl.sum(weight, 0)


@triton.jit
def put_newest(
    query,
    out,
    landmarks,
    window,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Store softmax(scale q k~') inverse (Delta V / phi) for one query."""
    landmark_keys, inverse, sums, m = landmarks
    _, _, _, _, _, D, E, scale = window
    row, columns = span(0, SIZE), span(0, WIDTH)
    keys = landmark_keys + tl.minimum(row, m - 1) * D
    weight = near_landmarks(query, keys, row < m, D, scale, LARGEST, OPERAND)
    total = tl.zeros([WIDTH], OPERAND)
    for first in range(0, m, TILE):
        j = span(first, TILE)
        there = (row < m)[:, None] & (j < m)[None, :]
        part = tl.load(inverse + (row[:, None] * m + j[None, :]), mask=there, other=0.0)
        at = sums + j * (E + EXTRA)
        mixture = tl.sum(weight[:, None] * part, 0) / tl.load(at + E.to(tl.int64), mask=j < m, other=1.0)
        values = tl.load(at[:, None] + columns[None, :], mask=(j < m)[:, None] & (columns < E)[None, :], other=0.0)
        total += tl.sum(mixture[:, None] * values, 0)
    tl.store(out + columns, total.to(out.dtype.element_ty), mask=columns < E)


@triton.jit
def _put_values(landmarks, scratch, E, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Store W = inverse (Delta V / phi), (m, E), in `scratch`."""
    _, inverse, sums, m = landmarks
    for first in range(0, m, TILE):
        row = span(first, TILE)
        for column in range(0, E, TILE):
            columns = span(column, TILE)
            total = tl.zeros([TILE, TILE], OPERAND)
            for middle in range(0, m, TILE):
                j = span(middle, TILE)
                both = (row < m)[:, None] & (j < m)[None, :]
                part = tl.load(inverse + (row[:, None] * m + j[None, :]), mask=both, other=0.0)
                at = sums + j * (E + EXTRA)
                inside = (j < m)[:, None] & (columns < E)[None, :]
                values = tl.load(at[:, None] + columns[None, :], mask=inside, other=0.0)
                values = values / tl.load(at + E.to(tl.int64), mask=j < m, other=1.0)[:, None]
                total += product(part, values, OPERAND, PRECISION)
            there = (row < m)[:, None] & (columns < E)[None, :]
            tl.store(scratch + (row[:, None] * E + columns[None, :]), total, mask=there)


@triton.jit
def put_all(
    queries,
    out,
    landmarks,
    scratch,
    window,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store the outputs of all queries of the window, TILE at a time: softmax(scale q k~') W."""
    landmark_keys, _, _, m = landmarks
    _, _, oldest, capacity, tokens, D, E, scale = window
    _put_values(landmarks, scratch, E, OPERAND, PRECISION)
    tl.debug_barrier()
    j = span(0, SIZE)
    keys = landmark_keys + tl.minimum(j, m - 1) * D
    for first in range(0, tokens, TILE):
        i = span(first, TILE)
        rows = queries + row_of(tl.minimum(first + tl.arange(0, TILE), tokens - 1), oldest, capacity) * D
        weight = _softmax_over(rows, keys, j < m, D, scale, SIZE, LARGEST, OPERAND, PRECISION)
        for column in range(0, E, TILE):
            columns = span(column, TILE)
            there = (j < m)[:, None] & (columns < E)[None, :]
            values = tl.load(scratch + (j[:, None] * E + columns[None, :]), mask=there, other=0.0)
            rounded = product(weight, values, OPERAND, PRECISION).to(out.dtype.element_ty)
            inside = (i < tokens)[:, None] & (columns < E)[None, :]
            tl.store(out + ((i * E)[:, None] + columns[None, :]), rounded, mask=inside)
