# mypy: disable-error-code="no-untyped-def"
"""Products of matrices that do not fit in the registers of one program: in blocks, from and to GPU memory."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.triton_launch import kernel, on_device, strides_of, triton_dtype
from ...runtime.triton_products import product
from .launch import products
from .squares import divisor

BLOCK = tl.constexpr(32)
"""The order of a block: the largest for which no GPU spills the parts of float32 (tests/nystrom/test_cubin.py)."""

SQUARES = tl.constexpr(6)
"""The number of squares that `iterate_in_blocks` keeps in scratch memory."""


@triton.jit
def load_block(base, strides, i, j, rows, columns):
    """The block of a matrix with these strides that begins at row i and column j, with zeros outside of the matrix."""
    row, column = (i + tl.arange(0, BLOCK)).to(tl.int64)[:, None], (j + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    return tl.load(base + (row * strides[0] + column * strides[1]), mask=(row < rows) & (column < columns), other=0.0)


@triton.jit
def store_block(base, block, i, j, rows, columns):
    """Store a block to a contiguous matrix."""
    row, column = (i + tl.arange(0, BLOCK)).to(tl.int64)[:, None], (j + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    tl.store(base + (row * columns + column), block, mask=(row < rows) & (column < columns))


@triton.jit
def identity_block(value, i, j, OPERAND: tl.constexpr):
    """A block of `value` times the identity matrix."""
    row, column = i + tl.arange(0, BLOCK), j + tl.arange(0, BLOCK)
    factor = tl.full([1, 1], value, tl.float64).to(OPERAND)
    return tl.where(row[:, None] == column[None, :], factor, 0.0)


@triton.jit
def product_block(left, right, shift, i, j, sizes, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """A block of left (shift I - right), or of left right if `shift` is 0.

    Both matrices are (matrix, strides), and `sizes` are the numbers of rows of left, of right, and of columns.
    """
    rows, inner, columns = sizes
    total = tl.zeros([BLOCK, BLOCK], OPERAND)
    for k in range(0, inner, BLOCK):
        a = load_block(left[0], left[1], i, k, rows, inner)
        b = load_block(right[0], right[1], k, j, inner, columns)
        b = tl.where(shift == 0.0, b, identity_block(shift, k, j, OPERAND) - b)
        total += product(a, b, OPERAND, PRECISION)
    return total


# ---- one program for a matrix, whose squares are contiguous in scratch memory


@triton.jit
def _store_product(left, right, to, m, factor, diagonal, shift, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Store factor * left (shift I - right) + diagonal I; if `shift` is 0, left right replaces left (shift I -
    right)."""
    for i in range(0, m, BLOCK):
        for j in range(0, m, BLOCK):
            total = product_block((left, (m, 1)), (right, (m, 1)), shift, i, j, (m, m, m), OPERAND, PRECISION)
            total = tl.full([1, 1], factor, OPERAND) * total + identity_block(diagonal, i, j, OPERAND)
            store_block(to, total, i, j, m, m)
    tl.debug_barrier()


@triton.jit
def _largest_row_sum(square, strides, m, OPERAND: tl.constexpr):
    """The largest sum of |A| over a row. It is NaN if any sum is NaN, and 1 instead of 0."""
    largest = tl.max(tl.zeros([1], OPERAND), 0)
    total = tl.sum(tl.zeros([1], OPERAND), 0)
    for i in range(0, m, BLOCK):
        sums = tl.zeros([BLOCK], OPERAND)
        for j in range(0, m, BLOCK):
            sums += tl.sum(tl.abs(load_block(square, strides, i, j, m, m)), 1)
        largest = tl.maximum(largest, tl.max(sums, 0))
        total += tl.sum(sums, 0)
    return divisor(tl.where(total == total, largest, total))


@triton.jit
def iterate_in_blocks(scratch, m, ITERATIONS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return the address of Z after ITERATIONS iterations.

    `scratch` has memory for SQUARES m x m elements; the first m x m elements are A.
    """
    square = m.to(tl.int64) * m
    x, q, r = scratch + square, scratch + 2 * square, scratch + 3 * square
    z, new = scratch + 4 * square, scratch + 5 * square
    row = _largest_row_sum(scratch, (m, 1), m, OPERAND)
    column = _largest_row_sum(scratch, (1, m), m, OPERAND)
    for i in range(0, m, BLOCK):
        for j in range(0, m, BLOCK):
            store_block(z, load_block(scratch, (1, m), i, j, m, m) / column / row, i, j, m, m)
    tl.debug_barrier()
    for _ in range(ITERATIONS):
        _store_product(scratch, z, x, m, 1.0, 0.0, 0.0, OPERAND, PRECISION)
        _store_product(x, x, q, m, -1.0, 15.0, 7.0, OPERAND, PRECISION)
        _store_product(x, q, r, m, -1.0, 13.0, 0.0, OPERAND, PRECISION)
        _store_product(z, r, new, m, 0.25, 0.0, 0.0, OPERAND, PRECISION)
        z, new = new, z
    return z


# ---- a program for a block


@kernel("left", "right", "added")
def _multiply(
    left,
    right,
    added,
    out,
    factor: tl.float64,
    diagonal: tl.float64,
    shift: tl.float64,
    rows: tl.int32,
    inner: tl.int32,
    columns: tl.int32,
    strides: tl.int64,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    across = tl.cdiv(columns, BLOCK)
    blocks = tl.cdiv(rows, BLOCK) * across
    number = (tl.program_id(0) // blocks).to(tl.int64)
    i, j = tl.program_id(0) % blocks // across * BLOCK, tl.program_id(0) % across * BLOCK
    left, right, out = left + number * strides[0][0], right + number * strides[1][0], out + number * rows * columns
    sides, sizes = ((left, strides[0][1:]), (right, strides[1][1:])), (rows, inner, columns)
    total = product_block(*sides, shift, i, j, sizes, OPERAND, PRECISION)
    total = tl.full([1, 1], factor, tl.float64).to(OPERAND) * total + identity_block(diagonal, i, j, OPERAND)
    if added is not None:
        total += load_block(added + number * strides[2][0], strides[2][1:], i, j, rows, columns)
    store_block(out, total, i, j, rows, columns)


def multiply(
    left: Tensor,
    right: Tensor,
    factor: float = 1.0,
    diagonal: float = 0.0,
    shift: float = 0.0,
    added: Tensor | None = None,
) -> Tensor:
    """Return factor * left right + diagonal * I + added for batches of matrices, contiguous.

    With a shift, `shift * I - right` replaces right. float32 is never multiplied in tf32.
    """
    batch, rows, inner = left.shape
    columns = right.shape[2]
    out = left.new_empty((batch, rows, columns))
    chosen = products(left.dtype, max(left.shape[1:]), left.device)
    strides: tuple[Any, ...] = left.stride(), right.stride(), strides_of(added, 3)
    with on_device(left):
        programs = batch * triton.cdiv(rows, BLOCK.value) * triton.cdiv(columns, BLOCK.value)
        numbers = (factor, diagonal, shift, rows, inner, columns, strides)
        _multiply(
            programs,
            *(left, right, added, out),
            *numbers,
            OPERAND=triton_dtype(left.dtype),
            PRECISION=chosen.input_precision,
            num_warps=8 if left.dtype == torch.float64 else 4,
            num_stages=1,
        )
    return out
