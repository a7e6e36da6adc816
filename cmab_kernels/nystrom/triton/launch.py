"""Launch options of the kernels: padded size, precision of the matrix products, number of warps; scratch memory."""

from typing import Any

import torch
import triton
from torch import Tensor

from ...runtime.tiles import BLACKWELL, HOPPER, capability_of, tuned
from ...runtime.triton_launch import Products, alignment, triton_dtype
from ...runtime.triton_launch import unsupported as unsupported_rows
from .squares import squares_in_scratch

MOST_LANDMARKS = 256
MOST_IN_REGISTERS = 64
"""The widest matrix that fits in one program; wider matrices are multiplied in blocks (`large`)."""
WIDEST_IN_FULL = 32
MULTIPLY_FLOAT64 = ((8, 0), HOPPER)
"""The compute capabilities on which Triton 3.6 multiplies float64 by matrix units."""


def unsupported(matrix: Tensor, *others: Tensor) -> str | None:
    """The reason why Triton's kernels cannot run these inputs, as a phrase; None if they can. `matrix` is (M, m, *), or
    a query or key."""
    if matrix.dim() == 3 and matrix.shape[-2] > MOST_LANDMARKS:
        return f"its matrices are at most {MOST_LANDMARKS} wide"
    return unsupported_rows(matrix, matrix, matrix)


def in_one_program(matrix: Tensor) -> bool:
    """Whether one program holds all squares of a matrix (M, m, *).

    In float64, the squares of 33 to 64 landmarks take 128 KiB of shared memory, and without matrix units they need four
    times as many registers as there are.
    """
    in_full = matrix.dtype == torch.float64 and capability_of(matrix.device) not in MULTIPLY_FLOAT64
    return matrix.shape[1] <= (WIDEST_IN_FULL if in_full else MOST_IN_REGISTERS)


def products(dtype: torch.dtype, size: int, device: torch.device) -> Products:
    """How matrices are multiplied. float32 uses its own arithmetic ("ieee"). For matrices whose rows and columns would
    not fit in registers, it uses six products of bfloat16 parts ("bf16x6"), which have the same accuracy.

    On Blackwell bf16x6 is not used, because the parts are kept in tensor memory, where they do not fit either. tf32 is
    never used, whatever torch allows, because the iteration makes rounding errors a thousand times as large.
    """
    in_parts = dtype == torch.float32 and size > WIDEST_IN_FULL and capability_of(device)[0] != BLACKWELL
    return Products(dtype, "bf16x6" if in_parts else "ieee")


# Number of warps by kind of product: the choice with the fewest register spills (tests/nystrom/test_cubin.py). Values
# that were tuned on a GPU take precedence (cmab_kernels/runtime/tiles.json).
_WARPS = {
    "nystrom.forward": {"ieee": 4, "bf16x6": 4, "double": 8},
    "nystrom.backward": {"ieee": 4, "bf16x6": 4, "double": 8},
    "nystrom.step": {"ieee": 4, "bf16x6": 8, "double": 8},
}


def warps(kernel: str, products: Products, device: torch.device, size: int) -> int:
    """The number of warps. In a chain of products, each warp takes 16 rows. Of eight warps, the second four would
    repeat the work of the first four. Hopper is the exception: there, eight warps hold the forward pass in two groups,
    without spills."""
    chosen = tuned(kernel, device, products.kind, size)
    if chosen:
        return chosen[0]
    in_full = products.kind == "ieee" and size > WIDEST_IN_FULL
    in_groups = kernel == "nystrom.forward" and products.kind == "bf16x6" and capability_of(device) == HOPPER
    return 8 if in_full or in_groups else _WARPS[kernel][products.kind]


def options(like: Tensor, kernel: str) -> dict[str, Any]:
    """The launch options that all kernels share: the padded size, the precision of products, and the number of
    warps."""
    size = max(triton.next_power_of_2(like.shape[-2]), 16)
    chosen = products(like.dtype, size, like.device)
    return {
        "SIZE": size,
        "OPERAND": triton_dtype(chosen.operand),
        "PRECISION": chosen.input_precision,
        "num_warps": warps(kernel, chosen, like.device, size),
        "num_stages": 1,
    }


def whole_alignment(*matrices: Tensor) -> tuple[int, ...]:
    """The `alignment` of matrices (M, m, m) if it is 16 bytes, else nothing, so that there are two compiled programs
    for all m."""
    known = alignment(*matrices)
    return known if all(a * t.element_size() == 16 for a, t in zip(known, matrices, strict=True)) else (0,) * len(known)


def strides(tensor: Tensor) -> tuple[int, int, int, int]:
    """The strides, in elements, of a tensor (M, rows, columns) seen as (M, 1, rows, columns)."""
    first, row, column = tensor.stride()
    return first, 0, row, column


def scratch_squares(like: Tensor, iterations: int, size: int) -> Tensor:
    """Uninitialised scratch memory (M, elements) in which the backward kernel keeps the intermediate squares of each
    matrix."""
    return like.new_empty((like.shape[0], squares_in_scratch(iterations) * size * size))
