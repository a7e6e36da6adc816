# mypy: disable-error-code="no-untyped-def"
"""Sums of matrices along time, forward or in reverse.

The matrices are cut into runs. The totals of the runs come first, so that all runs are summed in parallel.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...runtime.triton_launch import kernel
from .launch import MOST_PROGRAMS

STEPS = 8
"""The matrices that a program reads at a time: their loads wait for memory together."""

BLOCK = 64
"""The elements of a program: two for each thread of its one warp."""

GRAIN = 32
"""The fewest matrices of a run, except the last: a run costs a second reading of its matrices, and one more matrix."""


class Runs(NamedTuple):
    """The number of runs, and the number of matrices in each run but the last."""

    number: int
    length: int


def cut_steps(steps: int, programs: int) -> Runs:
    """How to cut matrices into runs that take `programs` programs each.

    The cut depends on numbers of one head alone, so that the bits depend on nothing else.
    """
    length = max(-(-steps // max(MOST_PROGRAMS // programs, 1)), GRAIN)
    return Runs(max(-(-steps // length), 1), length)


@kernel("matrices", "before")
def _scan_matrices(
    matrices,
    before,
    sums,
    steps: tl.int32,
    length: tl.int32,
    elements: tl.int32,
    order: tl.int32,
    passed: tl.int32,
    TOTAL: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the matrices of one run and those before it; `order` is 1, or -1 for the reverse.

    This stores the sum up to each matrix, or if `passed` is 1, without that matrix; with TOTAL, only the total of the
    run.
    """
    blocks = tl.cdiv(elements, BLOCK)
    runs = tl.cdiv(steps, length)
    slot = (tl.program_id(0) // blocks // runs).to(tl.int64)
    run = tl.program_id(0) // blocks % runs
    first = run * length
    last = tl.minimum(first + length, steps)
    element = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements
    total = tl.zeros([BLOCK], tl.float64)
    if before is not None:
        total = tl.load(before + ((slot * runs + run) * elements + element), mask=inside, other=0.0)
    for at in range(0, last - first, STEPS):  # reversed on loading: a reverse sum would exchange rows between threads
        ahead = at + tl.arange(0, STEPS)
        step = tl.where(order > 0, first + ahead, last - 1 - ahead)
        taken = tl.where(order > 0, step - passed, step + passed)
        there = ((taken >= first) & (taken < last))[:, None] & inside[None, :]
        tile = tl.load(
            matrices + ((slot * steps + taken)[:, None] * elements + element[None, :]), mask=there, other=0.0
        )
        if not TOTAL:
            here = ((step >= first) & (step < last))[:, None] & inside[None, :]
            to = sums + ((slot * steps + step)[:, None] * elements + element[None, :])
            tl.store(to, total[None, :] + tl.cumsum(tile, 0), mask=here)
        total += tl.sum(tile, 0)
    if TOTAL:
        tl.store(sums + ((slot * runs + run) * elements + element), total, mask=inside)


def _scan(
    matrices: Tensor,
    before: Tensor | None,
    sums: Tensor,
    runs: Runs,
    reverse: bool = False,
    passed: bool = False,
    total: bool = False,
) -> Tensor:
    """Fill `sums` with sums along contiguous matrices (B, H, T, D, E), plus those `before` their runs if not None."""
    B, H, T, D, E = matrices.shape
    if not D * E:
        return sums
    programs = B * H * runs.number * -(-D * E // BLOCK)
    numbers = T, runs.length, D * E, -1 if reverse else 1, int(passed)
    _scan_matrices(programs, matrices, before, sums, *numbers, TOTAL=total, STEPS=STEPS, BLOCK=BLOCK, num_warps=1)
    return sums


def totals_of_runs(matrices: Tensor, runs: Runs) -> Tensor:
    """The sum of the matrices of each run: (B, H, runs, D, E)."""
    B, H, _, D, E = matrices.shape
    return _scan(matrices, None, matrices.new_empty(B, H, runs.number, D, E), runs, total=True)


def sums_before(totals: Tensor, state: Tensor | None, reverse: bool) -> Tensor:
    """The sum of all matrices before each one, or after it in reverse, plus `state` (B, H, D, E) if not None."""
    return _scan(totals, state, torch.empty_like(totals), Runs(1, totals.shape[2]), reverse, passed=True)


def add_up(matrices: Tensor, state: Tensor | None, reverse: bool, sums: Tensor) -> Tensor:
    """Fill `sums` (which may be `matrices`) with the sum of each matrix, all before it, and `state` if not None.

    In reverse, it is the sum of each matrix and all after it.
    """
    runs = cut_steps(matrices.shape[2], -(-matrices.shape[3] * matrices.shape[4] // BLOCK) or 1)
    before = sums_before(totals_of_runs(matrices, runs), state, reverse) if runs.number > 1 else state
    return _scan(matrices, before, sums, runs, reverse)
