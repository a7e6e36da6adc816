"""The precision of the matrix products, the block sizes, and how keys are cut into runs."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...runtime.checks import refused_offsets
from ...runtime.tiles import HOPPER, capability_of, tuned
from ...runtime.triton_launch import Products, allows_tf32
from ...runtime.triton_rows import run_length

MOST_PROGRAMS = 256
"""The most programs for one matrix: almost two for each of the 132 multiprocessors of an H100."""


def gram_products(dtype: torch.dtype, exact: bool, weighted: bool) -> Products:
    """float32, and half precision with weights, is multiplied in tf32 if torch allows it, else as six bfloat16
    products, as accurate."""
    if exact or dtype == torch.float64:
        return Products(torch.float64, "ieee")
    if dtype == torch.float32 or weighted:
        return Products(torch.float32, "tf32" if allows_tf32() else "bf16x6")
    return Products(dtype, "ieee")


class Cut(NamedTuple):
    """How the keys of a matrix are cut: the number of runs, and the number of keys in a run."""

    runs: int
    length: int


@lru_cache(1024)
def cut_keys(keys: int, width: int, programs: int) -> Cut:
    """How to cut the keys if a run takes `programs`. The sums of a full run take at most a quarter of its keys and
    values in float32."""
    length = int(run_length.fn(keys, max(MOST_PROGRAMS // programs, 1), grain=1024 * max(width // 64, 1)))
    return Cut(max(-(-keys // length), 1), length)


Rows = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys, values, weights or None, and a mask of bytes or None."""


def over_sets(cu_seqlens: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
    """Offsets that kernels may trust, and rows (1, ...) expanded over the packed sets.

    The offsets are int32 (S + 2,). The host does not read them: if invalid ones were given, all sets are empty, and
    the last element is 1.
    """
    key, value, weights, mask = rows
    bad = refused_offsets(cu_seqlens, key.shape[2])
    offsets = torch.cat([cu_seqlens.masked_fill(bad, 0), bad.unsqueeze(0)]).to(torch.int32)
    sets = cu_seqlens.shape[0] - 1
    return offsets, (
        key.expand(sets, -1, -1, -1),
        value.expand(sets, -1, -1, -1),
        None if weights is None else weights.expand(sets, -1, -1),
        None if mask is None else mask.expand(sets, -1),
    )


def row_strides(rows: Tensor | None) -> tuple[int, ...]:
    """The strides of rows (B, H, N) seen as (B, H, N, 1); zeros for None."""
    return (0,) * 4 if rows is None else (*rows.stride(), 0)


class GramTiles(NamedTuple):
    """The tile of a sum, the keys in a tile (EXACT_N: in float64), and Triton's options num_warps and num_stages."""

    TILE_D: int
    TILE_E: int
    BLOCK_N: int
    EXACT_N: int
    num_warps: int
    num_stages: int


# By precision and widest tile: what fits in registers and shared memory, which tests/intention/test_cubin.py checks.
# Tuned sizes (cmab_kernels/runtime/tiles.json) precede them.
_GRAM = {
    "half": {16: (128, 16, 2, 3), 32: (64, 16, 4, 3), 64: (64, 16, 4, 4)},
    "tf32": {16: (64, 16, 2, 3), 32: (32, 16, 4, 3), 64: (64, 16, 8, 3)},
    "bf16x6": {16: (32, 16, 2, 3), 32: (32, 16, 4, 3), 64: (32, 16, 8, 3)},
    "double": {16: (32, 32, 2, 3), 32: (32, 32, 4, 3)},
}


def _has_wgmma(device: torch.device) -> bool:
    """Whether the GPU has Hopper's matrix instructions: their operands stay in shared memory, which makes tiles of 64
    columns pay."""
    return capability_of(device)[0] == HOPPER[0]


def _tile_widths(widest: int, device: torch.device, *widths: int) -> tuple[int, ...]:
    most = widest if _has_wgmma(device) else min(widest, 32)
    return tuple(min(max(triton.next_power_of_2(width), 16), most) for width in widths)


def gram_tiles(products: Products, device: torch.device, width: int, value_width: int) -> GramTiles:
    table = _GRAM[products.kind]
    tile, value_tile = _tile_widths(max(table), device, width, value_width)
    chosen = tuned("intention.gram", device, products.kind, max(tile, value_tile))
    return GramTiles(tile, value_tile, *(chosen or table[max(tile, value_tile)]))


ROWS = 512
"""The rows per program in kernels without sums: enough to make up for loading the matrix."""


def row_products(dtype: torch.dtype, exact: bool) -> Products:
    """Half-precision rows times a float32 matrix are multiplied in tf32, which holds the rows exactly and 11 bits of
    the matrix."""
    if exact or dtype == torch.float64:
        return Products(torch.float64, "ieee")
    return Products(torch.float32, "tf32" if dtype != torch.float32 or allows_tf32() else "bf16x6")


class RowTiles(NamedTuple):
    """The tile of a matrix, the rows in a tile, and Triton's options num_warps and num_stages."""

    TILE_D: int
    TILE_E: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


# By precision and widest matrix; the first number is the widest tile.
_BACKWARD = {
    "tf32": {32: (32, 128, 4, 3), 64: (64, 64, 8, 2), 256: (64, 128, 8, 2)},
    "bf16x6": {32: (32, 64, 4, 2), 64: (32, 128, 8, 2), 256: (32, 64, 8, 1)},
    "double": {256: (32, 32, 4, 2)},
}
_APPLY = {
    "tf32": {32: (32, 128, 4, 3), 64: (64, 128, 8, 2), 256: (64, 64, 8, 2)},
    "bf16x6": {32: (32, 64, 4, 2), 64: (64, 64, 8, 2), 256: (32, 64, 8, 2)},
    "double": {256: (32, 32, 4, 1)},
}


def _row_tiles(
    kernel: str,
    table: dict[str, dict[int, tuple[int, int, int, int]]],
    products: Products,
    device: torch.device,
    *widths: int,
) -> RowTiles:
    chosen = tuned(kernel, device, products.kind, max(widths))
    most, *rest = chosen or next(row for widest, row in table[products.kind].items() if max(widths) <= widest)
    return RowTiles(*_tile_widths(most, device, *widths), *rest)


def backward_tiles(products: Products, device: torch.device, width: int, value_width: int) -> RowTiles:
    return _row_tiles("intention.backward", _BACKWARD, products, device, width, value_width)


def apply_tiles(products: Products, device: torch.device, width: int, value_width: int) -> RowTiles:
    return _row_tiles("intention.apply", _APPLY, products, device, width, value_width)
