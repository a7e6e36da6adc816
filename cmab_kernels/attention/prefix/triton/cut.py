# mypy: disable-error-code="no-untyped-def"
"""The cut of the keys into windows, and of the prefixes into runs; both depend only on the numbers of these."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

PART = 256
"""The most keys of a window in which no chunk ends."""

ALONE = 16
"""The keys of a chunk from which on it has tiles of its own."""

PREFIXES = 1024
"""The fewest prefixes of a run of the backward scan, except the last: shorter runs are not worth reading them twice."""

KEYS = 256
"""The fewest keys of a run in the gradient of the queries, except the last."""

MOST_RUNS = 64
"""The most runs."""


class Windows(NamedTuple):
    """`group` chunks of `every` keys make a window. If `group` is 1, a chunk makes `parts` windows of `part` keys.

    There are `windows` windows in all, and a chunk, or a group of chunks, has `length` keys.
    """

    group: int
    windows: int
    parts: int
    length: int
    part: int

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The numbers that kernels take."""
        return self[1:]


def chunk_of(every: int, keys: int) -> int:
    """The keys of a chunk, at most all keys so that products fit in 32 bits,
    but with the same `group_of` as `every`."""
    return min(every, max(keys, ALONE))


def group_of(every: int) -> int:
    """How many chunks share the matrix products of a tile: the shorter the chunks, the more."""
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


def decay_of_windows(log_decay: Tensor | None, cut: Windows) -> tuple[Tensor | None, Tensor | None]:
    """The sums of the decays in each group of chunks, up to each of its chunks, (B, H, windows, group); and what is
    added to the lse of what was held before each window, (B, H, windows). None for windows within a chunk, or without
    decay."""
    if log_decay is None:
        return None, None
    if cut.group > 1:
        chunks = pad(log_decay, (0, cut.windows * cut.group - log_decay.shape[2]))
        until = chunks.unflatten(-1, (cut.windows, cut.group)).cumsum(-1)
        return until, until[..., -1].contiguous()
    return None, pad(log_decay.unsqueeze(-1), (0, cut.parts - 1)).flatten(-2)[..., : cut.windows].contiguous()


def cut_runs(rows: int, grain: int) -> tuple[int, int]:
    """Return (runs, rows in each run but the last); the latter is a multiple of `grain`."""
    length = triton.cdiv(triton.cdiv(rows, MOST_RUNS), grain) * grain
    return triton.cdiv(rows, length), length


def tile_of_keys(most: int, few: bool) -> int:
    """The keys in a tile. There are `few` if chunks are so short that a group of them has no more."""
    return min(most, 16) if few else most


def scan_constants(value_width: int) -> dict[str, int]:
    """The constants of the scans: the steps of a tile, each of which weighs all steps, and the warps of a tile."""
    return {
        "TILE": 8 if value_width <= 128 else 4,
        "num_warps": min(max(triton.next_power_of_2(value_width) // 16, 1), 8),
    }


@triton.jit
def window_of(window, N, cut):
    """The first key of a window and the end, one past its last key. No product of these numbers exceeds 32 bits."""
    _, parts, length, part = cut
    start = window // parts * length
    before = window % parts * part
    return start + before, start + before + tl.minimum(part, tl.minimum(length, N - start) - before)
