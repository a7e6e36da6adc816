# mypy: disable-error-code="no-untyped-def"
"""How the keys are split into runs, one for each program.

A set of n keys is cut into runs of `run_length(n)` keys. A program processes one run of one head for one block of queries and stores a
state, or a share of dQ; these are combined in the order of the runs. The runs depend only on n and the number of queries, so that a set
has the same bits alone, in a batch, and packed among others.

The result of run r of set b is stored in slot `b * runs + r`. The host knows only the total length of packed sets (`cu_seqlens`), which are
mostly far shorter: where it takes less memory they use slot `b + cu_seqlens[b] // GRAIN + r` instead. Only the last run of a set is shorter
than GRAIN keys, so that slots of different sets are distinct, and a program finds its set by bisection.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...triton_common import GRAIN, run_length

MOST_RUNS = 256
"""The most runs with one block of queries: for a single head, almost two programs for each of the 132 multiprocessors of an H100."""

MOST_QUERIES = 128
"""The queries that count as one block when the number of runs is chosen."""


@triton.jit
def set_bounds(cu_seqlens, batch, N):
    """The first key of a set and the end, one past its last key; within 0..N whatever `cu_seqlens` holds."""
    first = 0
    last = N
    if cu_seqlens is not None:
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch), 0), N).to(tl.int32)
        last = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch + 1), first), N).to(tl.int32)
    return first, last


@triton.jit
def first_slot(cu_seqlens, batch, N, runs, BISECT: tl.constexpr):
    """The slot of the first run of a set."""
    if BISECT:
        first, _ = set_bounds(cu_seqlens, batch, N)
        slot = batch + first // GRAIN
    else:
        slot = batch * runs
    return slot


@triton.jit
def count_runs(keys, most_runs):
    """The number of runs of a set of so many keys. (`tl.cdiv` would add a length to them, which may leave 32 bits.)"""
    length = run_length(keys, most_runs)
    return keys // length + tl.minimum(keys % length, 1)


@triton.jit
def run_bounds(first, last, run, most_runs):
    """The first key and the end of a run of the set that spans `first` to `last`; both `last` for a run that the set does not have.

    There are far more slots than runs where sets are packed: the number of a run is clamped before it is multiplied, in 32 bits.
    """
    length = run_length(last - first, most_runs)
    start = tl.minimum(first + tl.minimum(run, count_runs(last - first, most_runs)) * length, last)
    return start, start + tl.minimum(length, last - start)


@triton.jit
def locate(slot, cu_seqlens, B, N, cut, BISECT: tl.constexpr):
    """The set of a slot, and the first key and the end of its run, which are equal for a slot that no run uses."""
    runs, most_runs = cut
    if BISECT:
        batch = 0
        above = B
        while above - batch > 1:
            middle = (batch + above) // 2
            below = first_slot(cu_seqlens, middle, N, runs, BISECT) <= slot
            batch = tl.where(below, middle, batch)
            above = tl.where(below, above, middle)
    else:
        batch = slot // runs
    first, last = set_bounds(cu_seqlens, batch, N)
    first, last = run_bounds(first, last, slot - first_slot(cu_seqlens, batch, N, runs, BISECT), most_runs)
    return batch, first, last


class Cut(NamedTuple):
    """How keys are cut: slots per set, the most runs of a set, whether slots are found by bisection, and the number of slots."""

    runs: int
    most_runs: int
    bisect: bool
    slots: int


def cut_keys(batch: int, queries: int, keys: int, packed: bool) -> Cut:
    """How to cut the keys. With more blocks of queries fewer runs fill a GPU, which bounds the workspace."""
    most_runs = max(MOST_RUNS // max(triton.cdiv(queries, MOST_QUERIES), 1), 1)
    if not packed:
        runs = max(triton.cdiv(keys, run_length.fn(keys, most_runs)), 1)
        return Cut(runs, most_runs, False, batch * runs)
    runs = max(min(triton.cdiv(keys, GRAIN.value), most_runs), 1)
    by_offset = batch + keys // GRAIN.value
    return Cut(runs, most_runs, by_offset < batch * runs, min(by_offset, batch * runs))
