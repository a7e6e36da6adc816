"""The machine: kernels are parsed once, and their blocks are executed one after the other, in an order that a seed
chooses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import arithmetic, control, mma, moves
from .memory import Bytes, Global
from .opcodes import OPCODES, Operation
from .parse import Kernel, parse
from .report import Fault, Stop, Unknown
from .team import Block, Team

KNOWS = (arithmetic, control, mma, moves)
"""The modules that define instructions."""


class Machine:
    """A GPU of compute capability 8.0 that executes PTX on the CPU.

    `memory` are the tensors that kernels may access. `seed` chooses the order of blocks, and the teams and the order in
    which the warps
    of a block run. With 0, all warps run together and blocks in order; otherwise at random.

    With `lenient`, unwritten shared memory is NaN and may be read, and races there are noticed only if bits depend on
    the order. csrc needs this: it computes with elements above a matrix's diagonal, and beyond the last row and column,
    and then leaves out the results.

    With `rough`, approximations in float32 (`ex2`, `lg2`, `rsqrt`, `div.full`) have errors of up to two units in the
    last place, as on hardware.
    """

    def __init__(self, seed: int = 0, lenient: bool = False, rough: bool = False) -> None:
        self.memory, self.seed, self.lenient, self.rough = Global(), seed, lenient, rough
        self.ran: list[tuple[str, int]] = []
        """The kernels that were launched, each with a number that represents all results so far, bit by bit."""

    def launch(
        self, ptx: str, name: str, grid: Sequence[int], threads: int, shared_bytes: int, parameters: Sequence[bytes]
    ) -> None:
        """Execute a kernel of a module; each parameter is given as its bytes."""
        kernel = parse(ptx)[name]
        program = _program(kernel)
        if kernel.threads not in (0, threads):
            raise Fault(f"{name} needs blocks of {kernel.threads} threads, and was launched with {threads}")
        given = _parameters(kernel, parameters)
        self.memory.notice_the_host()
        sizes = (*grid, 1, 1)[:3]
        random = np.random.default_rng(self.seed)
        numbers = np.arange(int(np.prod(sizes)))
        with np.errstate(all="ignore"):
            for number in numbers if self.seed == 0 else random.permutation(numbers):
                special = _special(int(number), sizes, threads)
                block = Block(kernel, program, special, given, self.memory, self.rough)
                block.place_variables(shared_bytes, self.lenient)
                try:
                    _run(block, _teams(block, threads, None if self.seed == 0 else random))
                except Stop as stop:
                    stop.args = (f"{stop}\n    block {number} of {len(numbers)}",)
                    raise
        self.ran.append((name, self.memory.digest()))


def _program(kernel: Kernel) -> list[Operation]:
    """Return the operation of each instruction; raise `Unknown` if there is none."""
    unknown = [one for one in kernel.instructions if one.opcode not in OPCODES]
    if unknown:
        stop = Unknown(f"the machine does not know: {', '.join(sorted({one.opcode for one in unknown}))}")
        stop.at(f"{kernel.name}, {unknown[0].where}: {unknown[0].text}")
        raise stop
    return [OPCODES[one.opcode] for one in kernel.instructions]


def _parameters(kernel: Kernel, values: Sequence[bytes]) -> Bytes:
    """Return the memory of the parameters, each at a multiple of 16 bytes."""
    if [len(value) for value in values] != list(kernel.parameters.values()):
        raise Fault(
            f"{kernel.name} takes parameters of {list(kernel.parameters.values())} bytes, and got "
            f"{[len(v) for v in values]}"
        )
    padded = b"".join(value.ljust(-(-len(value) // 16) * 16, b"\0") for value in values)
    data = np.frombuffer(bytearray(padded), np.uint8)
    return Bytes("the parameters", 0, len(padded), data, written=True)


def _special(number: int, grid: Sequence[int], threads: int) -> dict[str, int]:
    x, y = number % grid[0], number // grid[0]
    place = {"ctaid": (x, y % grid[1], y // grid[1]), "nctaid": grid, "ntid": (threads, 1, 1), "tid": (None, 0, 0)}
    named = {
        f"%{name}.{axis}": value for name, values in place.items() for axis, value in zip("xyz", values, strict=True)
    }
    return {name: value for name, value in named.items() if value is not None}


def _teams(block: Block, threads: int, random: np.random.Generator | None) -> list[Team]:
    """Return one team of all warps, or at random two teams; either may be empty, and is then left out."""
    warps = np.arange(-(-threads // 32))
    if threads % 32:
        raise Unknown("blocks that do not consist of whole warps")
    if random is None:
        return [Team(block, np.arange(threads))]
    first = random.random(len(warps)) < 0.5
    return [Team(block, np.flatnonzero(np.repeat(those, 32))) for those in (first, ~first) if those.any()]


def _run(block: Block, teams: list[Team]) -> None:
    """Run a block: run every team up to its next barrier, until all threads have ended."""
    block.barrier()
    while True:
        for team in teams:
            team.advance()
        waiting = np.concatenate([team.waiting for team in teams])
        if not waiting.any():
            return
        places = np.concatenate([team.place[team.waiting] for team in teams])
        _check_barrier(block, waiting, places)
        one = block.kernel.instructions[places[0] - 1]
        if one.has("red"):
            result = control.counted(one, np.concatenate([team.votes for team in teams]))
            for team in teams:
                team.who = slice(None)
                team.write(one.operands[0], result)
        block.barrier()
        for team in teams:
            team.waiting[:] = False


def _check_barrier(block: Block, waiting: np.ndarray, places: np.ndarray) -> None:
    """Raise `Fault` if some threads have ended while the others wait, or if they wait at different barriers."""
    lines = sorted({block.kernel.instructions[place - 1].where for place in places})
    where = f"{block.kernel.name}, " + " and ".join(lines)
    if not waiting.all():
        stop = Fault(f"a barrier that not all threads reach: {int((~waiting).sum())} of {len(waiting)} are done")
    elif (places != places[0]).any():
        stop = Fault("threads of a block wait at different barriers")
    else:
        return
    stop.at(where)
    raise stop
