# mypy: disable-error-code="no-untyped-def"
"""How the keys are split into runs, one for each program.

A set of n keys is cut into runs of `run_length(n)` keys. A program processes one run of one head for one block of
queries and stores a state, or a share of dQ; these are combined in the order of the runs. The runs depend only on n and
the number of queries, so that a set has the same bits alone, in a batch, and packed among others.

The result of run r of set b is stored in slot `b * runs + r`. For packed sets (`cu_seqlens`), the host knows only the
total length, and most sets are far shorter. If it takes less memory, packed sets use slot `b + cu_seqlens[b] // GRAIN +
r` instead. Only the last run of a set is shorter than GRAIN keys, so slots of different sets are distinct, and a
program finds its set by bisection.

The host does not wait for the values of `cu_seqlens`. The first kernel validates the offsets, and all kernels read the
validated offsets: they rise from 0 to at most N whatever was given, so nothing is read or written out of bounds. If the
given offsets were invalid, every result is NaN.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.triton_launch import kernel
from ...runtime.triton_rows import GRAIN, run_length

MOST_RUNS = 256
"""The most runs with one block of queries: for one head, almost two programs per multiprocessor (132) of an H100."""

MOST_QUERIES = 128
"""The queries that count as one block when the number of runs is chosen."""

BY_OFFSET = tl.constexpr(0)
"""Replaces the number of slots per set: the first slot of a set follows from its offset."""


@kernel("cu_seqlens")
def _vet(cu_seqlens, offsets, sets: tl.int32, stride: tl.int64, N: tl.int32, BLOCK: tl.constexpr):
    """Copy the offsets if they rise from 0 to at most N.

    Otherwise all keys belong to the first set, and the element past the end is 1.
    """
    bad = (tl.load(cu_seqlens) != 0) | (tl.load(cu_seqlens + sets.to(tl.int64) * stride) > N)
    falls = 0
    for start in range(0, sets, BLOCK):
        index = (start + tl.arange(0, BLOCK)).to(tl.int64)
        low = tl.load(cu_seqlens + index * stride, mask=index < sets, other=0)
        high = tl.load(cu_seqlens + (index + 1) * stride, mask=index < sets, other=0)
        falls += tl.sum((low > high).to(tl.int32), 0)
    bad |= falls > 0
    for start in range(0, sets + 1, BLOCK):
        index = (start + tl.arange(0, BLOCK)).to(tl.int64)
        given = tl.load(cu_seqlens + index * stride, mask=index <= sets, other=0)
        tl.store(offsets + index, tl.where(bad, tl.where(index == 0, 0, N), given.to(tl.int32)), mask=index <= sets)
    tl.store(offsets + sets + 1, bad.to(tl.int32))


def checked_offsets(cu_seqlens: Tensor | None, keys: int) -> Tensor | None:
    """Return offsets of S sets as int32 (S + 2,) that kernels may trust: they rise from 0 to at most `keys`.

    The last element is 1 if invalid offsets were given. One small kernel checks this on the device; the host does not
    wait.
    """
    if cu_seqlens is None:
        return None
    sets = cu_seqlens.shape[0] - 1
    offsets = cu_seqlens.new_empty((sets + 2,), dtype=torch.int32)
    _vet(1, cu_seqlens, offsets, sets, cu_seqlens.stride(0), keys, BLOCK=1024)
    return offsets


@triton.jit
def unless_bad(result, offsets, B):
    """The result, or NaN if invalid offsets were given."""
    if offsets is not None:
        result = tl.where(tl.load(offsets + B + 1) != 0, float("nan"), result)
    return result


@triton.jit
def set_bounds(offsets, batch, N):
    """The first key of a set and the end, one past its last key."""
    first = 0
    last = N
    if offsets is not None:
        first = tl.load(offsets + batch)
        last = tl.load(offsets + batch + 1)
    return first, last


@triton.jit
def first_slot(offsets, batch, N, runs):
    """The slot of the first run of a set."""
    slot = batch * runs
    if offsets is not None:
        first, _ = set_bounds(offsets, batch, N)
        slot = tl.where(runs == BY_OFFSET, batch + first // GRAIN, slot)
    return slot


@triton.jit
def count_runs(keys, most_runs):
    """The number of runs of a set of so many keys.

    (`tl.cdiv` would add a length to `keys`, which may exceed 32 bits.)
    """
    length = run_length(keys, most_runs)
    return keys // length + tl.minimum(keys % length, 1)


@triton.jit
def run_bounds(first, last, run, most_runs):
    """The first key and the end of a run of the set that spans `first` to `last`; both `last` if there is none.

    With packed sets there are far more slots than runs. The number of the run is therefore clamped before it is
    multiplied, in 32 bits.
    """
    length = run_length(last - first, most_runs)
    start = tl.minimum(first + tl.minimum(run, count_runs(last - first, most_runs)) * length, last)
    return start, start + tl.minimum(length, last - start)


@triton.jit
def locate(slot, offsets, B, N, cut):
    """The set of a slot, and the first key and the end of its run; these are equal for a slot without a run."""
    runs, most_runs = cut
    if offsets is not None:
        batch = 0
        above = B
        while above - batch > 1:
            middle = (batch + above) // 2
            below = first_slot(offsets, middle, N, runs) <= slot
            batch = tl.where(below, middle, batch)
            above = tl.where(below, above, middle)
    else:
        batch = slot // runs
    first, last = set_bounds(offsets, batch, N)
    first, last = run_bounds(first, last, slot - first_slot(offsets, batch, N, runs), most_runs)
    return batch, first, last


class Cut(NamedTuple):
    """How keys are cut: slots per set, or BY_OFFSET; the most runs of a set; and the number of slots."""

    runs: int
    most_runs: int
    slots: int


@lru_cache(1024)
def cut_keys(batch: int, queries: int, keys: int, packed: bool) -> Cut:
    """Choose how to cut the keys. With more blocks of queries fewer runs fill a GPU; this bounds the workspace."""
    most_runs = max(MOST_RUNS // max(-(-queries // MOST_QUERIES), 1), 1)
    if not packed:
        runs = max(-(-keys // run_length.fn(keys, most_runs)), 1)
        return Cut(runs, most_runs, batch * runs)
    runs = max(min(-(-keys // GRAIN.value), most_runs), 1)
    by_offset = batch + keys // GRAIN.value
    return (
        Cut(runs, most_runs, batch * runs) if batch * runs <= by_offset else Cut(BY_OFFSET.value, most_runs, by_offset)
    )
