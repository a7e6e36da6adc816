"""What the kernels can run, the precision of their products, and the sizes of their blocks."""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ....runtime.dtypes import state_dtype
from ....runtime.tiles import chosen_once, padded
from ....runtime.triton_launch import MOST_ROWS, WIDEST, Kernel, Products, allows_tf32, device_problem, triton_dtype

MOST_PROGRAMS = 512
"""The most programs that store a share each of the gradients of weights, which bounds the workspace for any number of
rows."""

FILLING = 1024
"""The programs that fill a GPU evenly, in a few waves: fewer blocks of rows are divided into columns too."""

MULTIPLIED_AS_THEY_ARE = [torch.bfloat16]
"""The half types whose values are multiplied as such. float16 is multiplied as float32: projections may leave its
range."""


def unsupported(query: Tensor, inputs: Tensor, key_weight: Tensor, value_weight: Tensor) -> str | None:
    """The reason why Triton's kernels cannot run these inputs, as a phrase; None if they can."""
    key, value = query.shape[-1], value_weight.shape[-2] // query.shape[-3]
    if max(key, value) > WIDEST:
        return f"its heads are at most {WIDEST} wide, keys are {key} wide, values {value}"
    if inputs.shape[1] > MOST_ROWS or query.shape[-2] > MOST_ROWS:
        return "it counts queries and rows in 32 bits"
    return device_problem(inputs)


_Stacked = TypeVar("_Stacked", Tensor, Tensor | None)


# ---- the K stacked blocks as more heads


def joined(stacked: _Stacked) -> _Stacked:
    """A tensor (K, B, H, ...) as (B, K H, ...), copied if it must be: it is as small as a state."""
    return stacked if stacked is None else stacked.transpose(0, 1).flatten(1, 2)


def apart(heads: Tensor, blocks: int) -> Tensor:
    """What `joined` was given, contiguous."""
    return heads.unflatten(1, (blocks, -1)).transpose(0, 1).contiguous()


def dtypes_of(inputs: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of keys and of values. Keys are never rounded to a half type: scores need their full precision."""
    sums = state_dtype(inputs)
    return sums, inputs if inputs in MULTIPLIED_AS_THEY_ARE else sums


# ---- memory


def aligned(*tensors: Tensor | None) -> list[Any]:
    """The tensors contiguous, and at multiples of 16 bytes: copies of those that are not, so that there is one program
    for all layouts."""
    return [t if t is None or _is_aligned(t) else t.clone(memory_format=torch.contiguous_format) for t in tensors]


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def shares_of_rows(blocks: int, tiles: int) -> int:
    """The number of programs for each tile of a weight's gradient, among which the blocks of rows are divided."""
    return max(min(blocks, MOST_PROGRAMS // tiles), 1)


# ---- precision and tiles

WIDEST_ROW = 256
"""The widest row that some programs of layers hold; those of wider rows hold pieces, and have the same tiles."""


def products(dtype: torch.dtype, backward: bool) -> Products:
    """float32 is multiplied in tf32 if torch allows it, else as three tf32 products of parts.

    Gradients of float16 are multiplied in tf32, with 11 bits too and the range of float32: those of a scaled loss leave
    float16's.
    """
    if dtype == torch.float16 and backward:
        return Products(torch.float32, "tf32")
    if dtype == torch.float32:
        return Products(dtype, "tf32" if allows_tf32() else "tf32x3")
    return Products(dtype, "ieee")


class Tiles(NamedTuple):
    """Rows in a block, rows of a matrix in a tile, columns of a row in a product, and Triton's options num_warps and
    num_stages."""

    BLOCK_R: int
    TILE: int
    PIECE: int
    num_warps: int
    num_stages: int = 1

    def at_most(self, columns: int, features: int) -> "Tiles":
        return self._replace(TILE=min(self.TILE, padded(features)), PIECE=min(self.PIECE, padded(columns)))


Table = dict[str, dict[int, Tiles]]

# By precision and widest row: the largest tiles that fit in registers and shared memory, as test_cubin.py of the layers
# sees it.
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


# Programs hold a piece of a row, whatever its width.
_ROWS: Table = {kind: {WIDEST_ROW: tiles[64]} for kind, tiles in _BACK.items()}
_TABLES = {"forward": _FORWARD, "back": _BACK, "rows": _ROWS, "matrix": _MATRIX}


@chosen_once
def _chosen(
    kernel: Kernel,
    pass_: str,
    dtype: torch.dtype,
    width: int,
    features: int,
    tf32: bool,
    wide: bool = False,
    **own: Any,
) -> tuple[Kernel, Tiles]:
    """The kernel with its `own` constants and those of a pass, which depend on `tf32`, whether torch allows it; and its
    tiles.

    With `wide`, one matrix is multiplied in float32 parts, whose tiles are then used for all.
    """
    chosen = products(dtype, pass_ != "forward")
    kind = "tf32x3" if wide else chosen.kind
    tiles = next(tiles for most, tiles in _TABLES[pass_][kind].items() if min(width, WIDEST_ROW) <= most).at_most(
        width, features
    )
    types = {
        "DTYPE": triton_dtype(state_dtype(dtype)),
        "OPERAND": triton_dtype(chosen.operand),
        "PRECISION": chosen.input_precision,
    }
    return kernel.given(**own, **types, **tiles._asdict()), tiles


def forward(kernel: Kernel, x: Tensor, C: int, M: int, **own: Any) -> tuple[Kernel, Tiles]:
    """The kernel for a forward pass from rows of C columns to M features, or back to such rows, and its tiles."""
    return _chosen(kernel, "forward", x.dtype, C, M, allows_tf32(), C=C, **own)


def projecting(
    kernel: Kernel, first: torch.dtype, others: torch.dtype, C: int, M: int, **own: Any
) -> tuple[Kernel, Tiles]:
    """`forward` for several matrices, of which the first is multiplied as another dtype."""
    wide = first != others
    chosen = Products(first, "tf32x3") if wide else products(first, False)
    own |= {"FIRST_OPERAND": triton_dtype(chosen.operand), "FIRST_PRECISION": chosen.input_precision}
    return _chosen(kernel, "forward", others, C, M, allows_tf32(), wide, C=C, **own)


def back(kernel: Kernel, x: Tensor, C: int, M: int, **own: Any) -> tuple[Kernel, Tiles]:
    """The kernel for its backward pass, whose programs hold whole rows, and its tiles."""
    return _chosen(kernel, "back", x.dtype, C, M, allows_tf32(), C=C, **own)


def of_rows(kernel: Kernel, x: Tensor, C: int, M: int, **own: Any) -> tuple[Kernel, Tiles]:
    """The kernel for the gradient of rows of C columns, of which a program holds a piece, and its tiles."""
    return _chosen(kernel, "rows", x.dtype, C, M, allows_tf32(), C=C, **own)


def of_matrix(kernel: Kernel, x: Tensor, M: int, C: int, **own: Any) -> tuple[Kernel, Tiles]:
    """The kernel for the gradient of a matrix (M, C), and its tiles."""
    return _chosen(kernel, "matrix", x.dtype, C, M, allows_tf32(), M=M, C=C, **own)
