"""Branches, barriers, and the exchange of values between the threads of a warp."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from .opcodes import opcode
from .parse import TYPES, Instruction, Vector
from .report import Fault, Unknown
from .team import Team


@opcode("bra")
def bra(team: Team, one: Instruction) -> bool:
    """A jump of the threads for which the guard is true; without a guard, of all threads."""
    if one.guard is None:
        team.place[team.who] = one.target
        return True
    taken = team.read(one.guard, "pred")
    if not taken.any():
        return False
    team.place[team.who] = np.where(taken, one.target, one.number + 1)
    return True


@opcode("ret", "exit")
def ret(team: Team, one: Instruction) -> bool:
    team.move_on(one)
    team.done[team.who] = True
    return True


@opcode("trap", "brkpt")
def trap(team: Team, one: Instruction) -> None:
    raise Fault("the kernel stopped by itself: an assertion of its own failed")


@opcode("bar", "barrier")
def bar(team: Team, one: Instruction) -> bool:
    """A barrier for all threads of the block, `bar.red` with a vote of the threads, or a barrier for the threads of a
    warp."""
    if one.has("warp"):
        _all_there(team, team.read(one.operands[0], "u32"))
        return False
    vote = one.has("red")
    _, *counts = one.operands[1:-1] if vote else one.operands
    if not one.has("sync", "red") or any(int(count.value("u32")) != team.block.special["%ntid.x"] for count in counts):
        raise Unknown("a barrier for a part of a block")
    if vote:
        team.votes[team.who] = team.read(one.operands[-1], "pred")
    team.move_on(one)
    team.waiting[team.who] = True
    return True


def counted(one: Instruction, votes: np.ndarray) -> np.ndarray:
    """Return the value that every thread gets from the votes of all threads at a barrier `bar.red`."""
    if one.has("popc"):
        return votes.sum(dtype=np.uint32)
    return votes.any() if one.has("or") else votes.all()


def _all_there(team: Team, members: np.ndarray) -> np.ndarray:
    """Return the active threads as positions in the team; raise `Fault` if one of a warp's `members` is not active at
    this place."""
    positions = team.positions
    present = np.zeros(len(team.threads), np.uint32)
    present[positions] = np.uint32(1) << team.lanes[positions].astype(np.uint32)
    in_warp = present.reshape(-1, 32).sum(1, dtype=np.uint32)[positions // 32]
    if (members & ~in_warp).any():
        raise Fault("threads of a warp that must be at this instruction together are not")
    return positions


@opcode("shfl")
def shfl(team: Team, one: Instruction) -> None:
    """Each thread takes the value of another lane of its warp."""
    target, source, by, clamp, members = one.operands
    positions = _all_there(team, team.read(members, "u32"))
    lane = team.lanes[positions].astype(np.int64)
    by, clamp = (np.asarray(team.read(operand, "u32")).astype(np.int64) for operand in (by, clamp))
    segment, last = clamp >> 8 & 31, clamp & 31
    low = lane & segment
    high = low | (last & ~segment)
    if one.has("up"):
        other = lane - (by & 31)
        inside = other >= high
    else:
        other = {"down": lane + (by & 31), "bfly": lane ^ (by & 31), "idx": low | (by & 31 & ~segment)}[
            one.modifiers[1]
        ]
        inside = other <= high
    values = np.zeros(len(team.threads), np.uint32)
    values[positions] = team.read(source, "b32")
    there = np.zeros(len(team.threads), bool)
    there[positions] = True
    origin = positions - lane + np.where(inside, other, lane)
    if not there[origin].all():
        raise Fault("a shuffle takes the value of a thread that is not there")
    targets = target.parts if isinstance(target, Vector) else (target,)
    for register, result in zip(targets, (values[origin], inside), strict=False):
        team.write(register, result)


REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@opcode("redux")
def redux(team: Team, one: Instruction) -> None:
    """Each member of a warp gets the sum, the minimum, ... of the members' values."""
    operation = next(REDUCTIONS[part] for part in one.modifiers if part in REDUCTIONS)
    _for_each_warp(team, one, lambda values: reduce(operation, values))


@opcode("vote")
def vote(team: Team, one: Instruction) -> None:
    """Each member of a warp gets the result of a vote: for which, for any, or for all members a predicate is true."""
    if one.has("uni"):
        raise Unknown("this vote")

    def of(values: np.ndarray) -> Any:
        return values.any() if one.has("any") else values.all()

    if one.has("ballot"):
        _for_each_warp(team, one, lambda values: values, ballot=True)
    else:
        _for_each_warp(team, one, of)


def _for_each_warp(team: Team, one: Instruction, function: Callable[[np.ndarray], Any], ballot: bool = False) -> None:
    """Write to the active threads of each warp the results of the function for their values."""
    target, source, members = one.operands
    positions = _all_there(team, team.read(members, "u32"))
    kind = "pred" if one.opcode == "vote" else one.kind
    values = np.broadcast_to(team.read(source, kind), positions.shape)
    results = np.zeros(len(positions), np.uint32 if ballot else TYPES[kind])
    for warp in np.unique(positions // 32):
        those = positions // 32 == warp
        if ballot:
            lanes = team.lanes[positions[those]][values[those]].astype(np.uint32)
            results[those] = (np.uint32(1) << lanes).sum(dtype=np.uint32)
        else:
            results[those] = function(values[those])
    team.write(target, results)


@opcode("activemask")
def activemask(team: Team, one: Instruction) -> None:
    positions = team.positions
    present = np.zeros(len(team.threads), np.uint32)
    present[positions] = np.uint32(1) << team.lanes[positions].astype(np.uint32)
    team.write(one.operands[0], present.reshape(-1, 32).sum(1, dtype=np.uint32)[positions // 32])


@opcode("nanosleep")
def nanosleep(team: Team, one: Instruction) -> None:
    """The machine has no clock."""
