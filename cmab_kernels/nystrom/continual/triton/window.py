# mypy: disable-error-code="no-untyped-def"
"""The window of a stream in Triton: its rings of tokens, the logits of pairs of vectors, and a query's softmax sums
over the window.

A window is a tuple (keys, values, oldest, capacity, tokens, D, E, scale): the rings of one head, the row of the oldest
token, the number of rows, the number n of tokens, the widths, and the scale of logits. Token i of the window is i rows
after the oldest, wrapping around; i = -1 is the token that left last.
"""

import triton
import triton.language as tl

PARTS = tl.constexpr(8)
"""Partial sums of a dot product."""

COLUMNS = tl.constexpr(64)
"""Columns that are copied at a time."""


def before_and_after(*fields: str) -> tuple[str, ...]:
    """The names of a kernel's arguments for fields of the state: first all fields before the step, then all fields
    after it.

    The memory of both may be the same.
    """
    return tuple(f"{field}_{when}" for when in ("from", "to") for field in fields)


@triton.jit
def span(first, COUNT: tl.constexpr):
    """The numbers from `first` on, in 64 bits, since rows may be 2**31 elements or more apart."""
    return (first + tl.arange(0, COUNT)).to(tl.int64)


@triton.jit
def row_of(i, oldest, capacity):
    """The row of token i, -1 <= i < n, in a ring. The result has 64 bits; `i` has 32 bits, for speed."""
    row = oldest + i
    row = tl.where(row < 0, row + capacity, row)
    return tl.where(row < capacity, row, row - capacity).to(tl.int64)


@triton.jit
def oldest_row(position, window, capacity):
    """The row of the oldest token, in 32 bits, when the stream is `position` tokens long."""
    return ((position - window) % capacity).to(tl.int32)


@triton.jit
def move_ring(source, target, position, window, capacity_from, capacity_to, width):
    """Copy the `window` newest tokens from one ring to another, when the stream is `position` tokens long."""
    first, first_to = oldest_row(position, window, capacity_from), oldest_row(position, window, capacity_to)
    for begin in range(0, window, 16):
        i = begin + tl.arange(0, 16)
        rows, rows_to = row_of(i, first, capacity_from), row_of(i, first_to, capacity_to)
        for column in range(0, width, COLUMNS):
            columns = span(column, COLUMNS)[None, :]
            there = (i < window)[:, None] & (columns < width)
            held = tl.load(source + (rows[:, None] * width + columns), mask=there)
            tl.store(target + (rows_to[:, None] * width + columns), held, mask=there)


@triton.jit
def tokens_of(tokens, strides, head, heads):
    """A pointer to the first token of a head in (B, H, t, *)."""
    return tokens + (head // heads * strides[0] + head % heads * strides[1])


@triton.jit
def admit(token, strides, ring, newest, gone, width):
    """Write a token into row `newest` of a ring.

    Return how many elements of row `gone`, which holds the token that has left, are not finite.
    """
    count = 0
    for column in range(0, width, COLUMNS):
        columns = span(column, COLUMNS)
        there = columns < width
        tl.store(ring + newest * width + columns, tl.load(token + columns * strides[3], mask=there), mask=there)
        old = tl.load(ring + gone * width + columns, mask=there, other=0.0)
        count += tl.sum((old - old != 0.0).to(tl.int32), 0)
    return count


@triton.jit
def _halved(x):
    """The sums of neighbouring columns of (rows, columns)."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return even + odd


@triton.jit
def logits(queries, keys, width, scale, LARGEST: tl.constexpr, OPERAND: tl.constexpr):
    """scale q k' of pairs of vectors, (rows,); infinities become the largest finite number, NaN stays.

    `queries` and `keys` are pointers to the first elements, (rows, 1) or (1, 1). A pair's bits depend neither on its
    neighbours nor on the shapes and layouts around it, so that exactly the value that was added to a sum is subtracted
    later.
    """
    ROWS: tl.constexpr = max(queries.shape[0], keys.shape[0])
    factor = tl.full([1, 1], scale, tl.float64).to(OPERAND)
    sums = tl.zeros([ROWS, PARTS], OPERAND)
    for column in range(0, width, PARTS):
        columns = span(column, PARTS)[None, :]
        q = tl.load(queries + columns, mask=columns < width, other=0.0).to(OPERAND)
        k = tl.load(keys + columns, mask=columns < width, other=0.0).to(OPERAND)
        sums = tl.fma(tl.broadcast_to(factor * q, sums.shape), tl.broadcast_to(k, sums.shape), sums)
    total = tl.reshape(_halved(_halved(_halved(sums))), [ROWS])
    largest = tl.full([1], LARGEST, OPERAND)
    return tl.where(total > largest, largest, tl.where(total < -largest, -largest, total))


@triton.jit
def window_sums(
    query, window, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr, OPERAND: tl.constexpr
):
    """Return the sums over the window for one query.

    These are c = max S, and the sums of exp(S - c), of exp(S - c) |v|_1 and of exp(S - c) v (WIDTH >= E columns).
    """
    keys, values, oldest, capacity, tokens, D, E, scale = window
    columns = span(0, WIDTH)[None, :]
    least = tl.full([1], -LARGEST, OPERAND)
    top = tl.max(least, 0)
    phi = tl.sum(tl.zeros([1], OPERAND), 0)
    size = phi
    sums = tl.zeros([WIDTH], OPERAND)
    for first in range(0, tokens, BLOCK_N):
        i = first + tl.arange(0, BLOCK_N)
        there = i < tokens
        row = row_of(tl.minimum(i, tokens - 1), oldest, capacity)
        score = logits(query + tl.zeros([1, 1], tl.int64), keys + (row * D)[:, None], D, scale, LARGEST, OPERAND)
        # The maximum skips a score of NaN; its weight becomes NaN below.
        largest = tl.maximum(top, tl.max(tl.where(there & (score == score), score, least), 0))
        kept = tl.exp(top - largest)
        weight = tl.where(there, tl.exp(score - largest), 0.0)
        value = tl.load(values + ((row * E)[:, None] + columns), mask=there[:, None] & (columns < E), other=0.0).to(
            OPERAND
        )
        phi = kept * phi + tl.sum(weight, 0)
        size = kept * size + tl.sum(weight * tl.sum(tl.abs(value), 1), 0)
        sums = kept * sums + tl.sum(weight[:, None] * value, 0)
        top = largest
    return top, phi, size, sums
