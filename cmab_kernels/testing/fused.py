"""Triton's interpreter with arithmetic as on a GPU: there the compiler fuses a product with the sum that follows, which the interpreter
rounds, and matrix units cut tf32 off and add the terms of every row in one order, where the interpreter calls a BLAS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from triton._C.libtriton.ir import INPUT_PRECISION
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@contextmanager
def fused_products() -> Iterator[None]:
    """A context in which a product that is added or subtracted next is left unrounded."""
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
            exact = operation(a.data.astype(np.longdouble) if first is None else first, b.data if second is None else second)
            return TensorHandle(exact.astype(a.data.dtype), a.dtype.scalar)

        return add

    with (
        mock.patch.object(InterpreterBuilder, "create_fmul", multiply),
        mock.patch.object(InterpreterBuilder, "create_fadd", adding(np.add)),
        mock.patch.object(InterpreterBuilder, "create_fsub", adding(np.subtract)),
    ):
        yield


def _operands(a: TensorHandle, b: TensorHandle, precision: Any) -> tuple[Any, Any]:
    """The tiles as matrix units read them: of float32 in tf32 without its last 13 bits."""
    if precision != INPUT_PRECISION.TF32 or a.data.dtype != np.float32:
        return a.data, b.data
    high, other = ((tile.data.view(np.int32) & -8192).view(np.float32) for tile in (a, b))
    return high, other


@contextmanager
def operands_in_tf32() -> Iterator[None]:
    """A context in which products in tf32 cut their operands off, on which the parts of float32 rely."""
    plain = InterpreterBuilder.create_dot

    def dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: Any, *rest: Any) -> TensorHandle:
        first, second = _operands(a, b, precision)
        return plain(self, TensorHandle(first, a.dtype), TensorHandle(second, b.dtype), d, precision, *rest)

    with mock.patch.object(InterpreterBuilder, "create_dot", dot):
        yield


@contextmanager
def sums_in_one_order() -> Iterator[None]:
    """A context in which float32 products of tiles are summed in float64 and rounded once: a BLAS may add a row's terms in an order that
    depends on where in the tile the row is."""
    plain = InterpreterBuilder.create_dot

    def dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: Any, *rest: Any) -> TensorHandle:
        if d.data.dtype != np.float32:
            return plain(self, a, b, d, precision, *rest)
        total = np.matmul(*_operands(a, b, precision), dtype=np.float64).astype(np.float32)
        return TensorHandle(total + d.data, d.dtype.scalar)

    with mock.patch.object(InterpreterBuilder, "create_dot", dot):
        yield
