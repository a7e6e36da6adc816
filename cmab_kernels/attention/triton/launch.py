"""The precision of the matrix products, and the block sizes."""

from typing import Any, NamedTuple

import torch
import triton

from ...runtime.tiles import BLACKWELL, HOPPER, capability_of, chosen_once, has_little_shared_memory, tuned
from ...runtime.triton_launch import Products, allows_tf32, natural_alignment, triton_dtype


def _products(dtype: torch.dtype, fits: bool) -> Products:
    """float32 is multiplied in tf32 if torch allows it, else as three tf32 products of parts, where these fit in
    registers."""
    if dtype != torch.float32:
        return Products(dtype, "ieee")
    return Products(dtype, "tf32" if allows_tf32() else "tf32x3" if fits else "ieee")


def forward_products(dtype: torch.dtype, width: int) -> Products:
    return _products(dtype, width <= 64)


def backward_products(dtype: torch.dtype, width: int, device: torch.device) -> Products:
    """float16 is multiplied in tf32, with 11 bits too and the range of float32: dS of 1e6 keys, or of a scaled loss,
    leaves float16's."""
    widest = 32 if has_little_shared_memory(device) else 64
    return Products(torch.float32, "tf32") if dtype == torch.float16 else _products(dtype, width <= widest)


class Tiles(NamedTuple):
    """Queries in a block, keys in a tile, and Triton's options num_warps and num_stages."""

    BLOCK_L: int
    BLOCK_N: int
    num_warps: int
    num_stages: int

    def at_most(self, queries: int) -> "Tiles":
        return self._replace(BLOCK_L=min(self.BLOCK_L, max(triton.next_power_of_2(queries), 16)))


# By precision and widest head: the largest tiles that fit in registers and shared memory, as
# tests/attention/test_cubin.py sees it. They do not depend on lengths, but a block is no larger than the queries need.
# Tuned sizes (cmab_kernels/runtime/tiles.json) precede them.
_FORWARD = {
    "half": {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 32, 8, 3), 256: Tiles(64, 64, 8, 2)},
    "tf32": {32: Tiles(128, 64, 8, 2), 64: Tiles(128, 32, 8, 2), 128: Tiles(64, 32, 8, 1), 256: Tiles(32, 32, 8, 1)},
    "ieee": {128: Tiles(32, 16, 8, 1), 256: Tiles(16, 16, 8, 1)},
    "double": {16: Tiles(64, 32, 8, 1), 128: Tiles(32, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
}
_BACKWARD = {
    "half": {16: Tiles(128, 128, 8, 2), 128: Tiles(128, 64, 8, 2), 256: Tiles(32, 32, 8, 1)},
    "tf32": {32: Tiles(128, 64, 8, 2), 64: Tiles(128, 32, 8, 2), 256: Tiles(32, 32, 8, 1)},
    "ieee": {64: Tiles(32, 32, 8, 1), 128: Tiles(32, 16, 8, 1), 256: Tiles(16, 16, 8, 1)},
    "double": {64: Tiles(32, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
}
_BACKWARD_KEYS = {
    "half": {64: Tiles(64, 64, 4, 1), 128: Tiles(32, 64, 8, 1), 256: Tiles(32, 32, 8, 1)},
    "tf32": {16: Tiles(128, 64, 8, 2), 64: Tiles(64, 32, 8, 1), 128: Tiles(32, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
    "ieee": {64: Tiles(32, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
    "double": {64: Tiles(32, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
}


# Operands come from registers where Hopper's come from shared memory. Blackwell keeps products in tensor memory, of
# which a multiprocessor has 512 columns.
_FORWARD_IN_PARTS = {
    HOPPER[0]: {64: Tiles(128, 64, 8, 2)},
    BLACKWELL: {16: Tiles(128, 32, 4, 2), 32: Tiles(128, 64, 8, 2), 64: Tiles(64, 64, 8, 2)},
}
_AMPERE_IN_PARTS = {32: Tiles(128, 32, 4, 2), 64: Tiles(128, 32, 8, 2)}


# In place of these rows where a block has 99 KiB of shared memory.
_WITH_LITTLE_SHARED_MEMORY = {
    "attention.forward": {"half": {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 32, 8, 3), 256: Tiles(64, 32, 8, 2)}},
    "attention.backward": {
        "half": {
            16: Tiles(128, 128, 8, 2),
            64: Tiles(128, 64, 8, 2),
            128: Tiles(128, 32, 8, 2),
            256: Tiles(32, 32, 8, 1),
        },
        "tf32": {16: Tiles(128, 32, 8, 2), 64: Tiles(64, 32, 8, 2), 256: Tiles(32, 16, 8, 1)},
    },
    "attention.backward_keys": {"double": {64: Tiles(32, 32, 8, 1), 128: Tiles(16, 16, 8, 1), 256: Tiles(16, 8, 8, 1)}},
}

_BACKWARD_IN_PARTS = {
    HOPPER[0]: {64: Tiles(64, 64, 4, 1)},
    BLACKWELL: {32: Tiles(64, 64, 4, 1), 64: Tiles(64, 128, 8, 1)},
}
_AMPERE_BACKWARD_IN_PARTS = {32: Tiles(64, 64, 4, 1), 64: Tiles(32, 64, 4, 1)}
_AMPERE_BACKWARD = _BACKWARD["tf32"] | {64: Tiles(128, 16, 8, 2)}


# In place of "half" for keys wider than the half type of the values, whose tiles are larger and are multiplied in
# parts.
_WIDE_KEYS = {
    "attention.forward": {
        32: Tiles(128, 64, 4, 2),
        64: Tiles(128, 64, 8, 2),
        128: Tiles(64, 32, 8, 1),
        256: Tiles(32, 32, 8, 1),
    },
    "attention.backward": {32: Tiles(128, 64, 8, 1), 64: Tiles(128, 32, 8, 1), 256: Tiles(32, 32, 8, 1)},
    "attention.backward_keys": {
        32: Tiles(64, 32, 8, 1),
        64: Tiles(64, 32, 4, 1),
        128: Tiles(32, 32, 8, 1),
        256: Tiles(32, 16, 8, 1),
    },
}
_WIDE_KEYS_ON_HOPPER = _WIDE_KEYS | {
    "attention.backward": {16: Tiles(128, 128, 8, 1), 64: Tiles(128, 64, 8, 1), 256: Tiles(32, 32, 8, 1)}
}


def _tiles(
    kernel: str,
    table: dict[str, dict[int, Tiles]],
    products: Products,
    device: torch.device,
    width: int,
    wide: bool = False,
) -> Tiles:
    if wide:
        table = {products.kind: (_WIDE_KEYS_ON_HOPPER if capability_of(device)[0] == HOPPER[0] else _WIDE_KEYS)[kernel]}
    else:
        chosen = tuned(kernel, device, products.kind, width)
        if chosen:
            return Tiles(*chosen)
        if has_little_shared_memory(device):
            table = table | _WITH_LITTLE_SHARED_MEMORY[kernel]
    return next(tiles for widest, tiles in table[products.kind].items() if width <= widest)


def forward_tiles(products: Products, device: torch.device, width: int, queries: int, wide: bool = False) -> Tiles:
    in_parts = _FORWARD_IN_PARTS.get(capability_of(device)[0], _AMPERE_IN_PARTS)
    return _tiles("attention.forward", _FORWARD | {"tf32x3": in_parts}, products, device, width, wide).at_most(queries)


def backward_tiles(products: Products, device: torch.device, width: int, queries: int, wide: bool = False) -> Tiles:
    """The tiles of `_backward`, or for float32 in parts `_backward_in_parts`, which hold a block of queries and read
    the keys."""
    generation = capability_of(device)[0]
    of_one = _AMPERE_BACKWARD if generation < HOPPER[0] else _BACKWARD["tf32"]
    in_parts = _BACKWARD_IN_PARTS.get(generation, _AMPERE_BACKWARD_IN_PARTS)
    return _tiles(
        "attention.backward", _BACKWARD | {"tf32": of_one, "tf32x3": in_parts}, products, device, width, wide
    ).at_most(queries)


_PIECES: dict[int, dict[int, int | None]] = {HOPPER[0]: {32: None, 64: 16}, BLACKWELL: {32: 16, 64: 32}}


def piece_of_columns(device: torch.device, width: int) -> int | None:
    """The columns that `_backward_in_parts` multiplies at a time, None for all: fewer where registers hold operands or
    their addresses."""
    pieces = _PIECES.get(capability_of(device)[0], {64: 16})
    return next(piece for widest, piece in pieces.items() if width <= widest)


def backward_keys_tiles(products: Products, device: torch.device, width: int, wide: bool = False) -> Tiles:
    """The tiles of `_backward_keys`, which holds a tile of keys and reads the queries."""
    return _tiles("attention.backward_keys", _BACKWARD_KEYS, products, device, width, wide)


WIDEST_BLOCK = 256
"""The most queries in a block."""


def tile_alignment(
    dtype: torch.dtype, of_keys: torch.dtype, width: int, value_width: int, aligned: bool
) -> tuple[int, int, int]:
    """What is known of the addresses of queries, keys, and values of `dtype`: see `alignment`."""
    if not aligned:
        return 0, 0, 0
    keys = natural_alignment(of_keys, width)
    return keys, keys, natural_alignment(dtype, value_width)


def forward_constants(
    dtype: torch.dtype, device: torch.device, width: int, value_width: int, queries: int, wide: bool = False
) -> dict[str, Any]:
    """The constants of `_forward`, but for what is known of the addresses; `wide` says whether keys are wider than
    values."""
    widest = max(width, value_width)
    products = forward_products(dtype, widest)
    return {
        "D": width,
        "E": value_width,
        "LIFT": 2.0**14 if dtype == torch.float16 else 1.0,
        "OPERAND": triton_dtype(products.operand),
        "PRECISION": products.input_precision,
        **forward_tiles(products, device, widest, queries, wide)._asdict(),
    }


@chosen_once
def merge_constants(most_runs: int, value_width: int) -> dict[str, Any]:
    """The constants of `_merge`. Few numbers of runs are told apart, so that few programs are compiled."""
    most = next(number for number in (16, 64, 256) if most_runs <= number)
    return {
        "E": value_width,
        "MOST": most,
        "CHUNK": min(most, max(2048 // triton.next_power_of_2(value_width), 8)),
        "num_warps": 4,
    }
