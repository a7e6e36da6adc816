"""What the kernels of layers can run, the precision of their products, and the sizes of their blocks."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.dtypes import state_dtype
from ...runtime.tiles import chosen_once, padded
from ...runtime.triton_launch import MOST_ROWS, WIDEST, Kernel, Products, allows_tf32, device_problem, triton_dtype

WIDEST_ROW = 256
"""The widest row of x or of a context: a program holds whole rows of their gradients."""

MOST_PROGRAMS = 512
"""The most programs that store a share each of the gradients of weights, which bounds the workspace for any number of rows."""


def unsupported(x: Tensor, *others: Tensor) -> str | None:
    """The reason why Triton's kernels cannot run these inputs, as a phrase; None if they can.

    The `others`, of an attention layer alone, are its context, and the matrices of queries and of values by heads (H, D, C).
    """
    for rows in (x, *others[:1]):
        if rows.shape[-1] > WIDEST_ROW:
            return f"its rows are at most {WIDEST_ROW} wide, and are {rows.shape[-1]} wide"
        if math.prod(rows.shape[:-1]) > MOST_ROWS:
            return "it counts rows in 32 bits"
    for heads in others[1:]:
        if heads.shape[-2] > WIDEST:
            return f"its heads are at most {WIDEST} wide, and are {heads.shape[-2]} wide"
    return device_problem(x)


def aligned(*tensors: Tensor | None) -> list[Any]:
    """The tensors contiguous, and at multiples of 16 bytes: copies of those that are not, so that there is one program for all layouts."""
    return [t if t is None or _is_aligned(t) else t.clone(memory_format=torch.contiguous_format) for t in tensors]


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def shares_of_rows(blocks: int, tiles: int) -> int:
    """The number of programs for each tile of a weight's gradient, among which the blocks of rows are divided."""
    return max(min(blocks, MOST_PROGRAMS // tiles), 1)


# ---- precision and tiles


def products(dtype: torch.dtype, backward: bool) -> Products:
    """float32 is multiplied in tf32 if torch allows it, else as three tf32 products of parts.

    Gradients of float16 are multiplied in tf32, with 11 bits too and the range of float32: those of a scaled loss leave float16's.
    """
    if dtype == torch.float16 and backward:
        return Products(torch.float32, "tf32")
    if dtype == torch.float32:
        return Products(dtype, "tf32" if allows_tf32() else "tf32x3")
    return Products(dtype, "ieee")


class Tiles(NamedTuple):
    """Rows in a block, rows of a matrix in a tile, columns of a row in a product, and Triton's options num_warps and num_stages."""

    BLOCK_R: int
    TILE: int
    PIECE: int
    num_warps: int
    num_stages: int = 1

    def at_most(self, columns: int, features: int) -> "Tiles":
        return self._replace(TILE=min(self.TILE, padded(features)), PIECE=min(self.PIECE, padded(columns)))


Table = dict[str, dict[int, Tiles]]

# By precision and widest row: the largest tiles that fit in registers and shared memory, as tests/layers/test_cubin.py sees it.
_FORWARD: Table = {
    "half": {64: Tiles(64, 64, 64, 4, 2), 256: Tiles(64, 32, 64, 8, 1)},
    "tf32": {64: Tiles(64, 32, 64, 4), 256: Tiles(64, 32, 32, 8)},
    "tf32x3": {64: Tiles(64, 32, 64, 8), 256: Tiles(32, 16, 32, 8)},
    "double": {64: Tiles(32, 16, 16, 8), 256: Tiles(16, 16, 16, 8)},
}
_BACK: Table = {
    "half": {64: Tiles(64, 32, 64, 4), 256: Tiles(32, 32, 64, 8)},
    "tf32": {64: Tiles(32, 32, 64, 4), 256: Tiles(32, 32, 32, 8)},
    "tf32x3": {64: Tiles(32, 32, 64, 8), 256: Tiles(32, 16, 32, 8)},
    "double": {64: Tiles(16, 16, 16, 8), 256: Tiles(16, 16, 16, 8)},
}
_MATRIX: Table = {
    "half": {256: Tiles(64, 64, 64, 4)},
    "tf32": {256: Tiles(32, 64, 64, 8)},
    "tf32x3": {256: Tiles(32, 64, 64, 8)},
    "double": {256: Tiles(16, 32, 32, 8)},
}


_TABLES = {"forward": _FORWARD, "back": _BACK, "matrix": _MATRIX}


@chosen_once
def _chosen(kernel: Kernel, pass_: str, dtype: torch.dtype, width: int, features: int, tf32: bool, **own: Any) -> tuple[Kernel, Tiles]:
    """The kernel with its `own` constants and those of a pass, which depend on `tf32`, whether torch allows it; and its tiles."""
    chosen = products(dtype, pass_ != "forward")
    tiles = next(tiles for most, tiles in _TABLES[pass_][chosen.kind].items() if width <= most).at_most(width, features)
    types = {"DTYPE": triton_dtype(state_dtype(dtype)), "OPERAND": triton_dtype(chosen.operand), "PRECISION": chosen.input_precision}
    return kernel.given(**own, **types, **tiles._asdict()), tiles


def forward(kernel: Kernel, x: Tensor, C: int, M: int, **own: Any) -> tuple[Kernel, Tiles]:
    """The kernel for a forward pass from rows of C columns to M features, or back to such rows, and its tiles."""
    return _chosen(kernel, "forward", x.dtype, C, M, allows_tf32(), C=C, **own)


def back(kernel: Kernel, x: Tensor, C: int, M: int, **own: Any) -> tuple[Kernel, Tiles]:
    """The kernel for its backward pass, and its tiles."""
    return _chosen(kernel, "back", x.dtype, C, M, allows_tf32(), C=C, **own)


def of_matrix(kernel: Kernel, x: Tensor, M: int, C: int, **own: Any) -> tuple[Kernel, Tiles]:
    """The kernel for the gradient of a matrix (M, C), and its tiles."""
    return _chosen(kernel, "matrix", x.dtype, min(C, WIDEST_ROW), M, allows_tf32(), M=M, C=C, **own)
