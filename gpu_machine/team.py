"""Threads that are executed together: their registers, their places in the program, and the barrier for which each one
waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from .floats import flush, to_bfloat16, widen_bfloat16
from .memory import Bytes, Global
from .parse import TYPES, Address, Immediate, Instruction, Kernel, Register, Special, Symbol
from .report import Stop, Unknown

if TYPE_CHECKING:
    from .opcodes import Operation

POISON = 0x5EADBEEF5EADBEEF
"""The value of a register before it is written."""


class Block:
    """The data that the threads of a block share."""

    def __init__(
        self,
        kernel: Kernel,
        program: list[Operation],
        special: dict[str, int],
        parameters: Bytes,
        memory: Global,
        rough: bool,
    ) -> None:
        self.kernel, self.program, self.special, self.parameters, self.memory = (
            kernel,
            program,
            special,
            parameters,
            memory,
        )
        self.rough = rough
        self.shared = Bytes("shared memory", 0, 0)
        self.addresses: dict[str, int] = {}

    def place_variables(self, dynamic_bytes: int, lenient: bool) -> None:
        """Lay out shared memory, variables of fixed size first, then the dynamic part; parameters are 16 bytes apart.

        With `lenient`, shared memory holds NaN at the start, which may be read, and races in it are not reported.
        """
        end = 0
        for name, size in self.kernel.parameters.items():
            self.addresses[name] = end
            end += -(-size // 16) * 16
        end = 0
        for name, (space, align, size) in sorted(self.kernel.variables.items(), key=lambda entry: entry[1][2] == 0):
            if space == "shared":
                self.addresses[name] = end = -(-end // align) * align
                end += size or dynamic_bytes
        self.shared = Bytes("shared memory", 0, end, written=lenient, races=not lenient)

    def barrier(self) -> None:
        self.shared.barrier()
        self.memory.barrier()


class Team:
    """Whole warps that run in lockstep while their threads are at the same instruction; `who` are the active
    threads."""

    def __init__(self, block: Block, threads: np.ndarray) -> None:
        self.block, self.threads = block, threads
        self.lanes, self.warps = threads & 31, threads >> 5
        self.registers = [
            np.full(len(threads), POISON & (1 << 8 * np.dtype(width).itemsize) - 1 if width != np.bool_ else 0, width)
            for width in block.kernel.registers
        ]
        self.place = np.zeros(len(threads), np.int64)
        self.waiting, self.done, self.votes = (np.zeros(len(threads), bool) for _ in range(3))
        self.who: Any = slice(None)
        self.copies: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = []
        self.open_copies: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def advance(self) -> None:
        """Run until every thread waits at a barrier or has ended. If threads have diverged, those that are behind run
        first."""
        while not (idle := self.waiting | self.done).all():
            ready = np.where(idle, np.iinfo(np.int64).max, self.place)
            behind = ready.min()
            group = ready == behind
            self.who = slice(None) if group.all() else np.flatnonzero(group)
            ahead = ready[~group].min(initial=np.iinfo(np.int64).max)
            self._run(int(behind), int(min(ahead, len(self.block.program))))

    def _run(self, start: int, stop: int) -> None:
        """Run the active threads from one instruction to another, or until they diverge."""
        code, program = self.block.kernel.instructions, self.block.program
        at = start
        try:
            for at in range(start, stop):
                instruction = code[at]
                if instruction.guard is None or instruction.opcode == "bra":
                    if program[at](self, instruction):
                        return
                else:
                    with self.guarded(instruction.guard) as some:
                        if some and program[at](self, instruction):
                            return
        except Stop as fault:
            fault.at(f"{self.block.kernel.name}, {code[at].where}: {code[at].text}")
            raise
        self.place[self.who] = stop
        if stop == len(program):
            self.done[self.who] = True

    @contextmanager
    def guarded(self, guard: Register) -> Iterator[bool]:
        """Within this context, only those threads are active for which the guard is true; False if there are none."""
        everybody, holds = self.who, self.read(guard, "pred")
        if not holds.all():
            self.who = np.arange(len(self.threads))[self.who][holds]
        yield bool(holds.any())
        self.who = everybody

    def move_on(self, instruction: Instruction) -> None:
        """Record that the active threads are past this instruction."""
        self.place[self.who] = instruction.number + 1

    @property
    def positions(self) -> np.ndarray:
        """The active threads, as positions in the team."""
        return np.arange(len(self.threads))[self.who]

    # ---- operands

    def read(self, operand: Any, kind: str) -> np.ndarray:
        """Return the bits of an operand as an array of this type, a value for each active thread, or one for all of
        them."""
        if type(operand) is Register:
            raw = self.registers[operand.index][self.who]
            into = TYPES[kind]
            if operand.negated:
                return ~raw
            if raw.dtype == into:
                return raw
            if raw.itemsize == np.dtype(into).itemsize:
                return raw.view(into)
            return raw.astype(f"u{np.dtype(into).itemsize}").view(into)
        if type(operand) is Immediate:
            return operand.value(kind)
        if type(operand) is Special:
            return self._special(operand.name).astype(TYPES[kind])
        if type(operand) is Symbol:
            return np.asarray(self.address_of(operand.name), TYPES[kind])
        raise Unknown(f"the operand {operand}")

    def write(self, register: Register, values: np.ndarray) -> None:
        """Write values of any type; signed values are extended with their sign, others with zeros."""
        if register.index < 0:
            return
        values = np.asarray(values)
        if values.dtype.kind == "f":
            values = values.view(f"u{values.itemsize}")
        self.registers[register.index][self.who] = values

    def number(self, operand: Any, kind: str, flushed: bool = False) -> np.ndarray:
        """Return a floating-point operand as NumPy numbers: bfloat16 as float32, and with zeros for subnormal numbers
        if `flushed`."""
        values = self.read(operand, kind)
        if kind == "bf16":
            return widen_bfloat16(values)
        return flush(values) if flushed else values

    def put_number(self, register: Register, values: np.ndarray, kind: str, flushed: bool = False) -> None:
        """Write floating-point numbers; they are rounded to bfloat16 if that is the type."""
        if kind == "bf16":
            values = to_bfloat16(values)
        self.write(register, flush(values) if flushed else np.asarray(values, TYPES[kind]))

    def addresses(self, operand: Address) -> np.ndarray:
        """Return the address for each active thread."""
        base = operand.base
        if isinstance(base, Register):
            found = self.registers[base.index][self.who].astype(np.int64)
        else:
            found = np.full(len(self.threads), self.address_of(base.name), np.int64)[self.who]
        return found + operand.offset

    def address_of(self, name: str) -> int:
        if name not in self.block.addresses:
            raise Unknown(f"the variable {name}")
        return self.block.addresses[name]

    def space(self, name: str) -> Bytes | Global:
        """Return the memory that an instruction names."""
        spaces: dict[str, Bytes | Global] = {
            "global": self.block.memory,
            "shared": self.block.shared,
            "param": self.block.parameters,
        }
        if name not in spaces:
            raise Unknown(f"{name} memory")
        return spaces[name]

    def active_warps(self) -> np.ndarray:
        return self.warps[self.who]

    def _special(self, name: str) -> np.ndarray:
        if name == "%tid.x":
            return self.threads[self.who]
        if name == "%laneid":
            return self.lanes[self.who]
        if name == "%warpid":
            return self.warps[self.who]
        if name not in self.block.special:
            raise Unknown(f"the register {name}")
        return np.asarray(self.block.special[name])
