# mypy: disable-error-code="no-untyped-def"
"""How the keys are cut into windows, and the prefixes into runs: by their numbers alone, so that bits depend on nothing else."""

from typing import NamedTuple

import triton
import triton.language as tl

PART = 256
"""The most keys of a window that has no end of a chunk in it."""

ALONE = 16
"""The keys of a chunk that has tiles of its own."""

PREFIXES = 1024
"""The fewest prefixes of a run of the scan backward, except the last: shorter ones are not worth a second look at them."""

KEYS = 256
"""The fewest keys of a run in the gradient of the queries, except the last."""

MOST_RUNS = 64
"""The most runs."""


class Windows(NamedTuple):
    """`group` chunks of `every` keys make a window; or, where `group` is 1, a chunk makes `parts` windows of `part` keys.

    `windows` in all, and a chunk, or a group of them, has `length` keys.
    """

    group: int
    windows: int
    parts: int
    length: int
    part: int

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """What kernels need to know."""
        return self[1:]


def chunk_of(every: int, keys: int) -> int:
    """The keys of a chunk, no more than there are, so that no product leaves 32 bits; but so that the group is that of `every`."""
    return min(every, max(keys, ALONE))


def group_of(every: int) -> int:
    """How many chunks share the matrix products of a tile: the shorter they are, the more."""
    return 16 if every <= 2 else 4 if every < ALONE else 1


def cut_windows(keys: int, every: int) -> Windows:
    group = group_of(every)
    if group > 1:
        length = group * every
        return Windows(group, -(-keys // length), 1, length, length)
    part = min(every, PART)
    parts, chunks = -(-every // part), -(-keys // every)
    count = (chunks - 1) * parts + -(-(keys - (chunks - 1) * every) // part)
    return Windows(group, count, parts, every, part)


def cut_runs(rows: int, grain: int) -> tuple[int, int]:
    """(runs, the number of rows in each but the last), a multiple of `grain`."""
    length = triton.cdiv(triton.cdiv(rows, MOST_RUNS), grain) * grain
    return triton.cdiv(rows, length), length


def tile_of_keys(most: int, few: bool) -> int:
    """The keys in a tile: few where chunks are so short that a group of them has no more."""
    return min(most, 16) if few else most


def scan_constants(value_width: int) -> dict[str, int]:
    """The constants of the scans: the steps of a tile, for each of which all are weighed, and its warps."""
    return {"TILE": 8 if value_width <= 128 else 4, "num_warps": min(max(triton.next_power_of_2(value_width) // 16, 1), 8)}


@triton.jit
def window_of(window, N, cut):
    """The first key of a window and the end, one past its last key. No product of them leaves 32 bits."""
    _, parts, length, part = cut
    start = window // parts * length
    before = window % parts * part
    return start + before, start + before + tl.minimum(part, tl.minimum(length, N - start) - before)
