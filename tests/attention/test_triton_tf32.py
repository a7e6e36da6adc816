"""Float32 as three products of tf32 parts, in Triton's interpreter, with matrix units that truncate as a GPU's do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from cmab_kernels.attention import triton as kernels
from cmab_kernels.attention.contract import Attention
from cmab_kernels.attention.triton import launch
from cmab_kernels.runtime.tiles import using
from cmab_kernels.runtime.triton_launch import Products
from cmab_kernels.runtime.triton_products import in_place, product
from cmab_kernels.testing import LAWS

from .test_triton import Case, _inputs, check_accuracy

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"

DEPTH = 8
"""Terms that are added at once: the depth of a tf32 instruction."""


def _truncated(x: np.ndarray, bits: int) -> np.ndarray:
    """The leading bits of each number, rounded towards zero."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.trunc(np.ldexp(fraction, bits)), exponent - bits)


def _multiply(a: np.ndarray, b: np.ndarray, sums: np.ndarray, bits: int = 24) -> np.ndarray:
    """Return a b + sums as the matrix units of a GPU compute it.

    Operands have 11 bits; other bits are ignored. Products are exact. Eight products and the sum so far are shifted to
    the largest exponent among them; `bits` bits are kept and the others are cut off, and so are those of the result.
    (Fasi, Higham, Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor cores, 2021. Newer units keep one or more
    additional bits.)
    """
    a, b, sums = _truncated(a.astype(np.float64), 11), _truncated(b.astype(np.float64), 11), sums.astype(np.float64)
    for start in range(0, a.shape[1], DEPTH):
        terms = a[:, start : start + DEPTH, None] * b[None, start : start + DEPTH, :]
        terms = np.concatenate([sums[:, None], terms], axis=1)
        _, exponent = np.frexp(np.abs(terms).max(1, keepdims=True))
        sums = _truncated(np.ldexp(np.trunc(np.ldexp(terms, bits - exponent)), exponent - bits).sum(1), bits)
    return sums


@contextmanager
def truncating_units(bits: int = 24) -> Iterator[list[int]]:
    """Within this context products in tf32 are those of `_multiply`; the value counts them."""
    plain, count = InterpreterBuilder.create_dot, [0]

    def create_dot(
        self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: Any, *rest: Any
    ) -> TensorHandle:
        if precision != ir.INPUT_PRECISION.TF32:
            return plain(self, a, b, d, precision, *rest)
        count[0] += 1
        return TensorHandle(_multiply(a.data, b.data, d.data, bits).astype(np.float32), d.dtype.scalar)

    with mock.patch.object(InterpreterBuilder, "create_dot", create_dot):
        yield count


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("latents, keys, width, value_width", [(2, 1100, 16, 16), (17, 197, 8, 24), (5, 300, 64, 64)])
def test_accuracy_with_truncating_units(law: str, latents: int, keys: int, width: int, value_width: int) -> None:
    with truncating_units() as count:
        check_accuracy(law, latents, keys, width, value_width)
    assert count[0] > 0


def test_one_product_of_tf32_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the matrix units is not too accurate: with a plain tf32 product, or with sums of 16 bits, the test
    fails."""
    with truncating_units(bits=16), pytest.raises(AssertionError):
        check_accuracy("normal", 2, 1100, 16, 16)
    monkeypatch.setattr(launch, "forward_products", lambda *_: Products(torch.float32, "tf32"))
    with using({}), truncating_units(), pytest.raises(AssertionError):
        check_accuracy("normal", 2, 1100, 16, 16)


@triton.jit
def _multiply_in_parts(a, b, out, IN_PLACE: tl.constexpr):
    i, j = tl.arange(0, 16)[:, None] * 16, tl.arange(0, 16)[None, :]
    left, right = tl.load(a + i + j), tl.load(b + i + j)
    if IN_PLACE:
        left, right = in_place(left, right)
    tl.store(out + i + j, product(left, right, tl.float32, "tf32x3"))


@pytest.mark.parametrize("in_other_order", [False, True])
def test_infinities_and_the_order_of_columns(in_other_order: bool) -> None:
    """A row with an infinity has infinities of the right sign, and a NaN stays in its row."""
    a, b = torch.randn(16, 16), torch.rand(16, 16) + 0.5
    a[3, 5], a[4, 6], a[7, 1], b[2, 9] = torch.inf, -torch.inf, torch.nan, torch.inf
    a[:, 2] = 1 + 2**-20 * torch.arange(16)
    out = torch.empty(16, 16)
    _multiply_in_parts[(1,)](a, b, out, in_other_order)
    right = a @ b
    assert torch.equal(out.isnan(), right.isnan()) and torch.equal(out.isinf(), right.isinf())
    finite = right.isfinite()
    assert torch.equal(out[~finite & ~right.isnan()], right[~finite & ~right.isnan()])
    assert (out - (a.double() @ b.double()))[finite].abs().max() < 2e-5


@pytest.mark.parametrize("latents, keys", [(5, 70), (129, 300)])
def test_turned_tiles_in_float64(latents: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orientation of bfloat16 for dK and dV, which the interpreter cannot run in bfloat16, is right to 1e-12."""
    monkeypatch.setattr(kernels.backward, "IN_PLACE", ("double",))
    mask = torch.rand(1, keys) < 0.3
    Case(*_inputs(1, 2, latents, keys, 8, 16, torch.float64), mask).check(1e-12)


def test_forward_multiplies_in_three_parts() -> None:
    """Float32 of ordinary widths uses three products of parts each for scores and values."""
    assert launch.forward_products(torch.float32, 64).precision == "tf32x3"
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 64, 8)
    with truncating_units() as count:
        kernels.attention_forward(Attention(q, k, k, scale=1.0))
    assert count[0] == 6
