"""Single instructions of the machine, in small programs, compared with numbers that are computed in another way."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from gpu_machine.floats import fma32, fma64, truncated_to_float32
from gpu_machine.machine import Machine
from gpu_machine.mma import truncated_sum
from gpu_machine.report import Fault, Unknown

HEAD = """
.version 8.7
.target sm_80
.address_size 64
.file 1 "folder/kernel.py"
.extern .shared .align 16 .b8 room[];
.visible .entry test(.param .u64 .ptr .global .align 8 from, .param .u64 into)
{
    .reg .pred %p<8>;
    .reg .b16 %rs<8>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<32>;
    .loc 1 7 5
    ld.param.b64 %rd30, [from];
    ld.param.b64 %rd31, [into];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd29, %r0, 8;
    add.s64 %rd31, %rd31, %rd29;
    mad.wide.u32 %rd30, %r0, WIDTH, %rd30;
"""
OUT = "st.global.b64 [%rd31], %rd0;"
RESULTS = {"16": "%rs0", "32": "%r40", "64": "%rd0"}


def execute(body: str, rows: Any, threads: int = 32, shared: int = 1024, seed: int = 0) -> np.ndarray:
    """Run a program in which %rd30 is the address of a thread's row of `rows`, and %rd31 is the address of its 8 bytes
    of the result."""
    given = torch.from_numpy(np.ascontiguousarray(rows))
    result = torch.zeros(threads, dtype=torch.int64)
    machine = Machine(seed)
    machine.memory.give(given, "from")
    machine.memory.give(result, "into")
    width = given.numel() // threads * given.element_size()
    text = HEAD.replace("WIDTH", str(width)) + body + "\n ret;\n}\n"
    addresses = [struct.pack("<Q", t.data_ptr()) for t in (given, result)]
    machine.launch(text, "test", (1,), threads, shared, addresses)
    return result.numpy()


def compute(code: str, *operands: Any, kinds: Sequence[str]) -> np.ndarray:
    """Run one instruction with operands %rd1, %rd2, ... or registers of other widths. `kinds` has the widths, with that
    of the result first."""
    names = {"16": "%rs", "32": "%r", "64": "%rd"}
    columns = [np.asarray(operand).reshape(-1) for operand in operands]
    rows = np.zeros((32, len(columns)), np.uint64)
    for number, column in enumerate(columns):
        bits = np.resize(column, 32).view(f"u{column.itemsize}")
        rows[:, number] = bits
    loads = "".join(f"ld.global.b{kind} {names[kind]}{n + 1}, [%rd30+{8 * n}];" for n, kind in enumerate(kinds[1:]))
    store = f"st.global.b{kinds[0]} [%rd31], {RESULTS[kinds[0]]};"
    return execute(loads + code + store, rows)[: max(len(column) for column in columns)]


def integers(code: str, *operands: int, bits: int = 32) -> int:
    """Return the result of an instruction on integers, as an unsigned number."""
    mask = (1 << bits) - 1
    given = [np.array([operand & mask], f"u{bits // 8}") for operand in operands]
    return int(compute(code, *given, kinds=[str(bits)] * (len(given) + 1))[0]) & mask


@pytest.mark.parametrize(
    "code, operands, expected",
    [
        ("add.s32 %r40, %r1, %r2;", (2**31 - 1, 1), -(2**31)),
        ("sub.s32 %r40, %r1, %r2;", (3, 5), -2),
        ("mul.lo.s32 %r40, %r1, %r2;", (-7, 9), -63),
        ("mul.hi.s32 %r40, %r1, %r2;", (-(2**31), 6), -3),
        ("mul.hi.u32 %r40, %r1, %r2;", (2**31, 6), 3),
        ("mad.lo.s32 %r40, %r1, %r2, %r3;", (3, -4, 5), -7),
        ("mad.lo.s32 %r40, %r1, -6, %r2;", (3, 1), -17),
        ("div.s32 %r40, %r1, %r2;", (-7, 2), -3),
        ("rem.s32 %r40, %r1, %r2;", (-7, 2), -1),
        ("div.u32 %r40, %r1, %r2;", (-7, 2), 2147483644),
        ("min.s32 %r40, %r1, %r2;", (-7, 2), -7),
        ("max.u32 %r40, %r1, %r2;", (-7, 2), -7),
        ("abs.s32 %r40, %r1;", (-7,), 7),
        ("neg.s32 %r40, %r1;", (7,), -7),
        ("and.b32 %r40, %r1, %r2;", (12, 10), 8),
        ("or.b32 %r40, %r1, %r2;", (12, 10), 14),
        ("xor.b32 %r40, %r1, %r2;", (12, 10), 6),
        ("not.b32 %r40, %r1;", (12,), -13),
        ("lop3.b32 %r40, %r1, %r2, %r3, 0xE8;", (12, 10, 6), 14),
        ("shl.b32 %r40, %r1, %r2;", (3, 4), 48),
        ("shl.b32 %r40, %r1, %r2;", (3, 32), 0),
        ("shr.s32 %r40, %r1, %r2;", (-8, 1), -4),
        ("shr.s32 %r40, %r1, %r2;", (-8, 40), -1),
        ("shr.u32 %r40, %r1, %r2;", (-8, 1), 2**31 - 4),
        ("shr.u32 %r40, %r1, %r2;", (-8, 32), 0),
        ("shf.l.wrap.b32 %r40, %r1, %r2, %r3;", (0x80000000, 1, 1), 3),
        ("shf.r.wrap.b32 %r40, %r1, %r2, %r3;", (6, 1, 1), 0x80000003),
        ("bfe.u32 %r40, %r1, 4, 8;", (0xABCD,), 0xBC),
        ("bfe.s32 %r40, %r1, 4, 8;", (0xABCD,), -0x44),
        ("bfi.b32 %r40, %r1, %r2, 8, 4;", (0xF5, 0x1234), 0x1534),
        ("prmt.b32 %r40, %r1, %r2, 0x5140;", (0x03020100, 0x07060504), 0x05010400),
        ("prmt.b32 %r40, %r1, %r2, 0x8880;", (0x000000FF, 0), -1),
        ("popc.b32 %r40, %r1;", (0xFF0F,), 12),
        ("clz.b32 %r40, %r1;", (1,), 31),
        ("brev.b32 %r40, %r1;", (1,), 2**31),
        ("setp.lt.s32 %p1, %r1, %r2; selp.b32 %r40, 5, 6, %p1;", (-1, 1), 5),
        ("setp.lt.u32 %p1, %r1, %r2; selp.b32 %r40, 5, 6, %p1;", (-1, 1), 6),
        ("setp.ge.s32 %p1, %r1, 1; setp.eq.and.b32 %p2, %r2, 0, %p1; selp.b32 %r40, 5, 6, %p2;", (1, 0), 5),
        ("setp.ne.b32 %p1|%p2, %r1, 1; selp.b32 %r40, 5, 6, %p2;", (1,), 5),
        ("mov.b32 %r40, 0; setp.eq.b32 %p1, %r1, 4; @!%p1 mov.b32 %r40, 9;", (4,), 0),
        ("mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r40, {%rs2, %rs1};", (0x12345678,), 0x56781234),
        ("{ .reg .b32 tmp; mov.b32 tmp, 7; add.s32 %r40, tmp, %r1; }", (1,), 8),
        ("mov.b32 %r5, 3; { .reg .b32 %r5; mov.b32 %r5, 7; add.s32 %r6, %r5, %r1; } add.s32 %r40, %r5, %r6;", (1,), 11),
    ],
)
def test_integers(code: str, operands: tuple[int, ...], expected: int) -> None:
    assert integers(code, *operands) == expected & 0xFFFFFFFF


@pytest.mark.parametrize(
    "code, operands, expected",
    [
        ("mul.hi.u64 %rd0, %rd1, %rd2;", (2**63, 6), 3),
        ("mul.hi.s64 %rd0, %rd1, %rd2;", (-(2**63), 6), -3),
        ("div.s64 %rd0, %rd1, %rd2;", (-(2**40) - 1, 2**20), -(2**20)),
        ("mov.b64 {%r1, %r2}, %rd1; mov.b64 %rd0, {%r2, %r1};", (0x123456789ABCDEF0,), 0x9ABCDEF012345678),
        ("mov.b64 {_, %r2}, %rd1; cvt.u64.u32 %rd0, %r2;", (0x123456789ABCDEF0,), 0x12345678),
        ("cvt.u32.u64 %r2, %rd1; cvt.s64.s32 %rd0, %r2;", (0xFFFFFFFE,), -2),
        ("cvt.u32.u64 %r2, %rd1; mul.wide.s32 %rd0, %r2, %r2;", (-3,), 9),
        ("cvt.u32.u64 %r2, %rd1; mad.wide.s32 %rd0, %r2, -2, %rd2;", (5, 1), -9),
        ("cvt.s8.s64 %r2, %rd1; cvt.s64.s32 %rd0, %r2;", (0x1FF,), -1),
    ],
)
def test_wide_integers(code: str, operands: tuple[int, ...], expected: int) -> None:
    assert integers(code, *operands, bits=64) == expected & (2**64 - 1)


def _same(ours: np.ndarray, right: np.ndarray) -> bool:
    """Return whether numbers are equal, including their signs, and NaN at the same places."""
    return np.array_equal(ours, right, equal_nan=True) and np.array_equal(np.signbit(ours), np.signbit(right))


@pytest.mark.parametrize(
    "code, a, b, expected",
    [
        ("max.f32", [1.0, math.nan, 0.0], [2.0, 3.0, -0.0], [2.0, 3.0, 0.0]),
        ("min.f32", [1.0, math.nan, 0.0], [2.0, 3.0, -0.0], [1.0, 3.0, -0.0]),
        ("max.NaN.f32", [1.0, math.nan], [2.0, 3.0], [2.0, math.nan]),
        ("add.f32", [1.0, 2.0**24], [2.0**-24, 1.0], [1.0, 2.0**24]),
        ("add.ftz.f32", [2.0**-126], [-(2.0**-127)], [2.0**-126]),
        ("sub.f32", [1.0], [3.0], [-2.0]),
        ("mul.f32", [1e30], [1e30], [math.inf]),
        ("mul.ftz.f32", [2.0**-100], [-(2.0**-30)], [-0.0]),
        ("div.full.f32", [1.0, 1.0], [3.0, 0.0], [1 / np.float32(3), math.inf]),
    ],
)
def test_floats(code: str, a: list[float], b: list[float], expected: list[float]) -> None:
    bits = compute(
        f"{code} %r40, %r1, %r2;", np.array(a, np.float32), np.array(b, np.float32), kinds=("32", "32", "32")
    )
    assert _same(bits.astype(np.uint32).view(np.float32), np.array(expected, np.float32))


@pytest.mark.parametrize(
    "relation, expected",
    [
        ("eq", "010"), ("ne", "100"), ("lt", "100"), ("le", "110"), ("gt", "000"), ("equ", "011"), ("neu", "101"),
        ("ltu", "101"), ("leu", "111"), ("gtu", "001"), ("geu", "011"), ("num", "110"), ("nan", "001"),
    ],
)  # fmt: skip
def test_comparisons(relation: str, expected: str) -> None:
    """The pairs are (1, 2), (2, 2) and (NaN, 2)."""
    code = f"setp.{relation}.f32 %p1, %r1, 0f40000000; selp.b32 %r40, 1, 0, %p1;"
    bits = compute(code, np.array([1.0, 2.0, math.nan], np.float32), kinds=("32", "32"))
    assert "".join(map(str, bits)) == expected


@pytest.mark.parametrize(
    "code, kinds, value, expected",
    [
        ("cvt.rn.f32.f64 %r40, %rd1", ("32", "64"), [1 + 2.0**-24, 1e300], np.float32([1.0, math.inf])),
        (
            "cvt.rz.f32.f64 %r40, %rd1",
            ("32", "64"),
            [1 + 2.0**-23 + 2.0**-24, -1e-3],
            np.float32([1 + 2.0**-23, -0.0009999999]),
        ),
        ("cvt.f64.f32 %rd0, %r1", ("64", "32"), np.float32([0.1]), np.float64([np.float32(0.1)])),
        (
            "cvt.rn.f16.f32 %rs0, %r1",
            ("16", "32"),
            np.float32([1 + 2.0**-11, 1e6, 2.0**-24]),
            np.float16([1.0, math.inf, 2.0**-24]),
        ),
        ("cvt.f32.f16 %r40, %rs1", ("32", "16"), np.float16([0.1, -2]), np.float32([np.float16(0.1), -2])),
        (
            "cvt.rn.bf16.f32 %rs0, %r1",
            ("16", "32"),
            np.float32([1 + 2.0**-8, 1 + 3 * 2.0**-8, math.inf]),
            [0x3F80, 0x3F82, 0x7F80],
        ),
        ("cvt.rz.bf16.f32 %rs0, %r1", ("16", "32"), np.float32([1 + 3 * 2.0**-8]), [0x3F81]),
        ("cvt.f32.bf16 %r40, %rs1", ("32", "16"), np.uint16([0x3F81]), np.float32([1 + 2.0**-7])),
        (
            "cvt.rna.tf32.f32 %r40, %r1",
            ("32", "32"),
            np.float32([1 + 2.0**-11, 1 + 2.0**-12]),
            np.float32([1 + 2.0**-10, 1.0]),
        ),
        ("cvt.rn.bf16x2.f32 %r40, %r1, 0f40000000", ("32", "32"), np.float32([1.0]), [0x3F804000]),
        ("cvt.rn.f16x2.f32 %r40, %r1, 0f40000000", ("32", "32"), np.float32([1.0]), [0x3C004000]),
        ("cvt.rzi.s32.f32 %r40, %r1", ("32", "32"), np.float32([-1.7, 1e20, math.nan]), np.int32([-1, 2**31 - 1, 0])),
        ("cvt.rni.s32.f32 %r40, %r1", ("32", "32"), np.float32([2.5, 3.5]), np.int32([2, 4])),
        ("cvt.rzi.u32.f32 %r40, %r1", ("32", "32"), np.float32([-1.7, 1e20, 7.9]), np.uint32([0, 2**32 - 1, 7])),
        (
            "cvt.rzi.s64.f64 %rd0, %rd1",
            ("64", "64"),
            [1e300, -(2.0**63), 2.0**52 + 1],
            np.int64([2**63 - 1, -(2**63), 2**52 + 1]),
        ),
        ("cvt.rn.f32.s32 %r40, %r1", ("32", "32"), np.int32([-3, 2**24 + 1]), np.float32([-3, 2**24])),
        ("cvt.rn.f64.u64 %rd0, %rd1", ("64", "64"), np.uint64([2**64 - 1]), [2.0**64]),
        ("cvt.rmi.f32.f32 %r40, %r1", ("32", "32"), np.float32([-1.5]), np.float32([-2])),
        ("ex2.approx.ftz.f32 %r40, %r1", ("32", "32"), np.float32([3, -200, -math.inf]), np.float32([8, 0, 0])),
        ("lg2.approx.f32 %r40, %r1", ("32", "32"), np.float32([8, 0]), np.float32([3, -math.inf])),
        ("rsqrt.approx.f32 %r40, %r1", ("32", "32"), np.float32([0.25]), np.float32([2])),
        ("rsqrt.approx.f64 %rd0, %rd1", ("64", "64"), [3.0], [1 / np.sqrt(3.0)]),
        ("rsqrt.approx.ftz.f64 %rd0, %rd1", ("64", "64"), [3.0], np.uint64([0x3FE279A700000000])),
        ("sqrt.rn.f64 %rd0, %rd1", ("64", "64"), [2.0], [math.sqrt(2.0)]),
        ("rcp.rn.f32 %r40, %r1", ("32", "32"), np.float32([3]), [1 / np.float32(3)]),
        ("rcp.approx.ftz.f64 %rd0, %rd1", ("64", "64"), [3.0], np.uint64([0x3FD5555500000000])),
        ("neg.f64 %rd0, %rd1", ("64", "64"), [0.0], [-0.0]),
        ("abs.f64 %rd0, %rd1", ("64", "64"), [-2.0], [2.0]),
        ("fma.rn.bf16x2 %r40, %r1, %r1, %r1", ("32", "32"), np.uint32([0x40403F80]), np.uint32([0x41404000])),
        ("max.bf16x2 %r40, %r1, 0x3F804040", ("32", "32"), np.uint32([0x40403F80]), np.uint32([0x40404040])),
    ],
)
def test_conversions_and_functions(code: str, kinds: tuple[str, ...], value: Any, expected: Any) -> None:
    expected = np.asarray(expected)
    if expected.dtype == np.int64:
        expected = expected.astype(np.uint64)
    wanted = expected.view(f"u{expected.itemsize}").astype(np.uint64)
    assert compute(f"{code};", value, kinds=kinds).view(np.uint64).tolist() == wanted.tolist()


# ---- exact roundings


def _rounded(exact: Fraction, into: type) -> Any:
    """Return a fraction as float32 or float64, rounded to nearest even, by integers alone."""
    digits, least = (24, -149) if into is np.float32 else (53, -1074)
    if exact == 0:
        return into(0)
    exponent = max(math.floor(math.log2(abs(exact))) - digits + 1, least)
    while abs(exact) >= Fraction(2) ** (exponent + digits):
        exponent += 1
    while abs(exact) < Fraction(2) ** (exponent + digits - 1) and exponent > least:
        exponent -= 1
    return into(round(exact / Fraction(2) ** exponent) * 2.0**exponent)


@pytest.mark.parametrize(
    "into, fma, digits, spread",
    [(np.float32, fma32, 24, 60), (np.float64, fma64, 53, 60), (np.float64, fma64, 53, 1000)],
)
def test_fma_is_rounded_once(into: type, fma: Any, digits: int, spread: int) -> None:
    """Addends are near the product, or are chosen so that the sum is near the midpoint of two numbers."""
    random.seed(digits + spread)
    numbers = []
    for _ in range(500):
        a, b = (
            into(math.ldexp(random.getrandbits(digits) | 1, random.randint(-spread // 2, spread // 4) - digits))
            for _ in range(2)
        )
        size = math.frexp(float(a) * float(b))[1] + random.choice([0, 1, digits - 1, digits, -digits, -2 * digits])
        with np.errstate(over="ignore"):
            numbers.append(
                (
                    a,
                    b,
                    into(
                        random.choice([-1, 1]) * math.ldexp(random.choice([1.0, 1.5, random.random()]), min(size, 1020))
                    ),
                )
            )
    columns = np.array(numbers, into).T
    with np.errstate(all="ignore"):
        ours = fma(*columns)
    right = [
        _rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)), into)
        for a, b, c in numbers
        if math.isfinite(c)
    ]
    assert np.array_equal(ours[np.isfinite(columns[2])], np.array(right, into))


def test_truncation_to_float32() -> None:
    assert truncated_to_float32(np.array([1 + 2.0**-23 - 2.0**-50, -1 - 2.0**-24, 3.0])).tolist() == [1.0, -1.0, 3.0]


# ---- memory, exchanges, control


def test_vectors_and_shared_memory() -> None:
    """The threads write 16 bytes each to shared memory, and read those of their neighbour."""
    body = """
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd30];
    mov.b32 %r10, room;
    shl.b32 %r11, %r0, 4;
    add.s32 %r12, %r10, %r11;
    st.shared.v4.b32 [%r12], {%r1, %r2, %r3, %r4};
    bar.sync 0;
    xor.b32 %r13, %r11, 16;
    add.s32 %r13, %r10, %r13;
    ld.shared.v2.b32 {%r5, %r6}, [%r13+8];
    mov.b64 %rd0, {%r5, %r6};
    """
    rows = np.arange(256, dtype=np.int32).reshape(64, 4)
    for seed in range(4):
        words = execute(body + OUT, rows, threads=64, seed=seed).view(np.int32).reshape(64, 2)
        assert np.array_equal(words, rows[np.arange(64) ^ 1, 2:])


@pytest.mark.parametrize(
    "code, expected",
    [
        ("shfl.sync.bfly.b32 %r2, %r1, 5, 31, -1;", lambda lane: lane ^ 5),
        ("shfl.sync.up.b32 %r2, %r1, 3, 0, -1;", lambda lane: lane - 3 if lane >= 3 else lane),
        ("shfl.sync.down.b32 %r2, %r1, 3, 31, -1;", lambda lane: lane + 3 if lane < 29 else lane),
        ("shfl.sync.idx.b32 %r2, %r1, 9, 31, -1;", lambda lane: 9),
        ("shfl.sync.idx.b32 %r2, %r1, 1, 0x1C03, -1;", lambda lane: lane // 4 * 4 + 1),
        ("shfl.sync.down.b32 %r2|%p1, %r1, 3, 31, -1; selp.b32 %r2, 1, 0, %p1;", lambda lane: int(lane < 29)),
        ("redux.sync.min.s32 %r2, %r1, -1;", lambda lane: 0),
        ("redux.sync.add.s32 %r2, %r1, -1;", lambda lane: 496),
        ("setp.lt.s32 %p1, %r1, 4; vote.sync.ballot.b32 %r2, %p1, -1;", lambda lane: 15),
        ("setp.lt.s32 %p1, %r1, 4; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r2, 1, 0, %p2;", lambda lane: 1),
        ("setp.lt.s32 %p1, %r1, 4; vote.sync.all.pred %p2, !%p1, -1; selp.b32 %r2, 1, 0, %p2;", lambda lane: 0),
        ("setp.lt.s32 %p1, %r1, 4; bar.red.popc.u32 %r2, 0, %p1;", lambda lane: 4),
        ("activemask.b32 %r2;", lambda lane: 0xFFFFFFFF),
        ("bar.warp.sync -1; mov.u32 %r2, %laneid;", lambda lane: lane),
    ],
)
def test_exchanges(code: str, expected: Any) -> None:
    body = f"ld.global.b32 %r1, [%rd30]; {code} cvt.u64.u32 %rd0, %r2;"
    assert execute(body + OUT, np.arange(32, dtype=np.int64)).tolist() == [expected(lane) for lane in range(32)]


def test_divergence() -> None:
    """Every thread runs a loop a different number of times, with a branch inside, and all threads meet again."""
    body = """
    ld.global.b32 %r1, [%rd30];
    mov.b32 %r2, 0;
    $AGAIN:
    setp.ge.s32 %p1, %r2, %r1;
    @%p1 bra $OUT;
    and.b32 %r3, %r2, 1;
    setp.eq.b32 %p2, %r3, 0;
    @%p2 bra $EVEN;
    add.s32 %r4, %r4, 100;
    bra.uni $NEXT;
    $EVEN: add.s32 %r4, %r4, 1;
    $NEXT:
    add.s32 %r2, %r2, 1;
    bra.uni $AGAIN;
    $OUT:
    redux.sync.max.s32 %r5, %r4, -1;
    mov.b64 %rd0, {%r4, %r5};
    """
    words = execute("mov.b32 %r4, 0;" + body + OUT, np.arange(32, dtype=np.int64)).view(np.int32).reshape(32, 2)
    assert (
        words[:, 0].tolist() == [(n + 1) // 2 + 100 * (n // 2) for n in range(32)]
        and (words[:, 1] == words[31, 0]).all()
    )


def test_atomics() -> None:
    """Each of 64 threads adds its number to one place, and gets a partial sum: all results differ."""
    body = "ld.global.b64 %rd1, [%rd30]; sub.s64 %rd2, %rd31, %rd29; atom.global.add.u64 %rd0, [%rd2+504], %rd1;"
    result = execute(body, np.arange(1, 65, dtype=np.int64), threads=64)
    assert result[63] == 2080
    old = execute(
        body + "bar.sync 0; setp.ne.b32 %p1, %r0, 63; @%p1 st.global.b64 [%rd31], %rd0;", np.arange(1, 65), threads=64
    )
    assert len(set(old[:63])) == 63


def test_a_copy_arrives_when_it_is_waited_for() -> None:
    body = """
    mov.b32 %r10, room;
    mad.lo.s32 %r11, %r0, 8, %r10;
    cp.async.ca.shared.global [%r11 + 0], [%rd30 + 0], 0x8;
    cp.async.commit_group;
    setp.lt.s32 %p1, %r0, 9;
    selp.b32 %r12, 8, 0, %p1;
    cp.async.ca.shared.global [%r11 + 512], [%rd30 + 0], 0x8, %r12;
    cp.async.commit_group;
    cp.async.wait_group 1;
    ld.shared.b64 %rd0, [%r11];
    cp.async.wait_group 0;
    ld.shared.b64 %rd1, [%r11+512];
    add.s64 %rd0, %rd0, %rd1;
    """
    assert execute(body + OUT, np.arange(32)).tolist() == [2 * n if n < 9 else n for n in range(32)]


# ---- matrices


def _registers(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(32, -1).view(np.uint32)


def _matrix_product(kind: str, depth: int, seed: int) -> tuple[np.ndarray, ...]:
    """Return A, B, C as float64, and D of one `mma.sync`, from fragments in the layout of the PTX manual, written
    element by element."""
    generator = torch.Generator().manual_seed(seed)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "f64": torch.float64}[kind]
    rows = 8 if kind == "f64" else 16
    a, b, c = (torch.randn(*shape, generator=generator) for shape in ((rows, depth), (depth, 8), (rows, 8)))
    if kind == "tf32":
        a, b = ((t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (a, b))
    a, b = a.to(dtype), b.to(dtype)
    c = c.to(torch.float64 if kind == "f64" else torch.float32)
    pair = 2 if kind in ("bf16", "f16") else 1
    lanes = range(32)
    a_parts = [
        [
            a[lane // 4 + 8 * half, 4 * pair * k + lane % 4 * pair + p]
            for k in range(depth // (4 * pair))
            for half in range(rows // 8)
            for p in range(pair)
        ]
        for lane in lanes
    ]
    b_parts = [
        [b[4 * pair * k + lane % 4 * pair + p, lane // 4] for k in range(depth // (4 * pair)) for p in range(pair)]
        for lane in lanes
    ]
    c_parts = [
        [c[lane // 4 + 8 * half, lane % 4 * 2 + p] for half in range(rows // 8) for p in range(2)] for lane in lanes
    ]
    words = [
        torch.stack([torch.stack(row) for row in part]).view(torch.int16).numpy()
        for part in (a_parts, b_parts, c_parts)
    ]
    d = _execute_mma(kind, depth, words)
    result = np.zeros((rows, 8))
    for lane in lanes:
        for half in range(rows // 8):
            result[lane // 4 + 8 * half, lane % 4 * 2 : lane % 4 * 2 + 2] = d[lane, 2 * half : 2 * half + 2]
    return a.double().numpy(), b.double().numpy(), c.double().numpy(), result


def _execute_mma(kind: str, depth: int, words: list[np.ndarray]) -> np.ndarray:
    """Run the instruction twice, for the first and for the last two registers of its result."""
    wide, sizes = kind == "f64", [word.view(np.uint32).shape[1] // (1 + (kind == "f64")) for word in words]
    register, bits = ("%rd", 64) if wide else ("%r", 32)
    names = iter(range(1, 30))
    groups = [[f"{register}{next(names)}" for _ in range(size)] for size in sizes]
    loads, place = "", 0
    for group in groups:
        for name in group:
            loads += f"ld.global.b{bits} {name}, [%rd30+{place}];"
            place += bits // 8
    total = "f64" if wide else "f32"
    a, b, c = ("{ " + ", ".join(group) + " }" for group in groups)
    code = (
        loads
        + f"mma.sync.aligned.m{8 if wide else 16}n8k{depth}.row.col.{total}.{kind}.{kind}.{total} {c}, {a}, {b}, {c};"
    )
    rows, results = np.concatenate(words, 1), []
    if wide:
        return np.stack(
            [execute(code + f"st.global.b64 [%rd31], {name};", rows).view(np.float64) for name in groups[2]], 1
        )
    for low, high in (groups[2][:2], groups[2][2:]):
        results.append(execute(code + f"mov.b64 %rd0, {{{low}, {high}}};" + OUT, rows).view(np.float32).reshape(32, 2))
    return np.concatenate(results, 1)


@pytest.mark.parametrize(
    "kind, depth", [("bf16", 16), ("bf16", 8), ("f16", 16), ("f16", 8), ("tf32", 8), ("tf32", 4), ("f64", 4)]
)
def test_matrix_products(kind: str, depth: int) -> None:
    error = 2.0**-50 if kind == "f64" else 2.0**-20
    a, b, c, d = _matrix_product(kind, depth, 1)
    right = a @ b + c
    assert (np.abs(d - right) <= error * (np.abs(a) @ np.abs(b) + np.abs(c))).all()


def test_matrix_sums_are_truncated() -> None:
    """1 - 2^-25 fits in a sum of 25 bits, not in a result of 24; smaller terms are lost before they are added."""
    unit, none = np.ones((1, 1, 1, 1)), np.zeros((1, 1, 1), np.float32)
    one = unit[..., 0].astype(np.float32)
    assert truncated_sum(-(2.0**-26) * unit, unit, one) == 1.0, "cut off where it is shifted"
    assert truncated_sum(-(2.0**-25) * unit, unit, one) == 1.0, "one bit more than 24 is not enough below 1"
    assert truncated_sum(-(2.0**-24) * unit, unit, one) == 1 - 2.0**-24
    assert truncated_sum(np.full((1, 1, 1, 8), 2.0**-24), unit, one) == 1 + 2.0**-21, "eight at once add up"
    assert truncated_sum(np.concatenate([unit, np.full((1, 1, 1, 7), 2.0**-25)], -1), unit, none) == 1.0
    assert truncated_sum(1.5 * unit, 1.5 * unit, np.float32(2.0**-24) * one) == 2.25, (
        "the exponent is that of the factors, and the sum is cut"
    )
    assert np.isnan(truncated_sum(unit * np.inf, unit, -np.float32([[[np.inf]]])))


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(trans: bool) -> None:
    """Four matrices of numbers 0, 1, 2, ... in shared memory, row by row."""
    code = "ldmatrix.sync.aligned.m8n8.x4" + ".trans" * trans + ".shared.b16 {%r1, %r2, %r3, %r4}, [%r12];"
    body = f"""
    ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd30];
    mov.b32 %r10, room;
    mad.lo.s32 %r12, %r0, 16, %r10;
    st.shared.v4.b32 [%r12], {{%r1, %r2, %r3, %r4}};
    {code}
    mov.b64 %rd0, {{%r1, %r4}};
    """
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    words = execute(body + OUT, matrices.reshape(32, 8)).view(np.uint16).reshape(32, 2, 2)
    for lane in range(32):
        for place, matrix in enumerate((matrices[0], matrices[3])):
            source = matrix.T if trans else matrix
            assert words[lane, place].tolist() == source[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2].tolist()


# ---- unknown instructions


@pytest.mark.parametrize(
    "code, named",
    [
        ("wgmma.fence.sync.aligned;", "wgmma"),
        ("add.rz.f32 %r1, %r1, %r2;", "this rounding"),
        ("mov.u32 %r1, %clock;", "%clock"),
        ("ld.local.b32 %r1, [%rd30];", "local memory"),
        ("bar.sync 1, 16;", "a part of a block"),
    ],
)
def test_unknown_instructions_are_named_with_their_line(code: str, named: str) -> None:
    with pytest.raises(Unknown, match=r"(?s)kernel\.py:9:3") as stop:
        execute(f"\n.loc 1 9 3\n{code}", np.zeros(32))
    assert named in str(stop.value) and code.rstrip(";") in str(stop.value)


def test_parameters_must_be_those_of_the_kernel() -> None:
    with pytest.raises(Fault, match="takes parameters of"):
        Machine().launch(HEAD.replace("WIDTH", "8") + "ret;\n}\n", "test", (1,), 32, 0, [bytes(8)])
