"""Machine code as loops, and a loop as instructions by the unit that runs them.

A loop is a natural one: what can reach a jump back to its head without passing the head. A wait for a barrier is a loop too; it counts for
nothing. What is predicated off counts, and so does a branch that is seldom taken, unless its instructions are named as rare.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

UNITS = {
    "matrix": ("HMMA", "HGMMA", "DMMA", "UTCHMMA", "IMMA"),
    "special": ("MUFU", "F2F", "F2I", "I2F", "FRND"),
    "fp32": ("FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2", "HFMA2", "HADD2", "HMUL2"),
    "fp64": ("DFMA", "DADD", "DMUL", "DSETP"),
    "multiply": ("IMAD",),
    "shared": ("LDS", "STS", "LDSM", "STSM", "ATOMS"),
    "shuffle": ("SHFL",),
    "global": ("LDG", "STG", "LDGSTS", "ATOMG", "ATOM", "RED", "LD", "ST", "UTMALDG", "UTMASTG"),
    "local": ("LDL", "STL"),
    "tensor": ("LDTM", "STTM"),
    "barrier": (
        *("BAR", "DEPBAR", "LDGDEPBAR", "WARPGROUP", "SYNCS", "MEMBAR", "FENCE", "ERRBAR", "UTCBAR", "WARPSYNC", "BSSY", "BSYNC"),
        *("BRA", "EXIT", "CALL", "RET", "NOP", "BREAK", "CCTL", "UTCATOMSWS", "ELECT"),
    ),
}
"""unit -> the instructions that it runs, without their modifiers. `special`: exponentials, reciprocals, conversions of one number;
`multiply`: integers on the multiply-add units; `tensor`: registers to and from tensor memory; `barrier`: also jumps. All others are `alu`:
integers, logic, comparisons, maxima, and the uniform ones."""

_UNIT = {name: unit for unit, names in UNITS.items() for name in names}
_TILES = {"884": (8, 8, 4), "1684": (16, 8, 4), "1688": (16, 8, 8), "16816": (16, 8, 16)}
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;&?]*)[^;]*;", re.M)
"""Address, guard, name and operands; on sm_120 waits follow them (`&req={2} ?trans5`)."""
ALIKE = 0.9
"""Loops whose arithmetic differs by less do the same."""

_WAITS = ("SYNCS", "NANOSLEEP")


class Instruction(NamedTuple):
    address: int
    conditional: bool
    name: str
    operands: str

    @property
    def base(self) -> str:
        return self.name.split(".")[0]

    @property
    def target(self) -> int | None:
        """Where it may jump to."""
        if self.base not in ("BRA", "CALL", "BREAK"):
            return None
        found = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        return int(found[1], 16) if found else None

    @property
    def goes_on(self) -> bool:
        """True if the next instruction may follow this one."""
        if self.base in ("BRA", "EXIT", "RET"):
            return self.conditional or not re.fullmatch(r"(0x[0-9a-f]+)?\s*|R\d+ 0x[0-9a-f]+\s*", self.operands)
        return True


@dataclass
class Counts:
    """What a piece of code does: instructions of one warp by unit, and flops of a block's matrix units by the type of operands."""

    instructions: dict[str, float] = field(default_factory=dict)
    wavefronts: float = 0.0
    """Passes through shared memory: 128 bytes each, or one shuffle."""
    lanes: float = 0.0
    """Instructions on the float32 units, where a packed one counts twice."""
    flops: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.instructions.values())

    def add(self, other: Counts, weight: float) -> None:
        for mine, theirs in ((self.instructions, other.instructions), (self.flops, other.flops)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0.0) + weight * count
        self.wavefronts += weight * other.wavefronts
        self.lanes += weight * other.lanes


class Loop(NamedTuple):
    head: int
    blocks: frozenset[int]


class Code:
    """One kernel; `warps` of a block, of which one alone issues what the tensor cores of sm_100 take."""

    def __init__(self, text: str, warps: int) -> None:
        self.instructions = [
            Instruction(int(address, 16), bool(guard), name, operands) for address, guard, name, operands in _LINE.findall(text)
        ]
        if not self.instructions:
            raise ValueError("no instruction in the disassembly")
        self.warps = warps
        starts = {0}
        at = {instruction.address: i for i, instruction in enumerate(self.instructions)}
        for i, instruction in enumerate(self.instructions):
            if instruction.target in at:
                starts.add(at[instruction.target])
            if instruction.target is not None or not instruction.goes_on:
                starts.add(i + 1)
        cuts = sorted(starts | {len(self.instructions)})
        self.blocks = [range(a, b) for a, b in pairwise(cuts)]
        number = {block.start: i for i, block in enumerate(self.blocks)}
        self.successors: list[list[int]] = []
        for i, block in enumerate(self.blocks):
            last = self.instructions[block[-1]]
            after = [number[at[last.target]]] if last.target in at else []
            self.successors.append(after + ([i + 1] if last.goes_on and i + 1 < len(self.blocks) else []))

    @cached_property
    def loops(self) -> list[Loop]:
        """The natural loops, in the order of their heads."""
        dominators = _dominators(self.successors)
        before: list[list[int]] = [[] for _ in self.blocks]
        for block, after in enumerate(self.successors):
            for successor in after:
                before[successor].append(block)
        bodies: dict[int, set[int]] = {}
        for block, after in enumerate(self.successors):
            for head in after:
                if dominators[block] >> head & 1:
                    bodies.setdefault(head, {head}).update(_reaching(block, head, before))
        return [Loop(head, frozenset(blocks)) for head, blocks in sorted(bodies.items())]

    def is_wait(self, loop: Loop) -> bool:
        return self.size(loop) <= 8 and any(self.instructions[i].base in _WAITS for block in loop.blocks for i in self.blocks[block])

    def size(self, loop: Loop) -> int:
        return sum(len(self.blocks[block]) for block in loop.blocks)

    def outermost(self) -> list[Loop]:
        found = [loop for loop in self.loops if not self.is_wait(loop)]
        return [loop for loop in found if not any(loop.blocks < other.blocks for other in found)]

    def innermost(self) -> list[Loop]:
        found = [loop for loop in self.loops if not self.is_wait(loop)]
        return [loop for loop in found if not any(loop.blocks > other.blocks for other in found)]

    def multiply_adds(self, loop: Loop) -> int:
        """Those of one thread that are no matrix product."""
        each = {"FFMA": 1, "DFMA": 1, "FFMA2": 2}
        return sum(each.get(self.instructions[i].base, 0) for block in loop.blocks for i in self.blocks[block])

    def busiest(self) -> Loop:
        """The innermost with the most multiply-adds; of equal ones the shortest."""
        return max(self.innermost(), key=lambda loop: (self.multiply_adds(loop), -self.size(loop)))

    def main_loops(self, count: int = 1) -> list[Loop]:
        """The outermost with the most products, or else the most arithmetic; of equals, such as a loop and its ragged end, the first.

        None where there are only waits.
        """
        counted = {loop: self.count(loop) for loop in self.outermost()}
        amounts = {loop: sum(counts.flops.values()) for loop, counts in counted.items()}
        if not any(amounts.values()):
            amounts = {loop: sum(counts.instructions.get(unit, 0) for unit in ("fp32", "fp64")) for loop, counts in counted.items()}
        chosen: list[Loop] = []
        for _ in range(min(count, sum(amount > 0 for amount in amounts.values()))):
            most = max(amount for loop, amount in amounts.items() if loop not in chosen)
            chosen.append(next(loop for loop, amount in amounts.items() if loop not in chosen and amount >= ALIKE * most))
        return chosen

    def around_products(self, loop: Loop) -> Loop:
        """The smallest loop within this one that has half of its matrix products: the others are those of its ragged end."""
        products = {other: sum(self.count(other, peeled=False).flops.values()) for other in self.loops if other.blocks <= loop.blocks}
        return min((other for other, amount in products.items() if amount >= ALIKE / 2 * products[loop]), key=self.size)

    def weighs(self, loop: Loop) -> bool:
        """Whether there is an exponential in a loop, or in one within it."""
        return any(self.instructions[i].name.startswith("MUFU.EX2") for block in loop.blocks for i in self.blocks[block])

    def count(
        self,
        loop: Loop | None,
        trips: float = 1.0,
        rare: Mapping[str, float] | None = None,
        peeled: bool = True,
        around: Sequence[float] = (),
    ) -> Counts:
        """Counts one pass through a loop, or all the code. Each loop in it is taken `trips` times, and a loop in that as often again.

        But of loops with exponentials in them the first is taken as often as the first number of `around` says, one in that as the second.
        Matrix products between the loops in it are taken to be `peeled` off these, to overlap with their loads: they are passes less.
        `rare`: instruction -> how often a branch with it is taken.
        """
        blocks = frozenset(range(len(self.blocks))) if loop is None else loop.blocks
        within = [other for other in self.loops if other.blocks < blocks]
        waits = frozenset().union(*(other.blocks for other in within if self.is_wait(other)))
        inner = [other for other in within if not self.is_wait(other)]
        children = [other for other in inner if not any(other.blocks < between.blocks for between in inner)]
        counts = Counts()
        for block in sorted(blocks - waits.union(*(child.blocks for child in children))):
            names = [self.instructions[i].name for i in self.blocks[block]]
            shares = [share for name, share in (rare or {}).items() if any(n.startswith(name) for n in names)]
            counts.add(self._of(self.blocks[block]), min(shares, default=1.0) if loop is None or block != loop.head else 1.0)
        counted = []
        for child in children:
            named = around and self.weighs(child)
            times, deeper = (around[0], around[1:]) if named else (trips, around)
            counted.append((times, self.count(child, trips, rare, peeled, deeper)))
        products = sum(sum(one.flops.values()) for _, one in counted)
        before = sum(counts.flops.values()) / (products or math.inf) if peeled else 0.0
        for times, one in counted:
            counts.add(one, max(times - before, 0.0))
        return counts

    def _of(self, block: Iterable[int]) -> Counts:
        counts = Counts()
        units: Counter[str] = Counter()
        flops: Counter[str] = Counter()
        for i in block:
            instruction = self.instructions[i]
            unit = _UNIT.get(instruction.base, "alu")
            units[unit] += 1
            if unit == "matrix":
                kind, each = self._matrix(i)
                flops[kind] += each
            elif unit == "shared":
                counts.wavefronts += _wavefronts(instruction.name)
            elif unit == "shuffle":
                counts.wavefronts += 1
            elif unit in ("fp32", "multiply"):
                counts.lanes += 2 if instruction.base in ("FFMA2", "FADD2", "FMUL2") else 1
        counts.instructions, counts.flops = dict(units), dict(flops)
        return counts

    def _matrix(self, i: int) -> tuple[str, int]:
        """Kind of the operands, and flops of a block."""
        _, _, name, operands = self.instructions[i]
        if name.startswith("UTCHMMA"):
            return _described(self._uniform_constant(i, re.search(r"idesc\[(UR\d+)\]", operands)))
        kind = "double" if name.startswith("DMMA") else "tf32" if "TF32" in name else "half"
        shape = re.search(r"\.(\d+)x(\d+)x(\d+)", name)
        m, n, k = map(int, shape.groups()) if shape else _TILES[name.split(".")[1]]
        return kind, 2 * m * n * k * self.warps // (4 if name.startswith("HGMMA") else 1)  # that one by the four warps of a group

    def _uniform_constant(self, i: int, found: re.Match[str] | None) -> int:
        """What a uniform register was last set to before."""
        if found is None:
            raise ValueError(f"no descriptor: {self.instructions[i]}")
        for instruction in reversed(self.instructions[:i]):
            if set_to := re.fullmatch(rf"{found[1]}, 0x([0-9a-f]+)\s*", instruction.operands):
                return int(set_to[1], 16)
        raise ValueError(f"{found[1]} is no constant: {self.instructions[i]}")


def _described(descriptor: int) -> tuple[str, int]:
    """PTX ISA, instruction descriptor of tcgen05.mma: the type of A in bits 7 to 9, N / 8 from bit 17 on, M / 16 from bit 24 on."""
    tf32 = descriptor >> 7 & 7 == 2
    n, m = (descriptor >> 17 & 0x3F) * 8, (descriptor >> 24 & 0x1F) * 16
    return ("tf32", 2 * m * n * 8) if tf32 else ("half", 2 * m * n * 16)


def _wavefronts(name: str) -> int:
    """The fewest passes that a warp takes: 128 bytes each, and in wide loads pairs of lanes may ask for the same."""
    if name.startswith(("LDSM", "STSM")):
        return int((re.findall(r"\.([124])(?=\.|$)", name) or ["1"])[-1])
    passes = 4 if ".128" in name else 2 if ".64" in name else 1
    return max(passes // 2, 1) if name.startswith("LDS") else passes


def _dominators(successors: Sequence[Sequence[int]]) -> list[int]:
    """For each block a number whose bit i says that block i is on every way to it; 0 for what nothing leads to."""
    before: dict[int, set[int]] = {0: set()}
    waiting = [0]
    while waiting:
        block = waiting.pop()
        for successor in successors[block]:
            if successor not in before:
                waiting.append(successor)
            before.setdefault(successor, set()).add(block)
    everything = (1 << len(successors)) - 1
    found = [everything if block in before else 0 for block in range(len(successors))]
    found[0], changed = 1, True
    while changed:
        changed = False
        for block in sorted(before.keys() - {0}):
            common = functools.reduce(operator.and_, (found[one] for one in before[block])) | 1 << block
            if found[block] != common:
                found[block], changed = common, True
    return found


def _reaching(block: int, head: int, before: Sequence[Sequence[int]]) -> set[int]:
    found, waiting = {head}, [block]
    while waiting:
        if (current := waiting.pop()) not in found:
            found.add(current)
            waiting += before[current]
    return found
