"""Moves, conversions of types, loads and stores."""

from __future__ import annotations

from typing import Any

import numpy as np

from .floats import flush, to_bfloat16, to_tf32, truncated_to_float32
from .opcodes import opcode
from .parse import TYPES, Instruction, Register, Vector
from .report import Unknown
from .team import Team

ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@opcode("mov")
def mov(team: Team, one: Instruction) -> None:
    """A copy. The parts of a vector are adjacent in the bits, with the first part lowest."""
    target, source = one.operands
    if isinstance(source, Vector):
        team.write(target, _packed(team, source, one.kind))
    elif isinstance(target, Vector):
        values = np.atleast_1d(team.read(source, one.kind))
        parts = values[:, None].view(f"u{values.itemsize // len(target.parts)}")
        for part, column in zip(target.parts, parts.T, strict=True):
            team.write(part, column)
    else:
        team.write(target, team.read(source, one.kind))


def _packed(team: Team, source: Vector, kind: str) -> np.ndarray:
    size = np.dtype(TYPES[kind]).itemsize // len(source.parts)
    parts = np.broadcast_arrays(*(np.atleast_1d(team.read(part, f"b{8 * size}")) for part in source.parts))
    return np.stack(parts, 1).view(f"u{size * len(source.parts)}")[:, 0]


@opcode("cvta")
def cvta(team: Team, one: Instruction) -> None:
    """Generic addresses are those of global memory."""
    if not one.has("global"):
        raise Unknown("generic addresses of other memory than global memory")
    team.write(one.operands[0], team.read(one.operands[1], "u64"))


# ---- conversions


@opcode("cvt")
def cvt(team: Team, one: Instruction) -> None:
    kinds = [part for part in one.modifiers if part in TYPES]
    if kinds[0] in ("f16x2", "bf16x2"):
        _convert_two(team, one, *kinds)
    elif kinds[0] == "tf32":
        if not one.has("rna"):
            raise Unknown("this rounding to tf32")
        team.write(one.operands[0], to_tf32(team.read(one.operands[1], "b32")))
    else:
        team.write(
            one.operands[0], _converted(team.number(one.operands[1], kinds[1], one.has("ftz")), kinds[0], kinds[1], one)
        )


def _convert_two(team: Team, one: Instruction, into: str, kind: str) -> None:
    """Two float32 numbers become half-precision numbers; the first is the upper one."""
    high, low = (
        _half(team.number(source, kind), into.removesuffix("x2"), one).astype(np.uint32) for source in one.operands[1:3]
    )
    team.write(one.operands[0], (high << np.uint32(16)) | low)


def _half(values: np.ndarray, into: str, one: Instruction) -> np.ndarray:
    """Return the bits of float32 numbers as half-precision ones."""
    if one.has("relu", "satfinite", "sat"):
        raise Unknown("this conversion to half precision")
    if into == "bf16":
        return to_bfloat16(values, towards_zero=one.has("rz"))
    if not one.has("rn"):
        raise Unknown("this rounding to float16")
    return np.asarray(values).astype(np.float16).view(np.uint16)


def _converted(values: np.ndarray, into: str, kind: str, one: Instruction) -> np.ndarray:
    from_float, to_float = kind in ("f16", "bf16", "f32", "f64"), into in ("f16", "bf16", "f32", "f64")
    values = np.asarray(values)
    if not from_float and not to_float:
        if one.has("sat"):
            raise Unknown("a conversion of integers with saturation")
        return values.astype(TYPES[into])
    rounding = next((ROUNDINGS[name] for name in one.modifiers if name in ROUNDINGS), None)
    if from_float and rounding:
        values = rounding(values)
    if not to_float:
        return _to_integer(values, np.dtype(TYPES[into]))
    result = _to_float(values, into, one)
    if one.has("sat"):
        result = np.where(result > 0, np.minimum(result, result.dtype.type(1)), result.dtype.type(0))
    return flush(result) if one.has("ftz") and into == "f32" else result


def _to_float(values: np.ndarray, into: str, one: Instruction) -> np.ndarray:
    """Return numbers as floating-point numbers of another type, rounded to nearest or towards zero."""
    if one.has("rm", "rp"):
        raise Unknown("this rounding")
    if into in ("f16", "bf16") and values.dtype != np.float64:
        return (
            _half(values.astype(np.float32), into, one)
            if not one.has("rni", "rzi", "rmi", "rpi")
            else values.astype(np.float16)
        )
    if into == "f32" and one.has("rz"):
        return truncated_to_float32(values.astype(np.float64))
    if into in ("f16", "f32", "f64"):
        return values.astype(TYPES[into])
    raise Unknown("this conversion")


def _to_integer(values: np.ndarray, into: np.dtype[Any]) -> np.ndarray:
    """Return whole numbers as integers. Numbers out of range become the nearest integer, and NaN becomes 0."""
    wide = np.nan_to_num(values.astype(np.float64), nan=0.0)
    limits = np.iinfo(into)
    inside = (wide > float(limits.min) - 1) & (wide < float(limits.max) + (into.itemsize < 8))
    result = np.where(inside, wide, 0).astype(into)
    return np.where(inside, result, np.where(wide > 0, into.type(limits.max), into.type(limits.min)))


# ---- loads and stores


def _space(one: Instruction) -> str:
    return next(
        (space for space in ("param", "shared", "global", "local", "const") if one.has(space, f"{space}_cta")), "global"
    )


def _parts(operand: Any) -> tuple[Any, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)


@opcode("ld", "ldu")
def ld(team: Team, one: Instruction) -> None:
    targets, kind = _parts(one.operands[0]), one.kind
    each = np.dtype(TYPES[kind]).itemsize
    addresses = team.addresses(one.operands[1])
    raw = team.space(_space(one)).read(addresses, each * len(targets), team.active_warps())
    for target, column in zip(targets, raw.view(TYPES[kind]).T, strict=True):
        team.write(target, column)


@opcode("st")
def st(team: Team, one: Instruction) -> None:
    sources, kind = _parts(one.operands[1]), one.kind
    addresses = team.addresses(one.operands[0])
    columns = [np.broadcast_to(team.read(source, kind), addresses.shape) for source in sources]
    values = np.stack(columns, 1)
    size = values.shape[1] * values.itemsize
    team.space(_space(one)).write(addresses, values.view(f"u{min(size, 8)}"), team.active_warps())


ATOMS: dict[str, Any] = {
    "add": lambda old, new: old + new,
    "min": min,
    "max": max,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "exch": lambda old, new: new,
}


@opcode("atom", "red")
def atom(team: Team, one: Instruction) -> None:
    """Each thread, one after the other, reads a number and writes the result of the operation. Atomic operations do not
    race with one another."""
    target = one.operands[0] if one.opcode == "atom" else Register(-1, np.uint64)
    address, *sources = one.operands[one.opcode == "atom" :]
    kind, space = one.kind, team.space(_space(one))
    addresses = team.addresses(address)
    values = [np.broadcast_to(team.read(source, kind), addresses.shape) for source in sources]
    results = np.zeros(len(addresses), TYPES[kind])
    for thread in range(len(addresses)):
        where = addresses[thread : thread + 1]
        old = space.exchange(where, results.itemsize, None).view(TYPES[kind])[0, 0]
        given = [value[thread] for value in values]
        new = _exchanged(one, old, given)
        space.exchange(where, results.itemsize, np.array([[new]], TYPES[kind]).view(f"u{results.itemsize}"))
        results[thread] = old
    team.write(target, results)


def _exchanged(one: Instruction, old: Any, given: list[Any]) -> Any:
    if one.has("cas"):
        return given[1] if old == given[0] else old
    operation = next((ATOMS[part] for part in one.modifiers if part in ATOMS), None)
    if operation is None:
        raise Unknown("this atomic operation")
    return operation(old, given[0])


@opcode("cp")
def cp(team: Team, one: Instruction) -> None:
    """`cp.async`: a copy from global to shared memory that arrives when its thread waits for it, and not before."""
    if not one.has("async"):
        raise Unknown("this copy")
    if one.has("commit_group", "wait_group", "wait_all"):
        _order_copies(team, one)
        return
    target, source, size, *rest = one.operands
    given = int(size.value("u32"))
    addresses, origins = team.addresses(target), team.addresses(source)
    amount = np.broadcast_to(team.read(rest[0], "u32") if rest else np.uint32(given), addresses.shape)
    values = np.zeros((len(addresses), max(given // 8, 1)), f"u{min(given, 8)}")
    if ((amount != 0) & (amount != given)).any():
        raise Unknown("a copy of a part, with zeros for the rest")
    warps, some = team.active_warps(), amount > 0
    if some.any():
        values[some] = team.block.memory.read(origins[some], given, warps[some])
    team.block.shared.promise(addresses, given, warps)
    team.open_copies.append((addresses, values, warps))


def _order_copies(team: Team, one: Instruction) -> None:
    if not isinstance(team.who, slice):
        raise Unknown("a group of copies that some threads commit or wait for without the others")
    if one.has("commit_group"):
        team.copies.append(team.open_copies)
        team.open_copies = []
        return
    if one.has("wait_all"):
        team.copies.append(team.open_copies)
        team.open_copies, left = [], 0
    else:
        left = int(one.operands[0].value("u32"))
    while len(team.copies) > left:
        for copy in team.copies.pop(0):
            team.block.shared.land(*copy)


@opcode("prefetch", "prefetchu", "applypriority", "discard")
def prefetch(team: Team, one: Instruction) -> None:
    """A hint for the caches."""
    if one.opcode == "discard":
        raise Unknown("memory that is discarded")


@opcode("createpolicy")
def createpolicy(team: Team, one: Instruction) -> None:
    """A hint for the caches, which loads and stores name."""
    team.write(one.operands[0], np.uint64(0))


@opcode("fence", "membar")
def fence(team: Team, one: Instruction) -> None:
    """Writes are visible to all threads at once here, so a missing fence is not noticed."""
