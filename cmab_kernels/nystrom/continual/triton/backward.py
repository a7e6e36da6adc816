# mypy: disable-error-code="no-untyped-def"
"""The gradient of recorded steps in Triton, with one program per head.

The kernel goes backwards over the tokens and carries G, the gradient of the sums, from each token to the token before
it. With a = exp(s_in - c'), b = exp(s_out - c') and the log-scales c before and c' after the token, which are
constants:

    sums' = exp(c - c') sums + a [v_in, 1] - b [v_out, 1]
    dsums = exp(c - c') G      dv_in += a G      ds_in = a (G . [v_in, 1])      and with -b for the token that left

A row that the step recomputed depends on the tokens of its window instead. The output of exact attention is such a
row, divided by its phi.

`tokens_read` are a tuple (keys, values, first, capacity, D, E, scale): the rings after the step, whose `capacity` is
n + t, and the row of token 0, the oldest of the window before the step. `gradients` are a tuple (dkeys, dkey, dvalues,
dvalue, oldest, capacity, n): those of the rings before the step and of the new tokens.
"""

import triton
import triton.language as tl

from ....runtime.triton_launch import kernel
from .landmarks import near_landmarks
from .sliding_rows import EXTRA, RECORD
from .window import COLUMNS, logits, oldest_row, row_of, span, window_sums


@triton.jit
def _add(to, more, there):
    """Add to memory. Several threads may read an element, and one of them writes it."""
    total = tl.load(to, mask=there, other=0.0) + more
    tl.debug_barrier()
    tl.store(to, total, mask=there)


@triton.jit
def _clear(to, count):
    for first in range(0, count, 4 * COLUMNS):
        i = span(first, 4 * COLUMNS)
        tl.store(to + i, tl.zeros([4 * COLUMNS], to.dtype.element_ty), mask=i < count)


@triton.jit
def _begin(to, oldest, rows, after, first, capacity, number, known, width):
    """Store gradients of a ring, or of the new tokens, in `rows` rows from the row `oldest` on, wrapping around.

    They are those of the ring `after` the step, of `known` tokens from token `number` on; other rows get zeros. Second
    derivatives have gradients of the tokens that left, too.
    """
    for begin in range(0, rows, 16):
        i = begin + tl.arange(0, 16)
        row = row_of(tl.minimum(i, rows - 1), oldest, rows)
        for column in range(0, width, COLUMNS):
            columns = span(column, COLUMNS)[None, :]
            there = (i < rows)[:, None] & (columns < width)
            held = tl.zeros([16, COLUMNS], to.dtype.element_ty)
            if after is not None:
                at = row_of(tl.minimum(number + i, capacity - 1), first, capacity)
                kept = there & (i < known)[:, None]
                held = tl.load(after + (at[:, None] * width + columns), mask=kept, other=0.0).to(held.dtype)
            tl.store(to + (row[:, None] * width + columns), held, mask=there)


@triton.jit
def _through_logits(dlogit, many, dmany, there, one, done, width):
    """Add the gradients of the logits of `many` vectors with `one`; `dlogit` (rows,) includes the scale."""
    WIDE: tl.constexpr = min(max(1024 // many.shape[0], 4), 64)
    for column in range(0, width, WIDE):
        columns = span(column, WIDE)
        inside = columns < width
        both = there[:, None] & inside[None, :]
        rows = tl.load(many[:, None] + columns[None, :], mask=both, other=0.0).to(dlogit.dtype)
        row = tl.load(one + columns, mask=inside, other=0.0).to(dlogit.dtype)
        _add(dmany[:, None] + columns[None, :], dlogit[:, None] * row[None, :], both)
        _add(done + columns, tl.sum(dlogit[:, None] * rows, 0), inside)
    tl.debug_barrier()


@triton.jit
def _gradients_of(i, gradients, D, E):
    """Pointers to the gradients of the key and of the value of token i of the n + t that the step read."""
    dkeys, dkey, dvalues, dvalue, oldest, capacity, window = gradients
    row = row_of(tl.minimum(i, window - 1), oldest, capacity)
    new = tl.where(i < window, 0, i - window).to(tl.int64)
    return tl.where(i < window, dkeys + row * D, dkey + new * D), tl.where(
        i < window, dvalues + row * E, dvalue + new * E
    )


@triton.jit
def _through_token(
    i,
    sign,
    rows,
    slopes,
    tokens_read,
    gradients,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Add the gradients of the rows of sums from which token i was subtracted, or to which it was added.

    `rows` are pointers to landmark queries and to their gradients, and the rows that count. `slopes` are G and its last
    column, and the log-scales.
    """
    keys, values, first, capacity, D, E, scale = tokens_read
    queries, dqueries, there = rows
    slope, slope_phi, top = slopes
    row, columns = row_of(i, first, capacity), span(0, WIDTH)
    score = logits(queries[:, None], keys + row * D + tl.zeros([1, 1], tl.int64), D, scale, LARGEST, OPERAND)
    weight = tl.where(there, sign * tl.exp(score - top), 0.0)
    value = tl.load(values + row * E + columns, mask=columns < E, other=0.0).to(OPERAND)
    dlogit = tl.full([1], scale, tl.float64).to(OPERAND) * weight * (tl.sum(slope * value[None, :], 1) + slope_phi)
    dkey, dvalue = _gradients_of(i, gradients, D, E)
    _add(dvalue + columns, tl.sum(weight[:, None] * slope, 0), columns < E)
    _through_logits(dlogit, queries, dqueries, there, keys + row * D, dkey, D)


@triton.jit
def _through_window(
    start,
    window,
    query,
    dquery,
    slopes,
    tokens_read,
    gradients,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Add the gradients of one row of sums over the window that starts with token `start`. `slopes` are as above."""
    keys, values, first, capacity, D, E, scale = tokens_read
    slope, slope_phi, top = slopes
    columns = span(0, WIDTH)[None, :]
    for begin in range(0, window, BLOCK_N):
        i = begin + tl.arange(0, BLOCK_N)
        there = i < window
        token = start + tl.minimum(i, window - 1)
        row, inside = row_of(token, first, capacity), there[:, None] & (columns < E)
        score = logits(query + tl.zeros([1, 1], tl.int64), keys + (row * D)[:, None], D, scale, LARGEST, OPERAND)
        weight = tl.where(there, tl.exp(score - top), 0.0)
        value = tl.load(values + ((row * E)[:, None] + columns), mask=inside, other=0.0).to(OPERAND)
        dweight = tl.sum(value * slope[None, :], 1) + slope_phi
        dlogit = tl.full([1], scale, tl.float64).to(OPERAND) * weight * dweight
        dkey, dvalue = _gradients_of(token, gradients, D, E)
        _add(dvalue[:, None] + columns, weight[:, None] * slope[None, :], inside)
        _through_logits(dlogit, keys + row * D, dkey, there, query, dquery, D)


@triton.jit
def _through_output(
    query,
    dquery,
    dout,
    held,
    dsums,
    landmarks,
    D,
    E,
    scale,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Add the gradients of a token's output, near inverse (Delta V / phi), where `held` are the sums after it."""
    keys, inverse, dkeys, dinverse, m = landmarks
    row, columns, at_phi = span(0, SIZE), span(0, WIDTH), E.to(tl.int64)
    offset = tl.minimum(row, m - 1) * D
    near = near_landmarks(query, keys + offset, row < m, D, scale, LARGEST, OPERAND)
    slope = tl.load(dout + columns, mask=columns < E, other=0.0).to(OPERAND)
    dnear = tl.zeros([SIZE], OPERAND)
    SOME: tl.constexpr = min(max(1024 // SIZE, 4), 16)
    for first in range(0, m, SOME):
        j = span(first, SOME)
        both, inside = (row < m)[:, None] & (j < m)[None, :], (j < m)[:, None] & (columns < E)[None, :]
        part = tl.load(inverse + (row[:, None] * m + j[None, :]), mask=both, other=0.0)
        at, to = held + j * (E + RECORD), dsums + j * (E + EXTRA)
        phi = tl.load(at + at_phi, mask=j < m, other=1.0)
        means = tl.load(at[:, None] + columns[None, :], mask=inside, other=0.0) / phi[:, None]
        share, dshare = tl.sum(near[:, None] * part, 0) / phi, tl.sum(means * slope[None, :], 1)
        _add(to[:, None] + columns[None, :], share[:, None] * slope[None, :], inside)
        _add(to + at_phi, -share * dshare, j < m)
        _add(dinverse + (row[:, None] * m + j[None, :]), near[:, None] * dshare[None, :], both)
        dnear += tl.sum(part * dshare[None, :], 1)
    dlogit = tl.full([1], scale, tl.float64).to(OPERAND) * near * (dnear - tl.sum(near * dnear, 0))
    _through_logits(dlogit, keys + offset, dkeys + offset, row < m, query, dquery, D)


@triton.jit
def _through_sums(
    t,
    row,
    window,
    held,
    before,
    dsums,
    landmarks,
    tokens_read,
    gradients,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Add the gradients of a tile of rows of sums, `held` after token t, and replace G by that of the sums before it.

    `before` are pointers to the rows before the token.
    """
    queries, dqueries, m = landmarks
    D, E = tokens_read[4], tokens_read[5]
    columns, known, at_phi = span(0, WIDTH), row < m, E.to(tl.int64)
    at, to = held + row * (E + RECORD), dsums + row * (E + EXTRA)
    made = known & (tl.load(at + (at_phi + 2), mask=known, other=0.0) != 0.0)
    next_row = tl.min(tl.where(made, row, m), 0)
    while next_row < m:
        its_slope = dsums + next_row * (E + EXTRA)
        its_slopes = (
            tl.load(its_slope + columns, mask=columns < E, other=0.0),
            tl.load(its_slope + E),
            tl.load(held + next_row * (E + RECORD) + (E + 1)),
        )
        its = (queries + next_row * D, dqueries + next_row * D, its_slopes, tokens_read, gradients)
        _through_window(t + 1, window, *its, BLOCK_N, WIDTH, LARGEST, OPERAND)
        next_row = tl.min(tl.where(made & (row > next_row), row, m), 0)
    slid, inside = known & (made == 0), known[:, None] & (columns < E)[None, :]
    slope = tl.load(to[:, None] + columns[None, :], mask=inside, other=0.0)
    slope_phi = tl.load(to + at_phi, mask=known, other=0.0)
    top = tl.load(at + (at_phi + 1), mask=known, other=0.0)
    kept = tl.where(slid, tl.exp(tl.load(before + (at_phi + 1), mask=slid, other=0.0) - top), 0.0)
    offset = tl.minimum(row, m - 1) * D
    rows = (queries + offset, dqueries + offset, slid)
    given = (rows, (slope, slope_phi, top), tokens_read, gradients)
    _through_token(window + t, 1.0, *given, WIDTH, LARGEST, OPERAND)
    _through_token(t, -1.0, *given, WIDTH, LARGEST, OPERAND)
    tl.store(to[:, None] + columns[None, :], kept[:, None] * slope, mask=inside)
    tl.store(to + at_phi, kept * slope_phi, mask=known)
    tl.debug_barrier()


@kernel("query", "dout", "sums", "landmark_queries", "landmark_keys", "inverse")
def _step_backward(
    query,
    keys,
    values,
    sums,
    landmark_queries,
    landmark_keys,
    inverse,
    history,
    position,
    dout,
    dnew_keys,
    dnew_values,
    dquery,
    dkey,
    dvalue,
    dkeys,
    dvalues,
    dsums,
    dlandmark_queries,
    dlandmark_keys,
    dinverse,
    scale: tl.float64,
    tokens: tl.int32,
    window: tl.int32,
    capacity: tl.int32,
    D: tl.int32,
    E: tl.int32,
    m: tl.int32,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    OPERAND: tl.constexpr,
):
    head, both = tl.program_id(0).to(tl.int64), window + tokens
    position = tl.load(position + head)
    first, oldest = oldest_row(position, window, both), oldest_row(position, window, capacity)
    columns = span(0, WIDTH)
    keys, values = keys + head * both * D, values + head * both * E
    dkey, dvalue = dkey + head * tokens * D, dvalue + head * tokens * E
    dkeys, dvalues = dkeys + head * capacity * D, dvalues + head * capacity * E
    if dnew_keys is not None:
        dnew_keys += head * both * D
    if dnew_values is not None:
        dnew_values += head * both * E
    _begin(dkeys, oldest, capacity, dnew_keys, first, both, 0, window, D)
    _begin(dkey, 0, tokens, dnew_keys, first, both, window, tokens, D)
    _begin(dvalues, oldest, capacity, dnew_values, first, both, 0, window, E)
    _begin(dvalue, 0, tokens, dnew_values, first, both, window, tokens, E)
    if dout is not None:
        query, dquery, dout = query + head * tokens * D, dquery + head * tokens * D, dout + head * tokens * E
        _clear(dquery, tokens.to(tl.int64) * D)
    tokens_read = (keys, values, first, both, D, E, scale)
    gradients = (dkeys, dkey, dvalues, dvalue, oldest, capacity, window)
    if sums is not None:
        sums, dsums = sums + head * m * (E + EXTRA), dsums + head * m * (E + EXTRA)
        history += head * tokens * m * (E + RECORD)
        landmark_queries, dlandmark_queries = landmark_queries + head * m * D, dlandmark_queries + head * m * D
        _clear(dlandmark_queries, m * D)
        if dout is not None:
            landmark_keys, dlandmark_keys = landmark_keys + head * m * D, dlandmark_keys + head * m * D
            inverse, dinverse = inverse + head * m * m, dinverse + head * m * m
            _clear(dlandmark_keys, m * D)
            _clear(dinverse, m * m)
    tl.debug_barrier()
    for back in range(tokens):
        t = tokens - 1 - back
        at = t.to(tl.int64)
        if sums is None:
            if dout is not None:
                around = (keys, values, row_of(t + 1, first, both).to(tl.int32), both, window, D, E, scale)
                top, phi, _, total = window_sums(query + at * D, around, BLOCK_N, WIDTH, LARGEST, OPERAND)
                slope = tl.load(dout + at * E + columns, mask=columns < E, other=0.0).to(OPERAND) / phi
                slopes = (slope, -tl.sum(slope * total, 0) / phi, top)
                the_query = (query + at * D, dquery + at * D, slopes, tokens_read, gradients)
                _through_window(t + 1, window, *the_query, BLOCK_N, WIDTH, LARGEST, OPERAND)
        else:
            held = history + at * (m * (E + RECORD))
            if dout is not None:
                landmarks = (landmark_keys, inverse, dlandmark_keys, dinverse, m)
                given = (query + at * D, dquery + at * D, dout + at * E, held, dsums, landmarks, D, E, scale)
                _through_output(*given, SIZE, WIDTH, LARGEST, OPERAND)
            left = (landmark_queries, dlandmark_queries, m)
            for begin in range(0, m, ROWS):
                row = span(begin, ROWS)
                before = tl.where(t > 0, held + (row - m) * (E + RECORD), sums + row * (E + EXTRA))
                rows = (held, before, dsums, left, tokens_read, gradients)
                _through_sums(t, row, window, *rows, BLOCK_N, WIDTH, LARGEST, OPERAND)
