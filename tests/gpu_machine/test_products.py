"""The digits of a float32 number that products in parts keep, with the truncation of matrix units, which no CPU has."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)

import triton
import triton.language as tl

from cmab_kernels.runtime.triton_launch import Kernel, kernel
from cmab_kernels.runtime.triton_products import product, product_of_wide
from cmab_kernels.runtime.triton_rows import rows_at
from gpu_machine.launch import on_machine
from gpu_machine.machine import Machine

SIZE = 16


@triton.jit
def _square(base):
    every = tl.arange(0, 16)
    return rows_at(base, every, 16, 16)


@kernel()
def _in_tf32(a, b, out) -> None:
    tl.store(_square(out), product(tl.load(_square(a)), tl.load(_square(b)), tl.float32, "tf32x3"))


@kernel()
def _half_times_wide(a, b, out) -> None:
    tl.store(_square(out), product_of_wide(tl.load(_square(a)), tl.load(_square(b)), a.dtype.element_ty, "ieee"))


@kernel()
def _wide_times_half(a, b, out) -> None:
    tl.store(_square(out), product_of_wide(tl.load(_square(a)), tl.load(_square(b)), b.dtype.element_ty, "ieee"))


def _multiplied(multiply: Kernel, a: Tensor, b: Tensor) -> Tensor:
    with on_machine(Machine()):
        out = torch.empty(SIZE, SIZE)
        multiply(1, a, b, out)
    return out


def _errors(multiply: Kernel, a: Tensor, b: Tensor) -> Tensor:
    """The errors of the product of a matrix and the identity, relative to its elements."""
    return (_multiplied(multiply, a, b).double() / (a.double() @ b.double()) - 1).abs()


def test_three_products_in_tf32() -> None:
    """22 bits of a number are kept, with rounding: with truncation, errors would be twice as large, and all of one
    sign."""
    numbers, one = torch.rand(SIZE, SIZE) + 1, torch.eye(SIZE)
    assert _errors(_in_tf32, numbers, one).max() <= 2.0**-22
    assert _errors(_in_tf32, one, numbers).max() <= 2.0**-22


@pytest.mark.parametrize("dtype, allowed", [(torch.bfloat16, 2.0**-23), (torch.float16, 2.0**-22)])
def test_numbers_wider_than_the_operands(dtype: torch.dtype, allowed: float) -> None:
    numbers, one = torch.rand(SIZE, SIZE) + 1, torch.eye(SIZE, dtype=dtype)
    assert _errors(_half_times_wide, one, numbers).max() <= allowed
    assert _errors(_wide_times_half, numbers, one).max() <= allowed


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800000, -0x800000])
def test_no_number_is_lost(bits: int) -> None:
    """A NaN with any bits makes its row NaN; an infinity keeps its sign."""
    odd = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    numbers = torch.rand(SIZE, SIZE) + 1
    numbers[3, 5] = odd
    found = _multiplied(_in_tf32, numbers, torch.rand(SIZE, SIZE) + 1)
    assert found[3].isnan().all() if math.isnan(odd) else (found[3] == odd).all()
    assert found[[row for row in range(SIZE) if row != 3]].isfinite().all()
