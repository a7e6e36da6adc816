"""The descriptors of Hopper's matrix instructions in a disassembly: whether each holds the address of the kernel's
shared memory.

ptxas 12.8 drops the definitions of some descriptors (bench/notes/gpu.md). Products are then wrong, or the address is
illegal.
"""

import re
from collections.abc import Iterable, Iterator
from enum import IntEnum

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*) *([^;]*);")
_DATA = re.compile(r"F[A-Z]|MUFU|LD[GS]|H[A-Z]|D[A-Z]|I2F")
"""Instructions whose result is not an address: floating-point instructions, and loads from memory other than constants
and spilled registers."""


class Made(IntEnum):
    """The origin of the value of a register. If several members took part, the largest counts."""

    NUMBERS = 0
    ADDRESS = 1
    """The address of the block's shared memory took part in the computation. It was computed from the block's number in
    a cluster."""
    NOTHING = 2
    """Data, or a register that no instruction has written, took part in the computation."""


def lost_descriptors(sass: str) -> list[str]:
    """Return the matrix instructions with a descriptor that was not computed from the address of shared memory, as
    sentences.

    Instructions are followed in order, and the body of a loop once.
    """
    made = {"R1": Made.NUMBERS}  # the stack
    found = []
    for at, name, text in _INSTRUCTION.findall(sass):
        operands = [operand.strip().replace(".reuse", "") for operand in text.split(",")]
        if name.startswith("HGMMA"):
            lost = [first for first in _descriptors(operands) if _of(made, _words(first, 2)) != Made.ADDRESS]
            found += [f"{name} at {at}: no address in the descriptor {first}" for first in lost]
        else:
            _follow(made, name, operands)
    return found


def _descriptors(operands: list[str]) -> Iterator[str]:
    """Yield the first registers of the descriptors of an HGMMA: of both factors, or of the second if the first is in
    registers.

    An HGMMA that multiplies nothing has no descriptors; the assembler inserts it where the program waits."""
    given = next(operand for operand in operands if operand.startswith("gdesc"))
    if given == "gdesc[URZ]":
        return
    first = int(given.split("[UR")[1].split("]")[0])
    if operands.index(given) == 1:
        yield f"UR{first}"
    yield f"UR{first + 2}"


def _follow(made: dict[str, Made], name: str, operands: list[str]) -> None:
    """Record what the instruction writes: registers, or with STL a place on the stack."""
    if re.fullmatch(r"U?P\w+", operands[0]):  # the instruction also writes a predicate
        operands = operands[1:]
    if not operands or not re.match(r"U?R\d|\[R1\b", operands[0]):
        return
    words = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name or name == "CS2R" else 1
    target, *given = [_words(operand, words) for operand in operands]
    if name.startswith(("STL", "LDL")):
        made.update({to: _of(made, [source]) for to, source in zip(target, given[0], strict=True)})
    elif _DATA.match(name):
        made.update(dict.fromkeys(target, Made.NOTHING))
    elif "SR_CgaCtaId" in operands:
        made.update(dict.fromkeys(target, Made.ADDRESS))
    elif not operands[0].startswith("["):
        sources = given if name.startswith("UIADD3.64") else [_words(operand, 1) for operand in operands[1:]]
        made.update(dict.fromkeys(target, _of(made, [word for source in sources for word in source])))


def _of(made: dict[str, Made], words: Iterable[str]) -> Made:
    """Return the origin of a value that was computed from these words: the largest member of `Made` among them."""
    return max((made.get(word, Made.NOTHING) for word in words if re.match(r"U?R\d|\[", word)), default=Made.NUMBERS)


def _words(operand: str, count: int) -> list[str]:
    """Return the registers, or places on the stack, of an operand of this many words."""
    place = re.fullmatch(r"\[R1(?:\+(0x[0-9a-f]+))?\]", operand)
    if place:
        return [f"[{int(place[1] or '0', 16) + 4 * word}]" for word in range(count)]
    register = re.search(r"(?<!\w)(U?R)(\d+)", operand)
    return [f"{register[1]}{int(register[2]) + word}" for word in range(count)] if register else [operand] * count
