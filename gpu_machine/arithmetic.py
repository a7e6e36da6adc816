"""Arithmetic, comparisons, logic and shifts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from . import floats
from .floats import flush, fma32, fma32_down, fma64
from .opcodes import opcode
from .parse import TYPES, Instruction, Vector
from .report import Unknown
from .team import Team

FLOATS = ("f16", "bf16", "f32", "f64")
PACKED = {"f16x2": "f16", "bf16x2": "bf16"}


def _compute(team: Team, one: Instruction, function: Callable[..., Any], count: int = 2) -> None:
    """Apply a function to `count` operands, as integers or as floating-point numbers of the instruction's type."""
    kind = one.kind
    target, *sources = one.operands[: count + 1]
    if kind in PACKED:
        _compute_packed(team, one, function, count)
    elif kind in FLOATS:
        if one.has("rz", "rp", "sat"):
            raise Unknown("this rounding")
        ftz = one.has("ftz")
        team.put_number(target, function(*(team.number(source, kind, ftz) for source in sources)), kind, ftz)
    else:
        team.write(target, function(*(team.read(source, kind) for source in sources)))


def _compute_packed(team: Team, one: Instruction, function: Callable[..., Any], count: int) -> None:
    """Apply a function to both halves of 32-bit registers."""
    kind, result = PACKED[one.kind], np.uint32(0)
    words = [np.atleast_1d(team.read(source, "b32")) for source in one.operands[1 : count + 1]]
    for half in (0, 16):
        parts = [((word >> np.uint32(half)) & np.uint32(0xFFFF)).astype(np.uint16) for word in words]
        bits = _to_bits(function(*(_from_bits(part, kind) for part in parts)), kind)
        result = result | (bits.astype(np.uint32) << np.uint32(half))
    team.write(one.operands[0], result)


def _from_bits(bits: np.ndarray, kind: str) -> np.ndarray:
    return floats.widen_bfloat16(bits) if kind == "bf16" else bits.view(np.float16)


def _to_bits(values: np.ndarray, kind: str) -> np.ndarray:
    return floats.to_bfloat16(values) if kind == "bf16" else np.asarray(values, np.float16).view(np.uint16)


@opcode("add")
def add(team: Team, one: Instruction) -> None:
    if one.has("cc", "rm"):
        raise Unknown("a carry, or this rounding")
    _compute(team, one, operator.add)


@opcode("sub")
def sub(team: Team, one: Instruction) -> None:
    if one.has("cc", "rm"):
        raise Unknown("a carry, or this rounding")
    _compute(team, one, operator.sub)


@opcode("mul")
def mul(team: Team, one: Instruction) -> None:
    if one.has("wide", "hi", "lo"):
        team.write(one.operands[0], _integer_product(team, one))
    else:
        _compute(team, one, operator.mul)


@opcode("mad")
def mad(team: Team, one: Instruction) -> None:
    if one.kind in FLOATS:
        fma(team, one)
        return
    product = _integer_product(team, one)
    addend = team.read(one.operands[3], f"{one.kind[0]}{8 * product.dtype.itemsize}")
    team.write(one.operands[0], product + addend)


def _integer_product(team: Team, one: Instruction) -> np.ndarray:
    """Return the low half, the high half, or the whole of the product of the first two operands."""
    kind = one.kind
    a, b = (team.read(source, kind) for source in one.operands[1:3])
    if one.has("lo"):
        return a * b
    bits = 8 * a.dtype.itemsize
    if one.has("wide"):
        wide = TYPES[f"{kind[0]}{2 * bits}"]
        return a.astype(wide) * b.astype(wide)
    if bits < 64:
        wide = TYPES[f"{kind[0]}{2 * bits}"]
        return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(a.dtype)
    return ((a.astype(object) * b.astype(object)) >> 64).astype(a.dtype)


@opcode("fma")
def fma(team: Team, one: Instruction) -> None:
    if one.has("rm"):
        if one.kind != "f32":
            raise Unknown("this rounding")
        _compute(team, one, fma32_down, 3)
        return
    exact = {"f32": fma32, "f64": fma64, "f16": _fma_half, "bf16": _fma_half}
    _compute(team, one, exact[PACKED.get(one.kind, one.kind)], 3)


def _fma_half(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a b + c of half-precision numbers as float32. One more rounding then gives the right result, except for
    ties."""
    return fma32(a.astype(np.float32), b.astype(np.float32), c.astype(np.float32))


@opcode("div")
def div(team: Team, one: Instruction) -> None:
    """On hardware, the error of `div.full` and `div.approx` is at most 2 units in the last place, except for a division
    by a power of two."""

    def rough(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(np.frexp(np.abs(b))[0] == 0.5, a / b, floats.off_by_two(a / b))

    divided = rough if team.block.rough and one.has("full", "approx") else operator.truediv
    _compute(team, one, divided if one.kind in FLOATS else _quotient)


@opcode("rem")
def rem(team: Team, one: Instruction) -> None:
    _compute(team, one, lambda a, b: a - b * _quotient(a, b))


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the quotient of integers, rounded towards zero. A division by zero gives all ones, as on hardware."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    down = a // safe
    towards_zero = down + ((down * safe != a) & ((a < 0) != (b < 0))).astype(a.dtype)
    return np.where(b == 0, ~b, towards_zero)


@opcode("neg")
def neg(team: Team, one: Instruction) -> None:
    _compute(team, one, operator.neg, 1)


@opcode("abs")
def absolute(team: Team, one: Instruction) -> None:
    _compute(team, one, np.abs, 1)


@opcode("copysign")
def copysign(team: Team, one: Instruction) -> None:
    """The second operand with the sign of the first."""
    _compute(team, one, lambda sign, size: np.copysign(size, sign))


@opcode("min")
def minimum(team: Team, one: Instruction) -> None:
    _extreme(team, one, np.minimum, np.fmin)


@opcode("max")
def maximum(team: Team, one: Instruction) -> None:
    _extreme(team, one, np.maximum, np.fmax)


def _extreme(team: Team, one: Instruction, plain: Callable[..., Any], without_nan: Callable[..., Any]) -> None:
    """Floating-point numbers come before NaN, unless the instruction says `.NaN`; -0 is less than +0."""
    if one.has("xorsign", "abs"):
        raise Unknown("this form of a minimum or maximum")
    if one.kind not in (*FLOATS, *PACKED):
        _compute(team, one, plain)
        return
    choose = plain if one.has("NaN") else without_nan

    def of_signed_zeros(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        first = np.signbit(a) == (plain is np.minimum)
        return np.where((a == 0) & (b == 0), np.where(first, a, b), choose(a, b))

    _compute(team, one, of_signed_zeros)


# ---- functions of one number


@opcode("ex2")
def ex2(team: Team, one: Instruction) -> None:
    _function(team, one, np.exp2)


@opcode("lg2")
def lg2(team: Team, one: Instruction) -> None:
    _function(team, one, np.log2)


@opcode("sqrt")
def sqrt(team: Team, one: Instruction) -> None:
    _function(team, one, np.sqrt)


@opcode("rsqrt")
def rsqrt(team: Team, one: Instruction) -> None:
    _function(team, one, lambda x: 1 / np.sqrt(x))


@opcode("rcp")
def rcp(team: Team, one: Instruction) -> None:
    _function(team, one, lambda x: 1 / x)


def _function(team: Team, one: Instruction, function: Callable[[np.ndarray], np.ndarray]) -> None:
    """Compute in float64 and round; `.approx.ftz.f64` gives the upper 32 bits of the result, and zeros in the lower 32.

    On hardware, approximations in float32 have errors of some units in the last place, and so they have on a rough
    machine, except for powers of two.
    """
    kind, ftz = one.kind, one.has("ftz")
    x = team.number(one.operands[1], kind, ftz and kind == "f32")
    result = np.asarray(function(np.asarray(x, np.float64)))
    if kind == "f64" and one.has("approx") and ftz:
        result = (result.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)
    if kind != "f64":
        result = result.astype(np.float32)
        if team.block.rough and one.has("approx"):
            result = np.where(np.frexp(result)[0] == 0.5, result, floats.off_by_two(result))
    team.put_number(one.operands[0], flush(result) if ftz and kind == "f32" else result, kind)


# ---- comparisons


def _unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a != a) | (b != b)


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": lambda a, b: (a != b) & ~_unordered(a, b),
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "equ": lambda a, b: (a == b) | _unordered(a, b),
    "neu": operator.ne,
    "ltu": lambda a, b: (a < b) | _unordered(a, b),
    "leu": lambda a, b: (a <= b) | _unordered(a, b),
    "gtu": lambda a, b: (a > b) | _unordered(a, b),
    "geu": lambda a, b: (a >= b) | _unordered(a, b),
    "num": lambda a, b: ~_unordered(a, b),
    "nan": _unordered,
}
COMPARISONS |= {"lo": COMPARISONS["lt"], "ls": COMPARISONS["le"], "hi": COMPARISONS["gt"], "hs": COMPARISONS["ge"]}
JOINS: dict[str, Callable[[Any, Any], Any]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


@opcode("setp")
def setp(team: Team, one: Instruction) -> None:
    kind = one.kind
    a, b = (team.number(source, kind, one.has("ftz")) for source in one.operands[1:3])
    holds = np.asarray(COMPARISONS[one.modifiers[0]](a, b))
    targets = one.operands[0].parts if isinstance(one.operands[0], Vector) else (one.operands[0],)
    for target, value in zip(targets, (holds, ~holds), strict=False):
        if len(one.operands) == 4:
            value = JOINS[one.modifiers[1]](value, team.read(one.operands[3], "pred"))
        team.write(target, value)


@opcode("selp")
def selp(team: Team, one: Instruction) -> None:
    a, b = (team.read(source, one.kind) for source in one.operands[1:3])
    team.write(one.operands[0], np.where(team.read(one.operands[3], "pred"), a, b))


# ---- logic and bits


@opcode("and")
def bitwise_and(team: Team, one: Instruction) -> None:
    _compute(team, one, operator.and_)


@opcode("or")
def bitwise_or(team: Team, one: Instruction) -> None:
    _compute(team, one, operator.or_)


@opcode("xor")
def bitwise_xor(team: Team, one: Instruction) -> None:
    _compute(team, one, operator.xor)


@opcode("not")
def bitwise_not(team: Team, one: Instruction) -> None:
    _compute(team, one, operator.invert, 1)


@opcode("lop3")
def lop3(team: Team, one: Instruction) -> None:
    """Any logical function of three operands; its value is bit 4 a + 2 b + c of the table."""
    a, b, c = (team.read(source, "b32") for source in one.operands[1:4])
    table, result = int(one.operands[4].value("u32")), np.uint32(0)
    for row in range(8):
        if table >> row & 1:
            result = result | ((a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c))
    team.write(one.operands[0], result)


@opcode("shl")
def shl(team: Team, one: Instruction) -> None:
    value, by = team.read(one.operands[1], one.kind), team.read(one.operands[2], "u32")
    bits = 8 * value.dtype.itemsize
    shifted = value << np.minimum(by, bits - 1).astype(value.dtype)
    team.write(one.operands[0], np.where(by < bits, shifted, value.dtype.type(0)))


@opcode("shr")
def shr(team: Team, one: Instruction) -> None:
    value, by = team.read(one.operands[1], one.kind), team.read(one.operands[2], "u32")
    bits = 8 * value.dtype.itemsize
    shifted = value >> np.minimum(by, bits - 1).astype(value.dtype)
    team.write(one.operands[0], shifted if one.kind[0] == "s" else np.where(by < bits, shifted, value.dtype.type(0)))


@opcode("shf")
def shf(team: Team, one: Instruction) -> None:
    low, high = (team.read(source, "b32").astype(np.uint64) for source in one.operands[1:3])
    by = team.read(one.operands[3], "u32").astype(np.uint64)
    by = by & np.uint64(31) if one.has("wrap") else np.minimum(by, np.uint64(32))
    both = (high << np.uint64(32)) | low
    result = (both << by) >> np.uint64(32) if one.has("l") else both >> by
    team.write(one.operands[0], result.astype(np.uint32))


@opcode("bfe")
def bfe(team: Team, one: Instruction) -> None:
    """This number of bits of the first operand, starting at a position; past the end, the sign is repeated."""
    value = team.read(one.operands[1], one.kind)
    position, length = (team.read(source, "u32") & np.uint32(255) for source in one.operands[2:4])
    bits = np.uint32(8 * value.dtype.itemsize)
    if (position + length > bits).any() or (length == 0).any():
        raise Unknown("a field of bits that is empty or ends past the register")
    at_top = value << (bits - position - length).astype(value.dtype)
    team.write(one.operands[0], at_top >> (bits - length).astype(value.dtype))


@opcode("bfi")
def bfi(team: Team, one: Instruction) -> None:
    """The first operand's low bits replace those of the second operand, starting at a position."""
    source, into = (team.read(operand, one.kind) for operand in one.operands[1:3])
    position, length = (team.read(operand, "u32") & np.uint32(255) for operand in one.operands[3:5])
    one_bit, bits = source.dtype.type(1), 8 * source.dtype.itemsize
    if (position + length > bits).any() or (length >= bits).any():
        raise Unknown("a field of bits that ends past the register")
    mask = ((one_bit << length.astype(source.dtype)) - one_bit) << position.astype(source.dtype)
    team.write(one.operands[0], (into & ~mask) | ((source << position.astype(source.dtype)) & mask))


@opcode("prmt")
def prmt(team: Team, one: Instruction) -> None:
    """Four bytes chosen from the eight bytes of two registers, or the signs of such bytes."""
    if len(one.modifiers) > 1:
        raise Unknown("this mode of prmt")
    low, high, chosen = (team.read(source, "b32").astype(np.uint64) for source in one.operands[1:4])
    both, result = (high << np.uint64(32)) | low, np.uint64(0)
    for place in range(4):
        nibble = (chosen >> np.uint64(4 * place)) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (nibble & np.uint64(7)))) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
        result = result | (np.where(nibble >> np.uint64(3), sign, byte) << np.uint64(8 * place))
    team.write(one.operands[0], result.astype(np.uint32))


@opcode("popc")
def popc(team: Team, one: Instruction) -> None:
    team.write(one.operands[0], _per_value(team, one, lambda bits, width: bits.bit_count()))


@opcode("clz")
def clz(team: Team, one: Instruction) -> None:
    team.write(one.operands[0], _per_value(team, one, lambda bits, width: width - bits.bit_length()))


@opcode("brev")
def brev(team: Team, one: Instruction) -> None:
    reverse = _per_value(team, one, lambda bits, width: int(f"{bits:0{width}b}"[::-1], 2))
    team.write(one.operands[0], reverse.astype(TYPES[one.kind]))


def _per_value(team: Team, one: Instruction, function: Callable[[int, int], int]) -> np.ndarray:
    values = np.atleast_1d(team.read(one.operands[1], one.kind))
    width = 8 * values.dtype.itemsize
    return np.array([function(int(value), width) for value in values], np.uint64).astype(
        np.uint32 if width <= 32 else np.uint64
    )
