"""The products, and the warps of a program."""

from typing import Any

import torch
import triton
from torch import Tensor

from ...tiles import BLACKWELL, capability_of, tuned
from ...triton_common import Products, triton_dtype
from ...triton_common import unsupported as unsupported_rows
from .squares import squares_in_scratch

MOST_LANDMARKS = 64
WIDEST_IN_FULL = 32


def unsupported(matrix: Tensor, *others: Tensor) -> str | None:
    """Why Triton's kernels cannot run here; None when they can. Of matrices (M, m, ..), or of what they come from."""
    if matrix.dim() == 3 and matrix.shape[-2] > MOST_LANDMARKS:
        return f"its matrices are at most {MOST_LANDMARKS} wide, one a program"
    return unsupported_rows(matrix, matrix, matrix)


def products(dtype: torch.dtype, size: int, device: torch.device) -> Products:
    """float32 in full, or in six products of bfloat16 parts, as good, where whole rows and columns of floats do not fit in registers.

    Blackwell keeps these parts in tensor memory, where they do not fit either. Never in tf32, whatever torch may: the iteration makes
    errors a thousand times as large.
    """
    in_parts = dtype == torch.float32 and size > WIDEST_IN_FULL and capability_of(device)[0] != BLACKWELL
    return Products(dtype, "bf16x6" if in_parts else "ieee")


# By kind of products: what leaves the fewest values without a register, as tests/nystrom/test_cubin.py sees it. What was tuned on a GPU
# comes first (cmab_kernels/tiles.json).
_WARPS = {
    "nystrom.forward": {"ieee": 4, "bf16x6": 8, "double": 8},
    "nystrom.backward": {"ieee": 4, "bf16x6": 4, "double": 8},
}


def warps(kernel: str, products: Products, device: torch.device, size: int) -> int:
    chosen = tuned(kernel, device, products.kind, size)
    if chosen:
        return chosen[0]
    return 8 if products.kind == "ieee" and size > WIDEST_IN_FULL else _WARPS[kernel][products.kind]


def options(like: Tensor, kernel: str) -> dict[str, Any]:
    """The options of every kernel: the size of the matrices, padded for the products, and how they are multiplied."""
    size = max(triton.next_power_of_2(like.shape[-2]), 16)
    chosen = products(like.dtype, size, like.device)
    return {
        "M": like.shape[-2],
        "SIZE": size,
        "OPERAND": triton_dtype(chosen.operand),
        "PRECISION": chosen.input_precision,
        "num_warps": warps(kernel, chosen, like.device, size),
        "num_stages": 1,
    }


def strides(tensor: Tensor) -> tuple[int, int, int, int]:
    """The strides of a tensor (M, rows, columns), as if it were (M, 1, rows, columns)."""
    first, row, column = tensor.stride()
    return first, 0, row, column


def scratch_squares(like: Tensor, iterations: int, size: int) -> Tensor:
    """Scratch memory for the squares that a gradient keeps of each matrix."""
    return like.new_empty((like.shape[0], squares_in_scratch(iterations) * size * size))
