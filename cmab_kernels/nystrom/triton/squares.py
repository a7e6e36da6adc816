# mypy: disable-error-code="no-untyped-def"
"""The iterative pseudo-inverse of one m x m matrix, and its gradient. With X = A Z, an iteration is

    P = 7 I - X      Q = 15 I - X P      R = 13 I - X Q      Z <- Z R / 4

and backwards, with G the gradient of the new Z and then of the old one, d. the gradients of the others, and ' the
transpose,

    dR = Z' G / 4    dQ = -X' dR    dP = -X' dQ    dX = -dR Q' - dQ P' - dP    dA += dX Z'    G <- G R' / 4 + A' dX

where dQ P' = 7 dQ - dQ X'.
Matrices are padded with zeros to SIZE, a power of two that `tl.dot` accepts; the padding of A, X and Z stays zero.
"""

import triton
import triton.language as tl

from ...runtime.triton_products import product
from ...runtime.triton_rows import rows_at


@triton.jit
def diagonal(value, square):
    """`value` times the identity matrix, in the shape and type of `square`."""
    number = tl.arange(0, square.shape[0])
    return tl.where(number[:, None] == number[None, :], value, 0.0).to(square.dtype)


@triton.jit
def largest_sum(square, AXIS: tl.constexpr):
    """The sums of |A| along an axis, and the largest of these sums, which is NaN if any sum is NaN."""
    sums = tl.sum(tl.abs(square), AXIS)
    total = tl.sum(sums, 0)
    return sums, tl.where(total == total, tl.max(sums, 0), total)


@triton.jit
def divisor(norm):
    """The norm, or 1 instead of 0, so that Z_0 of a matrix of zeros is 0 and not NaN."""
    return tl.where(norm == 0.0, 1.0, norm)


@triton.jit
def first_iterate(a):
    """Z_0 = A' / (c r), with c and r the largest column and row sum of |A|.

    A' is divided by one norm after the other, because the product of both may overflow.
    """
    _, column = largest_sum(a, 0)
    _, row = largest_sum(a, 1)
    return tl.trans(a) / divisor(column) / divisor(row)


@triton.jit
def iterate(a, ITERATIONS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Z after ITERATIONS iterations."""
    z = first_iterate(a)
    for _ in range(ITERATIONS):
        x = product(a, z, OPERAND, PRECISION)
        q = diagonal(15.0, x) - product(x, diagonal(7.0, x) - x, OPERAND, PRECISION)
        r = diagonal(13.0, x) - product(x, q, OPERAND, PRECISION)
        z = 0.25 * product(z, r, OPERAND, PRECISION)
    return z


# ---- the gradient: at most three squares are in registers at a time, the others in `scratch`, one after the other

A, X, Q, R, G, DA, Z = (tl.constexpr(slot) for slot in range(7))
"""The slots of the squares in `scratch`; Z is the slot of the first iterate, and the other iterates follow it."""


def squares_in_scratch(iterations: int) -> int:
    return Z.value + iterations + 1


@triton.jit
def _square_at(scratch, slot, SIZE: tl.constexpr):
    return rows_at(scratch + slot * SIZE * SIZE, tl.arange(0, SIZE), SIZE, SIZE)


@triton.jit
def put(scratch, slot, square):
    tl.store(_square_at(scratch, slot, square.shape[0]), square)


@triton.jit
def get(scratch, slot, SIZE: tl.constexpr):
    """Load a square.

    The barrier makes values that other threads stored visible, and keeps the compiler from loading all squares at once.
    """
    tl.debug_barrier()
    return tl.load(_square_at(scratch, slot, SIZE))


@triton.jit
def _factors(scratch, i, SIZE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Compute X, Q and R of iterate i, and store them in `scratch`."""
    x = product(get(scratch, A, SIZE), get(scratch, Z + i, SIZE), OPERAND, PRECISION)
    put(scratch, X, x)
    q = diagonal(15.0, x) - product(x, diagonal(7.0, x) - x, OPERAND, PRECISION)
    put(scratch, Q, q)
    put(scratch, R, diagonal(13.0, q) - product(get(scratch, X, SIZE), q, OPERAND, PRECISION))


@triton.jit
def iterate_in_scratch(a, scratch, ITERATIONS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Store A and all iterates in `scratch`; the last iterate is in slot Z + ITERATIONS."""
    SIZE: tl.constexpr = a.shape[0]
    put(scratch, A, a)
    put(scratch, Z, first_iterate(a))
    for i in range(ITERATIONS):
        _factors(scratch, i, SIZE, OPERAND, PRECISION)
        put(scratch, Z + i + 1, 0.25 * product(get(scratch, Z + i, SIZE), get(scratch, R, SIZE), OPERAND, PRECISION))


@triton.jit
def differentiate(g, scratch, ITERATIONS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The gradient of A, given the gradient `g` of the last iterate; 0 for a matrix of zeros."""
    SIZE: tl.constexpr = g.shape[0]
    put(scratch, G, g)
    put(scratch, DA, tl.zeros_like(g))
    for back in range(ITERATIONS):
        i = ITERATIONS - 1 - back
        _factors(scratch, i, SIZE, OPERAND, PRECISION)
        dr = 0.25 * product(tl.trans(get(scratch, Z + i, SIZE)), get(scratch, G, SIZE), OPERAND, PRECISION)
        put(scratch, G, 0.25 * product(get(scratch, G, SIZE), tl.trans(get(scratch, R, SIZE)), OPERAND, PRECISION))
        dq = -product(tl.trans(get(scratch, X, SIZE)), dr, OPERAND, PRECISION)
        dx = -7.0 * dq - product(dr, tl.trans(get(scratch, Q, SIZE)), OPERAND, PRECISION)
        dx += product(dq, tl.trans(get(scratch, X, SIZE)), OPERAND, PRECISION)
        dx += product(tl.trans(get(scratch, X, SIZE)), dq, OPERAND, PRECISION)
        put(scratch, DA, get(scratch, DA, SIZE) + product(dx, tl.trans(get(scratch, Z + i, SIZE)), OPERAND, PRECISION))
        put(scratch, G, get(scratch, G, SIZE) + product(tl.trans(get(scratch, A, SIZE)), dx, OPERAND, PRECISION))
    return _through_norms(get(scratch, A, SIZE), tl.trans(get(scratch, G, SIZE)), get(scratch, DA, SIZE))


@triton.jit
def _through_norms(a, dz, da):
    """Return `da` plus the gradient of A through Z_0 = A' / (c r).

    It goes through A' itself, and through c and r, the largest column and row sum. `dz` is the transpose of the
    gradient of Z_0.
    """
    columns, column = largest_sum(a, 0)
    rows, row = largest_sum(a, 1)
    slope = dz / divisor(column) / divisor(row)
    change = tl.sum(tl.sum(slope * a, 1), 0)
    by_column = _share(change, columns, column)
    by_row = _share(change, rows, row)
    sign = tl.where(a > 0.0, 1.0, tl.where(a < 0.0, -1.0, 0.0)).to(a.dtype)
    return tl.where(column == 0.0, 0.0, da + slope - sign * (by_column[None, :] + by_row[:, None]))


@triton.jit
def _share(change, sums, largest):
    """The gradient of each sum through the largest sum, where it is `change / largest`.

    Sums that are equally large share it equally; for the other sums it is 0.
    """
    reached = sums == largest
    return tl.where(reached, change / divisor(largest) / tl.sum(reached.to(sums.dtype), 0), 0.0)
