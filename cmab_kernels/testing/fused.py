"""Fused multiply-adds in Triton's interpreter, which rounds every product; the compiler for a GPU fuses it with the sum that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
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
