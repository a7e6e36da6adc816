# mypy: disable-error-code="no-untyped-def"
"""A step of continual Nyström attention in Triton, with one program per head. A step that records a history has fixed
landmarks."""

import triton.language as tl

from ....runtime.triton_launch import kernel
from ...triton.blocks import SQUARES
from .landmarks import copy, invert, put_all, put_newest, replace_oldest, segment_ending
from .sliding_rows import EXTRA, RECORD, record, slide
from .window import admit, before_and_after, move_ring, oldest_row, row_of, span, tokens_of

RENEWED = before_and_after(
    "queries", "keys", "values", "sums", "position", "landmark_queries", "landmark_keys", "inverse"
)


@kernel("query", "key", "value", *RENEWED)
def _nystrom_step(
    query,
    key,
    value,
    out,
    scratch,
    squares,
    history,
    queries_from,
    keys_from,
    values_from,
    sums_from,
    landmark_queries_from,
    landmark_keys_from,
    inverse_from,
    position_from,
    queries_to,
    keys_to,
    values_to,
    sums_to,
    landmark_queries_to,
    landmark_keys_to,
    inverse_to,
    position_to,
    query_strides: tl.int64,
    key_strides: tl.int64,
    value_strides: tl.int64,
    scale: tl.float64,
    heads: tl.int32,
    tokens: tl.int32,
    window: tl.int32,
    capacity_from: tl.int32,
    capacity_to: tl.int32,
    D: tl.int32,
    E: tl.int32,
    m: tl.int32,
    fixed: tl.int32,
    moving: tl.int32,
    RETROACTIVE: tl.constexpr,
    RECORDED: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SCHEDULE: tl.constexpr,
    SIZE: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    query, key = tokens_of(query, query_strides, head, heads), tokens_of(key, key_strides, head, heads)
    value = tokens_of(value, value_strides, head, heads)
    queries, keys, values = (
        queries_to + head * capacity_to * D,
        keys_to + head * capacity_to * D,
        values_to + head * capacity_to * E,
    )
    sums, sums_before = sums_to + head * m * (E + EXTRA), sums_from + head * m * (E + EXTRA)
    landmark_queries, landmark_keys = landmark_queries_to + head * m * D, landmark_keys_to + head * m * D
    inverse = inverse_to + head * m * m
    scratch += head * m * E
    squares += head * SQUARES * m * m
    history += head * tokens * m * (E + RECORD)
    out += head * (window if RETROACTIVE else tokens) * E
    position = tl.load(position_from + head)
    if moving != 0:
        move_ring(queries_from + head * capacity_from * D, queries, position, window, capacity_from, capacity_to, D)
        move_ring(keys_from + head * capacity_from * D, keys, position, window, capacity_from, capacity_to, D)
        move_ring(values_from + head * capacity_from * E, values, position, window, capacity_from, capacity_to, E)
    copy(landmark_queries_from + head * m * D, landmark_queries, m * D)
    copy(landmark_keys_from + head * m * D, landmark_keys, m * D)
    copy(inverse_from + head * m * m, inverse, m * m)
    tl.debug_barrier()
    oldest = oldest_row(position, window, capacity_to)
    for t in range(tokens):
        position += 1
        oldest = tl.where(oldest + 1 < capacity_to, oldest + 1, 0)
        newest, gone = row_of(window - 1, oldest, capacity_to), row_of(-1, oldest, capacity_to)
        admit(query, query_strides, queries, newest, gone, D)
        spoilt = admit(key, key_strides, keys, newest, gone, D)
        spoilt += admit(value, value_strides, values, newest, gone, E)
        query, key, value = query + query_strides[2], key + key_strides[2], value + value_strides[2]
        tl.debug_barrier()
        segment = 0 if RECORDED else tl.where(fixed != 0, 0, segment_ending(position, window, m))
        if segment > 0:
            replace_oldest(landmark_queries, m, queries, oldest, capacity_to, window, segment, D, OPERAND)
            replace_oldest(landmark_keys, m, keys, oldest, capacity_to, window, segment, D, OPERAND)
            tl.debug_barrier()
        around = (keys, values, oldest, capacity_to, window, D, E, scale)
        landmarks = (landmark_keys, inverse, sums, m)
        for first in range(0, m, ROWS):
            row = span(first, ROWS)
            offset = tl.minimum(row, m - 1) * D
            due = ((position - row) % SCHEDULE == 0) | (spoilt > 0)
            shift = tl.where(segment > 0, 1, 0)
            at_hand = (landmark_queries, offset, row)
            stale = slide(at_hand, m, shift, due, sums_before, sums, around, BLOCK_N, WIDTH, LARGEST, OPERAND)
            if RECORDED:
                record(history, sums, row, m, stale, E, WIDTH)
        if RECORDED:
            history += m * (E + RECORD)
        sums_before = sums
        if segment > 0:
            given = (landmark_queries, landmark_keys, inverse, squares, m, D, scale)
            invert(*given, ITERATIONS, SIZE, IN_REGISTERS, LARGEST, OPERAND, PRECISION)
            tl.debug_barrier()
        if RETROACTIVE:
            if t == tokens - 1:
                put_all(queries, out, landmarks, scratch, around, SIZE, LARGEST, OPERAND, PRECISION)
        else:
            put_newest(queries + newest * D, out, landmarks, around, SIZE, WIDTH, LARGEST, OPERAND)
            out += E
    tl.store(position_to + head, position)
