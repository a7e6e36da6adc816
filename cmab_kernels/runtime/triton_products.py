# mypy: disable-error-code="no-untyped-def"
"""Matrix products for all Triton kernels: of tiles in a dtype of the matrix units, or as sums of exact parts."""

import triton
import triton.language as tl

from .triton_launch import INTERPRETED


@triton.jit
def quotient(x, y):
    """x / y rounded to nearest, for a number y. In float32, the error of `/` is up to two units in the last place."""
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, tl.full([1], y, tl.float32))


@triton.jit
def as_operand(tile, OPERAND: tl.constexpr, HIDDEN: tl.constexpr = True):
    """The tile converted to the dtype OPERAND for `tl.dot`.

    Triton 3.6 fails to multiply in float64 if it sees that a tile is converted from a narrower type; a sum over an axis
    of length 1 hides the conversion. Float64 tiles are HIDDEN too, unless the kernel is better with tiles in shared
    memory.
    """
    if tl.float64 == OPERAND and (HIDDEN or tile.dtype != tl.float64):
        tile = tl.sum(tile.to(tl.float64)[:, :, None], 2)
    return tile.to(OPERAND)


@triton.jit
def product(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr, HIDDEN: tl.constexpr = True):
    """The matrix product of two tiles as OPERAND (`as_operand`); "tf32x3" multiplies float32 as two parts each."""
    if PRECISION == "tf32x3":
        a_high, a_low = parts(a)
        b_high, b_low = parts(b)
        result = product_of_parts(a_high, a_low, b_high, b_low)
    else:
        result = tl.dot(as_operand(a, OPERAND, HIDDEN), as_operand(b, OPERAND, HIDDEN), input_precision=PRECISION)
    return result


@triton.jit
def product_of_wide(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr, HIDDEN: tl.constexpr = True):
    """Like `product`, but a tile that is wider than OPERAND, a half type, is multiplied in parts: its rounded value,
    and the remainder.

    Two parts hold 22 bits in float16; three hold all 24 in bfloat16. The remainder of an infinity is NaN, as in
    `product_of_parts`.
    """
    if a.dtype.primitive_bitwidth > OPERAND.primitive_bitwidth:
        high, middle, low = _half_parts(a, OPERAND)
        rest = tl.dot(middle, b, tl.dot(low, b)) if tl.bfloat16 == OPERAND else tl.dot(middle, b)
        result = tl.dot(high, b, tl.where(rest > -3.4e38, rest, -3.4e38))
    elif b.dtype.primitive_bitwidth > OPERAND.primitive_bitwidth:
        high, middle, low = _half_parts(b, OPERAND)
        rest = tl.dot(a, middle, tl.dot(a, low)) if tl.bfloat16 == OPERAND else tl.dot(a, middle)
        result = tl.dot(a, high, tl.where(rest > -3.4e38, rest, -3.4e38))
    else:
        result = product(a, b, OPERAND, PRECISION, HIDDEN)
    return result


@triton.jit
def _half_parts(x, OPERAND: tl.constexpr):
    """Three numbers of a half type that add up to x: x rounded, its remainder rounded, and the
    second remainder."""
    high = x.to(OPERAND)
    rest = x - high.to(x.dtype)
    middle = rest.to(OPERAND)
    return high, middle, (rest - middle.to(x.dtype)).to(OPERAND)


@triton.jit
def product_of_parts(a_high, a_low, b_high, b_low):
    """A float32 product as three tf32 products of the `parts` of both factors.

    The product of the low parts is left out; it is below 2**-20 of each term. The low part of an infinity is NaN, so
    the low products are NaN, or infinities of the right sign. They are replaced by the lowest number, so that the
    product of the high parts decides the result.
    """
    low = tl.dot(a_low, b_high, input_precision="tf32")
    low = tl.dot(a_high, b_low, low, input_precision="tf32")
    return tl.dot(a_high, b_high, tl.where(low > -3.4e38, low, -3.4e38), input_precision="tf32")


HALF_OF_CUT = tl.constexpr(0 if INTERPRETED else 4096)
"""Half a unit of the last bit of a tf32 operand that matrix units keep; Triton's interpreter keeps all bits."""


@triton.jit
def parts(x):
    """Return the 11 leading bits of each number, which tf32 can hold, and the remainder. They are
    computed by a mask and a subtraction, because conversions are slower.

    Matrix units truncate the last 13 bits of a number. Adding half a unit to the remainder turns the truncation of its
    13 bits into a rounding to 11 bits.
    """
    high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, ((x - high).to(tl.int32, bitcast=True) + HALF_OF_CUT).to(tl.float32, bitcast=True)


@triton.jit
def in_place(sums, tile):
    """A result of `product`, and the tile by which it is multiplied next. In both, columns and rows are reordered
    within each group of eight.

    With this order, the registers that hold the sums of the matrix units can be used directly as tf32 operands: a
    thread that holds the columns 2t and 2t + 1 of eight needs the columns t and t + 4. The order does not change the
    product.
    """
    ROWS: tl.constexpr = sums.shape[0]
    COLUMNS: tl.constexpr = sums.shape[1]
    WIDTH: tl.constexpr = tile.shape[1]
    sums = tl.reshape(tl.permute(tl.reshape(sums, [ROWS, COLUMNS // 8, 4, 2]), [0, 1, 3, 2]), [ROWS, COLUMNS])
    return sums, tl.reshape(tl.permute(tl.reshape(tile, [COLUMNS // 8, 4, 2, WIDTH]), [0, 2, 1, 3]), [COLUMNS, WIDTH])
