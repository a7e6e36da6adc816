"""Parses PTX text into instructions with their operands and the source lines from which they were compiled."""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .report import Unknown

WIDTHS = {"pred": np.bool_, "8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
"""The array type that holds a register, by its width."""

TYPES: dict[str, type] = {
    **{f"{letter}{bits}": getattr(np, f"uint{bits}") for letter in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": getattr(np, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": getattr(np, f"float{bits}") for bits in (16, 32, 64)},
    **{"bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32, "tf32": np.uint32, "pred": np.bool_},
}
"""The NumPy type of a PTX type. There is no bfloat16 in NumPy: its bits are handled as uint16."""


@dataclass(frozen=True)
class Register:
    """A register, or with index -1 the sink `_`; `negated` is used for predicates."""

    index: int
    width: type
    negated: bool = False


@dataclass(frozen=True)
class Immediate:
    """A constant, as it is written."""

    text: str

    def value(self, kind: str) -> np.generic:
        return _constant(self.text, kind)


@functools.cache
def _constant(text: str, kind: str) -> np.generic:
    into = np.dtype(TYPES[kind])
    if text.startswith(("0f", "0F")):
        return np.frombuffer(struct.pack("<I", int(text[2:], 16)), into)[0]
    if text.startswith(("0d", "0D")):
        return np.frombuffer(struct.pack("<Q", int(text[2:], 16)), into)[0]
    if into == np.bool_:
        return np.bool_(int(text, 0) != 0)
    number = int(text.rstrip("U"), 0) & (1 << 8 * into.itemsize) - 1
    return np.frombuffer(number.to_bytes(into.itemsize, "little"), into)[0]


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The address of a variable, or the name of a parameter, a function or a label."""

    name: str


@dataclass(frozen=True)
class Vector:
    """Several operands in braces, or two operands that a `|` separates."""

    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Address:
    """The contents of brackets: a register or the name of a variable, and an offset in bytes."""

    base: Any
    offset: int


@dataclass
class Instruction:
    """One instruction: `ld` with the modifiers ("global", "v4", "b32"), its guard or None, and its place in the
    source."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: list[Any]
    guard: Register | None
    where: str
    text: str
    number: int
    target: int = -1
    """The number of the instruction to which a branch leads."""

    @functools.cached_property
    def kind(self) -> str:
        """The last modifier that is a type."""
        return next(part for part in reversed(self.modifiers) if part in TYPES)

    @functools.cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(self.modifiers)

    def has(self, *modifiers: str) -> bool:
        """Return whether the instruction has one of these modifiers."""
        return not self._words.isdisjoint(modifiers)


@dataclass
class Kernel:
    """One kernel of a module."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: list[type] = field(default_factory=list)
    """The array type of each register."""
    parameters: dict[str, int] = field(default_factory=dict)
    """The size of each parameter in bytes, in their order."""
    variables: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """The space, alignment and size of each variable; dynamic shared memory has size 0."""
    threads: int = 0
    """The number of threads that a block must have, or 0 if any number is allowed."""


_DECLARATION = re.compile(
    r"\.(shared|local|global|const)\s+(?:\.align\s+(\d+)\s+)?\.\w?(\d+)\s+([\w$.]+)\s*(?:\[(\d*)\])?"
)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.\w?(\d+)\s+(?:\.ptr\s+[.\w ]*?)?([\w$]+)(?:\[(\d+)\])?\s*$")
_KERNEL = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)^\{(.*?)^\}", re.S | re.M)


@functools.cache
def parse(text: str) -> dict[str, Kernel]:
    """Return the kernels of a PTX module by name."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"(.*?)"', text, re.M))
    kernels = {}
    for name, parameters, directives, body in _KERNEL.findall(text):
        kernel = Kernel(name)
        for space, align, bits, variable, count in _DECLARATION.findall(text[: text.index(".entry")]):
            kernel.variables[variable] = _variable(space, align, bits, count)
        for parameter in filter(None, map(str.strip, parameters.split(","))):
            found = _PARAMETER.match(parameter)
            if not found:
                raise Unknown(f"the parameter {parameter!r}")
            kernel.parameters[found[2]] = int(found[1]) // 8 * int(found[3] or 1)
        required = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", directives)
        kernel.threads = int(required[1]) if required and "reqntid" in required[0] else 0
        _Body(kernel, files).read(body)
        for one in kernel.instructions:
            if one.opcode == "bra":
                one.target = kernel.labels[one.operands[0].name]
        kernels[name] = kernel
    return kernels


def _variable(space: str, align: str, bits: str, count: str) -> tuple[str, int, int]:
    return space, int(align or int(bits) // 8), int(bits) // 8 * int(count or 0)


class _Body:
    """Reads the lines between the braces of a kernel."""

    def __init__(self, kernel: Kernel, files: dict[str, str]) -> None:
        self.kernel, self.files = kernel, files
        self.where, self.pending = "unknown line", ""
        self.scopes: list[dict[str, Register]] = [{}]
        """The registers by name, with those of an inner scope last: inline assembly declares names that may have
        another meaning outside."""

    def read(self, body: str) -> None:
        for line in body.splitlines():
            location = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)(.*)", line)
            if location:
                self.where = self._place(*location.groups())
                continue
            self.pending += " " + line.split("//")[0].strip()
            *statements, self.pending = self.pending.split(";")
            for statement in statements:
                self._statement(statement)

    def _place(self, file: str, line: str, column: str, rest: str) -> str:
        comment = rest.partition("//")[2].strip()
        return comment or f"{self.files.get(file, file).rpartition('/')[2]}:{line}:{column}"

    def _statement(self, statement: str) -> None:
        while found := re.match(r"\s+|[{}]|([\w$]+):(?!:)", statement):
            if found[1]:
                self.kernel.labels[found[1]] = len(self.kernel.instructions)
            elif found[0] == "{":
                self.scopes.append({})
            elif found[0] == "}":
                self.scopes.pop()
            statement = statement[found.end() :]
        if not statement or statement.startswith(".pragma"):
            return
        if statement.startswith(".reg"):
            self._registers(statement)
            return
        if statement.startswith("."):
            found = _DECLARATION.match(statement)
            if not found:
                raise Unknown(f"the directive {statement!r}")
            self.kernel.variables[found[4]] = _variable(found[1], found[2], found[3], found[5])
            return
        guard = re.match(r"@(!?)([%\w$]+)\s+", statement)
        code = statement[guard.end() :] if guard else statement
        name, _, operands = code.replace("\t", " ").partition(" ")
        opcode, *modifiers = name.replace("::", "_").split(".")
        made = Instruction(
            opcode,
            tuple(modifiers),
            [self._operand(part) for part in _split(operands)],
            self._operand(guard[1] + guard[2]) if guard else None,
            self.where,
            " ".join(statement.split()),
            len(self.kernel.instructions),
        )
        self.kernel.instructions.append(made)

    def _registers(self, statement: str) -> None:
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S).groups()
        width = WIDTHS["pred" if kind == "pred" else kind.lstrip("usbf")]
        for name in names.split(","):
            stem, _, count = name.strip().rstrip(">").partition("<")
            for number in [stem + str(i) for i in range(int(count))] if count else [stem]:
                self.scopes[-1][number] = Register(len(self.kernel.registers), width)
                self.kernel.registers.append(width)

    def _operand(self, text: str) -> Any:
        text = text.strip()
        if text.startswith("{"):
            return Vector(tuple(self._operand(part) for part in _split(text[1:-1])))
        if text.startswith("["):
            base, sign, offset = re.match(r"\[\s*([%\w$.]+)\s*(?:([+-])\s*(-?\w+))?\s*\]", text).groups()
            return Address(self._operand(base), int(f"{sign}1") * int(offset, 0) if offset else 0)
        if text.startswith("("):
            return Vector(tuple(self._operand(part) for part in _split(text[1:-1])))
        if "|" in text:
            return Vector(tuple(self._operand(part) for part in text.split("|")))
        negated, name = text.startswith("!"), text.lstrip("!")
        for scope in reversed(self.scopes):
            if name in scope:
                return replace(scope[name], negated=negated)
        if name == "_":
            return Register(-1, np.uint64)
        if name.startswith("%"):
            return Special(name)
        return Immediate(name) if re.match(r"-?\d", name) else Symbol(name)


def _split(operands: str) -> list[str]:
    """Split at the commas that are not in brackets."""
    parts, depth = [""], 0
    for letter in operands:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
