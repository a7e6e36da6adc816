"""The m x m part of Nyström attention as `torch.library` operators: shapes, operation counts, vmap rules and derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..runtime.autograd import Operator, fold, gradient_of_formula, of_any_size
from ..runtime.flops import flop_formula
from .costs import pinv_operations
from .reference import iterative_pinv_reference, landmark_values_reference

LIB = torch.library.Library("cmab", "FRAGMENT")
LIB.define("iterative_pinv(Tensor matrix, int iterations, str impl) -> Tensor")
LIB.define("iterative_pinv_backward(Tensor dinverse, Tensor matrix, int iterations, str impl) -> Tensor")
LIB.define(
    "landmark_values(Tensor landmark_query, Tensor landmark_key, Tensor values, Tensor? absent, float scale, int iterations, str impl) "
    "-> Tensor"
)
LIB.define(
    "landmark_values_backward(Tensor dout, Tensor landmark_query, Tensor landmark_key, Tensor values, Tensor? absent, float scale, "
    "int iterations, str impl) -> (Tensor dlandmark_query, Tensor dlandmark_key, Tensor dvalues)"
)

NAMES = ("iterative_pinv", "iterative_pinv_backward", "landmark_values", "landmark_values_backward")


# ---- shapes


@torch.library.register_fake("cmab::iterative_pinv", lib=LIB)
def _(matrix: Tensor, iterations: int, impl: str) -> Tensor:
    return matrix.new_empty(matrix.shape)


@torch.library.register_fake("cmab::iterative_pinv_backward", lib=LIB)
def _(dinverse: Tensor, matrix: Tensor, iterations: int, impl: str) -> Tensor:
    return matrix.new_empty(matrix.shape)


@torch.library.register_fake("cmab::landmark_values", lib=LIB)
def _(landmark_query: Tensor, landmark_key: Tensor, values: Tensor, absent: Any, scale: float, iterations: int, impl: str) -> Tensor:
    return values.new_empty(values.shape)


@torch.library.register_fake("cmab::landmark_values_backward", lib=LIB)
def _(dout: Tensor, landmark_query: Tensor, landmark_key: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (landmark_query, landmark_key, values))


def _folding(name: str, tensors: int) -> Callable[..., Any]:
    """Return the vmap rule of an operator: it folds the mapped dimension into the batch of matrices. `tensors` is the
    number of its leading tensor arguments."""
    operator = getattr(torch.ops.cmab, name).default

    @of_any_size
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        folded = [fold(t, d, info.batch_size) for t, d in zip(args[:tensors], in_dims, strict=False)]
        result = operator(*folded, *args[tensors:])
        if isinstance(result, Tensor):
            return result.unflatten(0, (info.batch_size, -1)), 0
        return tuple(r.unflatten(0, (info.batch_size, -1)) for r in result), (0,) * len(result)

    return rule


for _name, _tensors in zip(NAMES, (1, 2, 4, 5), strict=True):
    torch.library.register_vmap(f"cmab::{_name}", _folding(_name, _tensors), lib=LIB)


# ---- operation counts: a multiply-add is two operations


@flop_formula(torch.ops.cmab.iterative_pinv)
def _pinv_flops(matrix: Any, iterations: int, *rest: Any, **_: Any) -> int:
    return matrix[0] * pinv_operations(matrix[-1], iterations)


@flop_formula(torch.ops.cmab.iterative_pinv_backward)
def _pinv_backward_flops(dinverse: Any, matrix: Any, iterations: int, *rest: Any, **_: Any) -> int:
    """Count the iterations, which the gradient computes again, and two products for the gradient of each of their
    products."""
    return 3 * matrix[0] * pinv_operations(matrix[-1], iterations)


def _landmark_operations(query: Any, values: Any, iterations: int) -> int:
    matrices, number, width = query
    return matrices * (2 * number**2 * (width + values[-1]) + pinv_operations(number, iterations))


@flop_formula(torch.ops.cmab.landmark_values)
def _values_flops(query: Any, key: Any, values: Any, absent: Any, scale: float, iterations: int, *rest: Any, **_: Any) -> int:
    return _landmark_operations(query, values, iterations)


@flop_formula(torch.ops.cmab.landmark_values_backward)
def _values_backward_flops(
    dout: Any, query: Any, key: Any, values: Any, absent: Any, scale: float, iterations: int, *_: Any, **__: Any
) -> int:
    """Count the kernel matrix and the iterations, which the gradient computes again, and two products for the gradient
    of each product."""
    matrices, number, _width = query
    return 3 * _landmark_operations(query, values, iterations) - matrices * 2 * number**2 * values[-1]


# ---- gradients


def _save_pinv(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.iterations, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_pinv(ctx: Any, dinverse: Tensor) -> tuple[Tensor | None, ...]:
    (matrix,) = ctx.saved_tensors
    return _pinv_backward_op(dinverse, matrix, ctx.iterations, ctx.impl), None, None


def _pinv_gradient(iterations: int) -> Callable[..., Any]:
    """Return the gradient of the pseudo-inverse as a differentiable function, by autograd through the definition."""

    def formula(dinverse: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
        inverse = iterative_pinv_reference(matrix, iterations)
        return torch.autograd.grad(inverse, matrix, dinverse, create_graph=True)

    return formula


def _double_backward_of_pinv(ctx: Any, ddmatrix: Tensor) -> tuple[Tensor | None, ...]:
    return *gradient_of_formula(_pinv_gradient(ctx.iterations), ctx.saved_tensors, (ddmatrix,)), None, None


def _save_values(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale, ctx.iterations, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_values(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    grads = _values_backward_op(dout, *ctx.saved_tensors, ctx.scale, ctx.iterations, ctx.impl)
    return *grads, None, None, None, None


def _values_gradient(absent: Tensor | None, scale: float, iterations: int) -> Callable[..., Any]:
    def formula(dout: Tensor, query: Tensor, key: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        out = landmark_values_reference(query, key, values, absent, scale, iterations)
        return torch.autograd.grad(out, (query, key, values), dout, create_graph=True)

    return formula


def _double_backward_of_values(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, absent = ctx.saved_tensors
    formula = _values_gradient(absent, ctx.scale, ctx.iterations)
    return *gradient_of_formula(formula, tensors, directions), None, None, None, None


iterative_pinv_op = Operator(LIB, "nystrom", "iterative_pinv", 1, _save_pinv, _backward_of_pinv, reference=iterative_pinv_reference)
_pinv_backward_op = Operator(LIB, "nystrom", "iterative_pinv_backward", 2, _save_pinv, _double_backward_of_pinv)
landmark_values_op = Operator(LIB, "nystrom", "landmark_values", 4, _save_values, _backward_of_values, reference=landmark_values_reference)
_values_backward_op = Operator(LIB, "nystrom", "landmark_values_backward", 5, _save_values, _double_backward_of_values)
