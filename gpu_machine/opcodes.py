"""The table of instructions: for each opcode, a function that executes it for the active threads of a team."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .parse import Instruction
    from .team import Team

Operation = Callable[["Team", "Instruction"], bool | None]
"""Executes an instruction; returns True if threads may now be at different places, which the operation has recorded."""

OPCODES: dict[str, Operation] = {}


def opcode(*names: str) -> Callable[[Operation], Operation]:
    """Add a function to the table, as the meaning of these opcodes."""

    def enter(operation: Operation) -> Operation:
        OPCODES.update(dict.fromkeys(names, operation))
        return operation

    return enter
