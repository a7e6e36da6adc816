# mypy: disable-error-code="no-untyped-def"
"""A step of exact continual attention in Triton, with one program per head."""

import triton.language as tl

from ....runtime.triton_launch import kernel
from .sliding_rows import EXTRA, slide
from .window import admit, before_and_after, move_ring, oldest_row, row_of, span, tokens_of, window_sums

RENEWED = before_and_after("queries", "keys", "values", "sums", "position")


@kernel("query", "key", "value", *RENEWED)
def _attention_step(
    query,
    key,
    value,
    out,
    queries_from,
    keys_from,
    values_from,
    sums_from,
    position_from,
    queries_to,
    keys_to,
    values_to,
    sums_to,
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
    known: tl.int32,
    moving: tl.int32,
    RETROACTIVE: tl.constexpr,
    SCHEDULE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    OPERAND: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    query, key = tokens_of(query, query_strides, head, heads), tokens_of(key, key_strides, head, heads)
    value = tokens_of(value, value_strides, head, heads)
    queries, keys, values = (
        queries_to + head * capacity_to * D,
        keys_to + head * capacity_to * D,
        values_to + head * capacity_to * E,
    )
    sums, sums_before = sums_to + head * window * (E + EXTRA), sums_from + head * window * (E + EXTRA)
    out += head * (window if RETROACTIVE else tokens) * E
    position = tl.load(position_from + head)
    if moving != 0:
        move_ring(queries_from + head * capacity_from * D, queries, position, window, capacity_from, capacity_to, D)
        move_ring(keys_from + head * capacity_from * D, keys, position, window, capacity_from, capacity_to, D)
        move_ring(values_from + head * capacity_from * E, values, position, window, capacity_from, capacity_to, E)
        tl.debug_barrier()
    oldest = oldest_row(position, window, capacity_to)
    columns = span(0, WIDTH)
    shift = tl.where(known != 0, 1, window)
    for _ in range(tokens):
        position += 1
        oldest = tl.where(oldest + 1 < capacity_to, oldest + 1, 0)
        newest, gone = row_of(window - 1, oldest, capacity_to), row_of(-1, oldest, capacity_to)
        admit(query, query_strides, queries, newest, gone, D)
        spoilt = admit(key, key_strides, keys, newest, gone, D)
        spoilt += admit(value, value_strides, values, newest, gone, E)
        query, key, value = query + query_strides[2], key + key_strides[2], value + value_strides[2]
        tl.debug_barrier()
        around = (keys, values, oldest, capacity_to, window, D, E, scale)
        if RETROACTIVE:
            for first in range(0, window, ROWS):
                row = span(first, ROWS)
                offset = row_of(tl.minimum(first + tl.arange(0, ROWS), window - 1), oldest, capacity_to) * D
                due = ((window - row) % SCHEDULE == 0) | (spoilt > 0)
                at_hand = (queries, offset, row)
                slide(at_hand, window, shift, due, sums_before, sums, around, BLOCK_N, WIDTH, LARGEST, OPERAND)
            sums_before, shift = sums, tl.minimum(shift, 1)
        else:
            _, phi, _, total = window_sums(queries + newest * D, around, BLOCK_N, WIDTH, LARGEST, OPERAND)
            tl.store(out + columns, (total / phi).to(out.dtype.element_ty), mask=columns < E)
            out += E
    if RETROACTIVE:
        for first in range(0, window, ROWS):
            row = span(first, ROWS)
            there = (row < window)[:, None] & (columns < E)[None, :]
            total = tl.load(sums + ((row * (E + EXTRA))[:, None] + columns[None, :]), mask=there)
            phi = tl.load(sums + (row * (E + EXTRA) + E), mask=row < window, other=1.0)
            to = out + ((row * E)[:, None] + columns[None, :])
            tl.store(to, (total / phi[:, None]).to(out.dtype.element_ty), mask=there)
    tl.store(position_to + head, position)
