"""The precision of the matrix products, the block sizes, and the inputs as the kernels take them."""

from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from ....runtime.tiles import BLACKWELL, HOPPER, capability_of, padded
from ....runtime.triton_launch import MOST_ROWS, WIDEST, Products, allows_tf32, device_problem, triton_dtype
from ...triton.runs import MOST_QUERIES
from .tiles import columns_of_chunk

SPLIT = 8
"""The number of programs that share the tiles of a run where tiles need nothing of each other."""

MOST_PROGRAMS = 512
"""The most programs that store a share each of the gradients of the projections, which bounds the workspace for any number of sets."""


def unsupported(query: Tensor, inputs: Tensor, key_weight: Tensor, value_weight: Tensor) -> str | None:
    """The reason why Triton's kernels cannot run these inputs, as a phrase; None if they can."""
    key, value = query.shape[-1], value_weight.shape[-2] // query.shape[-3]
    if max(key, value) > WIDEST:
        return f"its heads are at most {WIDEST} wide, keys are {key} wide, values {value}"
    if inputs.shape[1] > MOST_ROWS or query.shape[-2] > MOST_ROWS:
        return "it counts queries and rows in 32 bits"
    return device_problem(inputs)


_Stacked = TypeVar("_Stacked", Tensor, Tensor | None)


def chunks(width: int) -> int:
    """The number of chunks of a head's columns."""
    return -(-width // columns_of_chunk(width))


# ---- the K stacked blocks as more heads


def joined(stacked: _Stacked) -> _Stacked:
    """A tensor (K, B, H, ...) as (B, K H, ...), copied if it must be: it is as small as a state."""
    return stacked if stacked is None else stacked.transpose(0, 1).flatten(1, 2)


def apart(heads: Tensor, blocks: int) -> Tensor:
    """What `joined` was given, contiguous."""
    return heads.unflatten(1, (blocks, -1)).transpose(0, 1).contiguous()


def row_strides(inputs: Tensor) -> tuple[int, int, int, int]:
    """The strides of inputs (B, N, C) as those of one head."""
    batch, row, column = inputs.stride()
    return batch, 0, row, column


def queries_at_once(heads: int, queries: int) -> int:
    """The number of queries that says how many runs fill a GPU: those of all heads, each in whole blocks. More heads need fewer runs."""
    return heads * -(-queries // MOST_QUERIES) * MOST_QUERIES


# ---- precision and tiles


MULTIPLIED_AS_THEY_ARE = [torch.bfloat16, torch.float64]
"""The dtypes of inputs that are multiplied as such. float16 is multiplied as float32: projections may leave its range."""


def products(dtype: torch.dtype, fits: bool = True) -> Products:
    """float32 is multiplied in tf32 if torch allows it, else as three tf32 products of parts, where these fit in registers."""
    if dtype in MULTIPLIED_AS_THEY_ARE:
        return Products(dtype, "ieee")
    return Products(torch.float32, "tf32" if allows_tf32() else "tf32x3" if fits else "ieee")


def query_products(dtype: torch.dtype, width: int, device: torch.device) -> Products:
    """Those of the pass that holds a block of queries beside the gradients of a head's projections."""
    return products(dtype, width <= (64 if capability_of(device)[0] in (HOPPER[0], BLACKWELL) else 32))


class Tiles(NamedTuple):
    """Queries in a block, rows in a tile, columns of a row in a product, and Triton's options num_warps and num_stages."""

    BLOCK_L: int
    BLOCK_N: int
    COLUMNS: int
    num_warps: int
    num_stages: int = 1

    def at_most(self, queries: int, columns: int) -> "Tiles":
        latents = min(self.BLOCK_L, max(triton.next_power_of_2(queries), 16))
        return self._replace(BLOCK_L=latents, COLUMNS=min(self.COLUMNS, padded(columns)))


Table = dict[str, dict[int, Tiles]]

# By precision and widest head: the largest tiles that fit in registers and shared memory, as test_cubin.py of the set's tests sees it.
# 64-bit addresses of tiles in several layouts take as many registers as their numbers, so that tiles are smaller than those of given keys.
_FORWARD: Table = {
    "half": {16: Tiles(128, 64, 64, 4), 64: Tiles(128, 32, 32, 8), 256: Tiles(128, 32, 16, 8)},
    "tf32x3": {16: Tiles(128, 64, 32, 8), 32: Tiles(64, 32, 32, 8), 256: Tiles(64, 32, 16, 8)},
    "tf32": {16: Tiles(128, 32, 64, 8), 256: Tiles(64, 32, 32, 8)},
    "double": {16: Tiles(32, 32, 16, 8), 256: Tiles(16, 16, 16, 8)},
}
_QUERIES: Table = {
    "half": {16: Tiles(64, 32, 32, 4), 256: Tiles(32, 16, 32, 8)},
    "tf32x3": {16: Tiles(32, 32, 32, 4), 32: Tiles(32, 16, 32, 4), 256: Tiles(32, 16, 32, 8)},
    "tf32": {16: Tiles(64, 32, 32, 8), 32: Tiles(32, 32, 32, 8), 256: Tiles(32, 16, 32, 8)},
    "ieee": {256: Tiles(32, 32, 32, 8)},
    "double": {256: Tiles(16, 16, 16, 8)},
}
_INPUTS: Table = {
    "half": {16: Tiles(64, 32, 32, 4), 256: Tiles(32, 16, 32, 8)},
    "tf32x3": {32: Tiles(32, 16, 32, 4), 256: Tiles(16, 16, 16, 8)},
    "tf32": {16: Tiles(64, 32, 32, 8), 256: Tiles(32, 32, 32, 8)},
    "double": {256: Tiles(16, 16, 16, 8)},
}

# In place of the first row on Hopper, whose products read operands from shared memory: wider pieces of columns, and fewer rows of them.
_HOPPER_FORWARD = {16: Tiles(128, 32, 64, 8), 64: Tiles(64, 32, 32, 8), 256: Tiles(64, 32, 16, 8)}


def _constants(table: Table, products: Products, columns: int, width: int, value_width: int, queries: int) -> dict[str, Any]:
    widest = max(width, value_width)
    tiles = next(tiles for most, tiles in table[products.kind].items() if widest <= most).at_most(queries, columns)
    return {
        "C": columns,
        "D": width,
        "E": value_width,
        "OPERAND": triton_dtype(products.operand),
        "PRECISION": products.input_precision,
        **tiles._asdict(),
    }


def forward_constants(dtype: torch.dtype, device: torch.device, columns: int, width: int, value_width: int, queries: int) -> dict[str, Any]:
    """The constants of `_projected_forward`, but for what is known of the addresses."""
    table = _FORWARD | {"tf32x3": _HOPPER_FORWARD} if capability_of(device)[0] == HOPPER[0] else _FORWARD
    return _constants(table, products(dtype), columns, width, value_width, queries)


def _piece(products: Products, columns: int, width: int, value_width: int) -> int:
    """The columns of the inputs whose gradients a program holds. For each piece all scores are made anew: few spills cost less."""
    few = max(width, value_width) > 32 or products.kind == "double"
    return min(padded(columns), 128 if products.kind == "half" else 32 if few else 64)


def query_constants(products: Products, columns: int, width: int, value_width: int, queries: int) -> dict[str, Any]:
    """The constants of `_projected_backward`, which holds a piece of the gradients of a head's projections."""
    return {"PIECE": _piece(products, columns, width, value_width), **_constants(_QUERIES, products, columns, width, value_width, queries)}


def input_constants(products: Products, columns: int, width: int, value_width: int, queries: int) -> dict[str, Any]:
    """The constants of `_projected_backward_inputs`, which holds a piece of the gradient of a tile of rows."""
    constants = _constants(_INPUTS, products, columns, width, value_width, queries)
    return {"PIECE": _piece(products, columns, width, value_width), "TURNED": products.kind == "tf32x3", **constants}
