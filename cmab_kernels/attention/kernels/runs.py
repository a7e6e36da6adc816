# mypy: disable-error-code="no-untyped-def"
"""How the keys are shared out.

A set of n keys is cut into runs of `run_length(n)` keys. A program takes one run of one head against one block of queries, and leaves a
state, or a share of the query's gradient; these are added up run by run. The runs depend on n and the number of queries alone: a set gives
the same bits alone, in a batch, and packed among others.

Run r of set b is kept in slot `b * runs + r`. Packed sets (`cu_seqlens`) are mostly far shorter than all keys together, which is the only
length that the host knows: where it takes less room they use slot `b + cu_seqlens[b] // GRAIN + r` instead. Only the last run of a set is
shorter than GRAIN keys, so slots of different sets do not meet, and a program finds its set by bisection.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...triton_common import GRAIN, run_length

MOST_RUNS = 256
"""The most runs with one block of queries: with a single head, just under two programs for each of 132 multiprocessors."""

MOST_QUERIES = 128
"""The largest block of queries."""


@triton.jit
def set_bounds(cu_seqlens, batch, N):
    """First and last key of a set, in bounds whatever `cu_seqlens` holds."""
    first = 0
    last = N
    if cu_seqlens is not None:
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch), 0), N).to(tl.int32)
        last = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch + 1), first), N).to(tl.int32)
    return first, last


@triton.jit
def first_slot(cu_seqlens, batch, N, runs, BISECT: tl.constexpr):
    """The index of the first run of a set."""
    if BISECT:
        first, _ = set_bounds(cu_seqlens, batch, N)
        slot = batch + first // GRAIN
    else:
        slot = batch * runs
    return slot


@triton.jit
def locate(slot, cu_seqlens, B, N, cut, BISECT: tl.constexpr):
    """The set of a slot, and the first and last key of its run; no keys for a slot that no run uses."""
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
    length = run_length(last - first, most_runs)
    first = tl.minimum(first + (slot - first_slot(cu_seqlens, batch, N, runs, BISECT)) * length, last)
    return batch, first, tl.minimum(first + length, last)


class Cut(NamedTuple):
    """The arguments of the functions above, and the number of slots."""

    runs: int
    most_runs: int
    bisect: bool
    slots: int


def cut_keys(batch: int, queries: int, keys: int, packed: bool) -> Cut:
    """More blocks of queries need fewer runs to fill a GPU: the workspace stays as it was."""
    most_runs = max(MOST_RUNS // max(triton.cdiv(queries, MOST_QUERIES), 1), 1)
    if not packed:
        runs = max(triton.cdiv(keys, run_length.fn(keys, most_runs)), 1)
        return Cut(runs, most_runs, False, batch * runs)
    runs = max(min(triton.cdiv(keys, GRAIN.value), most_runs), 1)
    by_offset = batch + keys // GRAIN.value
    return Cut(runs, most_runs, by_offset < batch * runs, min(by_offset, batch * runs))
