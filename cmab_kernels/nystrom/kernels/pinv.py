# mypy: disable-error-code="no-untyped-def"
"""The iterative pseudo-inverse of a batch of matrices, and its gradient."""

import triton
import triton.language as tl
from torch import Tensor

from ...triton_common import alignment, kernel, load_tile, on_device, rows_at, tile_at
from . import large
from .launch import in_one_program, options, scratch_squares, strides
from .squares import differentiate, iterate, iterate_in_scratch


@triton.jit
def load_square(base, strides, number, M: tl.constexpr, SIZE: tl.constexpr, ALIGN: tl.constexpr):
    return load_tile(tile_at(base, strides, number, 0, 0, SIZE, SIZE, ALIGN), tl.arange(0, SIZE) < M, M)


@triton.jit
def store_rows(base, number, tile, column, M: tl.constexpr, WIDTH: tl.constexpr):
    """Store a tile, from `column` on, to matrix `number` of contiguous matrices (M, WIDTH); padding is not stored."""
    row = tl.arange(0, tile.shape[0])
    columns = column + tl.arange(0, tile.shape[1])
    to = rows_at(base + number.to(tl.int64) * (M * WIDTH), row, WIDTH, tile.shape[1], column)
    tl.store(to, tile, mask=(row < M)[:, None] & (columns < WIDTH)[None, :])


@kernel("matrix")
def _pinv(
    matrix,
    inverse,
    strides: tl.int64,
    ITERATIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    M: tl.constexpr,
    SIZE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    number = tl.program_id(0)
    a = load_square(matrix, strides, number, M, SIZE, ALIGN[0])
    store_rows(inverse, number, iterate(a, ITERATIONS, OPERAND, PRECISION), 0, M, M)


@kernel("dinverse", "matrix")
def _pinv_backward(
    dinverse,
    matrix,
    dmatrix,
    scratch,
    strides: tl.int64,
    SCRATCH: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ALIGN: tl.constexpr,
    M: tl.constexpr,
    SIZE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    number = tl.program_id(0)
    scratch += number.to(tl.int64) * SCRATCH
    a = load_square(matrix, strides[1], number, M, SIZE, ALIGN[1])
    iterate_in_scratch(a, scratch, ITERATIONS, OPERAND, PRECISION)
    g = load_square(dinverse, strides[0], number, M, SIZE, ALIGN[0])
    store_rows(dmatrix, number, differentiate(g, scratch, ITERATIONS, OPERAND, PRECISION), 0, M, M)


def iterative_pinv(matrix: Tensor, iterations: int) -> Tensor:
    """Return the pseudo-inverse of each matrix of a batch (M, m, m) after this number of iterations, contiguous."""
    if not in_one_program(matrix):
        return large.iterative_pinv(matrix, iterations)
    inverse = matrix.new_empty(matrix.shape)
    with on_device(matrix):
        chosen = options(matrix, "nystrom.forward")
        _pinv(matrix.shape[0], matrix, inverse, strides(matrix), ITERATIONS=iterations, ALIGN=alignment(matrix), **chosen)
    return inverse


def iterative_pinv_backward(dinverse: Tensor, matrix: Tensor, iterations: int) -> Tensor:
    """Return the gradient of the matrices (M, m, m), contiguous."""
    if not in_one_program(matrix):
        return large.iterative_pinv_backward(dinverse, matrix, iterations)
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
            SCRATCH=scratch.stride(0),
            ITERATIONS=iterations,
            ALIGN=alignment(dinverse, matrix),
            **chosen,
        )
    return dmatrix
