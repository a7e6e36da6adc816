"""Triton's interpreter with the arithmetic of a GPU.

The compiler for a GPU fuses a product with the sum that follows; the interpreter rounds the product. On a GPU, a
product of tiles adds the terms of every row in the same order; the interpreter calls a BLAS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@contextmanager
def fused_products() -> Iterator[None]:
    """Within this context, a product is not rounded if it is added or subtracted next."""
    plain = InterpreterBuilder.binary_op

    def multiply(self: Any, a: TensorHandle, b: TensorHandle) -> TensorHandle:
        result = plain(self, a, b, np.multiply)
        if result.data.dtype in (np.float32, np.float64):
            result.unrounded = np.multiply(a.data.astype(np.longdouble), b.data.astype(np.longdouble))
        return result

    def adding(operation: Callable[..., Any]) -> Callable[..., TensorHandle]:
        def add(self: Any, a: TensorHandle, b: TensorHandle) -> TensorHandle:
            first = getattr(a, "unrounded", None)
            second = getattr(b, "unrounded", None) if first is None else None
            if first is None and second is None:
                return plain(self, a, b, operation)
            exact = operation(
                a.data.astype(np.longdouble) if first is None else first, b.data if second is None else second
            )
            return TensorHandle(exact.astype(a.data.dtype), a.dtype.scalar)

        return add

    with (
        mock.patch.object(InterpreterBuilder, "create_fmul", multiply),
        mock.patch.object(InterpreterBuilder, "create_fadd", adding(np.add)),
        mock.patch.object(InterpreterBuilder, "create_fsub", adding(np.subtract)),
    ):
        yield


@contextmanager
def sums_in_one_order() -> Iterator[None]:
    """Within this context, float32 products of tiles are summed in float64 and rounded once.

    In a BLAS, the order in which the terms of a row are added may depend on the place of the row in the tile."""
    plain = InterpreterBuilder.create_dot

    def dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any) -> TensorHandle:
        if d.data.dtype != np.float32:
            return plain(self, a, b, d, *rest)
        total = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return TensorHandle(total + d.data, d.dtype.scalar)

    with mock.patch.object(InterpreterBuilder, "create_dot", dot):
        yield
