# mypy: disable-error-code="no-untyped-def"
"""The iterative pseudo-inverse of a batch of matrices, and its gradient."""

import triton
import triton.language as tl
from torch import Tensor

from ...runtime.triton_launch import kernel, on_device
from ...runtime.triton_rows import tile_at
from ..contract import Pinv, PinvBackward
from . import large
from .launch import in_one_program, options, scratch_squares, strides, whole_alignment
from .squares import differentiate, iterate, iterate_in_scratch


@triton.jit
def load_square(base, strides, number, m, SIZE: tl.constexpr, ALIGN: tl.constexpr):
    """Matrix `number` (m, m), with zeros around it."""
    there = tl.arange(0, SIZE) < m
    return tl.load(
        tile_at(base, strides, number, 0, 0, SIZE, SIZE, ALIGN), mask=there[:, None] & there[None, :], other=0.0
    )


@triton.jit
def store_rows(base, number, tile, column, m, width):
    """Store a tile that begins at `column` to matrix `number` of contiguous matrices (m, width); padding is not
    stored."""
    row = tl.arange(0, tile.shape[0])
    columns = column + tl.arange(0, tile.shape[1])
    to = base + number.to(tl.int64) * (m * width) + (row.to(tl.int64)[:, None] * width + columns[None, :])
    tl.store(to, tile, mask=(row < m)[:, None] & (columns < width)[None, :])


@kernel("matrix")
def _pinv(
    matrix,
    inverse,
    strides: tl.int64,
    m: tl.int32,
    ITERATIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    SIZE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    number = tl.program_id(0)
    a = load_square(matrix, strides, number, m, SIZE, ALIGN[0])
    store_rows(inverse, number, iterate(a, ITERATIONS, OPERAND, PRECISION), 0, m, m)


@kernel("dinverse", "matrix")
def _pinv_backward(
    dinverse,
    matrix,
    dmatrix,
    scratch,
    strides: tl.int64,
    m: tl.int32,
    SCRATCH: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    SIZE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    number = tl.program_id(0)
    scratch += number.to(tl.int64) * SCRATCH
    a = load_square(matrix, strides[1], number, m, SIZE, ALIGN[1])
    iterate_in_scratch(a, scratch, ITERATIONS, OPERAND, PRECISION)
    g = load_square(dinverse, strides[0], number, m, SIZE, ALIGN[0])
    store_rows(dmatrix, number, differentiate(g, scratch, ITERATIONS, OPERAND, PRECISION), 0, m, m)


def iterative_pinv(inputs: Pinv) -> Tensor:
    """Return the pseudo-inverse of each matrix, contiguous."""
    matrix, iterations, _ = inputs
    if not in_one_program(matrix):
        return large.iterative_pinv(inputs)
    inverse = matrix.new_empty(matrix.shape)
    with on_device(matrix):
        chosen = options(matrix, "nystrom.forward")
        _pinv(
            matrix.shape[0],
            matrix,
            inverse,
            strides(matrix),
            matrix.shape[1],
            ITERATIONS=iterations,
            ALIGN=whole_alignment(matrix),
            **chosen,
        )
    return inverse


def iterative_pinv_backward(inputs: PinvBackward) -> Tensor:
    """Return the gradient of the matrices, contiguous."""
    dinverse, matrix, iterations, _ = inputs
    if not in_one_program(matrix):
        return large.iterative_pinv_backward(inputs)
    dmatrix = matrix.new_empty(matrix.shape)
    chosen = options(matrix, "nystrom.backward")
    scratch = scratch_squares(matrix, iterations, chosen["SIZE"])
    with on_device(matrix):
        _pinv_backward(
            matrix.shape[0],
            dinverse,
            matrix,
            dmatrix,
            scratch,
            (strides(dinverse), strides(matrix)),
            matrix.shape[1],
            SCRATCH=scratch.stride(0),
            ITERATIONS=iterations,
            ALIGN=whole_alignment(dinverse, matrix),
            **chosen,
        )
    return dmatrix
