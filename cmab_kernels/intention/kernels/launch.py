"""The products, the block sizes, and how keys are cut into runs."""

from typing import NamedTuple

import torch
import triton

from ...triton_common import Products, allows_tf32, run_length

MOST_PROGRAMS = 256
"""For one matrix: just under two for each of 132 multiprocessors."""

TILE = 64
"""The widest square of a matrix that one program forms."""


def products(dtype: torch.dtype, exact: bool, mixed: bool) -> Products:
    """`mixed`: half precision meets numbers of float32, such as weights or a solution."""
    if exact or dtype == torch.float64:
        return Products(torch.float64, "ieee")
    if dtype == torch.float32:
        return Products(torch.float32, "tf32" if allows_tf32() else "bf16x6")
    return Products(torch.float32, "bf16x6") if mixed else Products(dtype, "ieee")


class Cut(NamedTuple):
    """Of the keys of each matrix: how many runs there are, and how many keys a run has."""

    runs: int
    length: int


def cut_keys(keys: int, width: int, programs: int) -> Cut:
    """Runs, where each takes as many programs as given; partial sums are at most a quarter of what float32 keys and values take."""
    length = int(run_length.fn(keys, max(MOST_PROGRAMS // programs, 1), grain=1024 * max(width // TILE, 1)))
    return Cut(max(triton.cdiv(keys, length), 1), length)


class Tiles(NamedTuple):
    """A tile of keys, and the warps and load stages that it takes: Triton's own names."""

    BLOCK_N: int
    num_warps: int
    num_stages: int


_GRAM = {
    "half": {16: Tiles(128, 1, 3), 32: Tiles(128, 4, 3), 64: Tiles(128, 8, 3)},
    "tf32": {16: Tiles(128, 1, 3), 32: Tiles(128, 4, 3), 64: Tiles(64, 8, 3)},
    "bf16x6": {16: Tiles(64, 1, 3), 32: Tiles(64, 4, 3), 64: Tiles(64, 8, 3)},
    "double": {16: Tiles(32, 1, 3), 32: Tiles(32, 4, 3), 64: Tiles(32, 8, 3)},
}


def tile_width(width: int) -> int:
    return max(min(triton.next_power_of_2(width), TILE), 16)


def gram_tiles(kind: str, width: int) -> Tiles:
    return _GRAM[kind][width]
