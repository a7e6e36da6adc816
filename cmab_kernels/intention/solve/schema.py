"""`torch.library` operators that solve regularised systems: given systems, or sums over rows, fused with the solve."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.checks import refuse_negative
from ...runtime.operator import Call, Gradients, Operator
from ..schema import ROWS, check_weights, gradient_of_sums, gram_operations, row_products, sums_like
from .contract import RegularisedSolve, RidgeSolve
from .reference import regularised_solve_reference


def _ridge_shapes(inputs: RidgeSolve) -> tuple[Tensor, Tensor, Tensor]:
    gram, moment = sums_like(inputs.key, inputs.value)
    return moment, gram, inputs.key.new_empty(inputs.key.shape[:2], dtype=torch.int32)


def solve_operations(systems: int, width: int, columns: int) -> int:
    """FLOPs of a Cholesky factorisation and two triangular solves for each column."""
    return systems * (width**3 // 3 + 2 * width**2 * columns)


def _ridge_operations(inputs: Any) -> int:
    batch, heads, _, width = inputs.key
    return gram_operations(inputs) + solve_operations(batch * heads, width, inputs.value[-1])


def _backward_of_solve(call: Call[RegularisedSolve], dweight: Tensor, _: Any) -> Gradients:
    """dA = -(Z X' + X Z') / 2, dB = Z and dalpha = -trace(Z X'), where Z = (A + alpha I)^-1 dX.

    Z is another solve with the same matrix.
    """
    gram, _, alpha, impl = call.inputs
    z, _info = regularised_solve_op(RegularisedSolve(gram, dweight, alpha, impl))
    product = row_products(z, call.kept[0].mT)
    return {"gram": (product + product.mT) / -2, "rhs": z, "alpha": -_trace(product)}


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _backward_of_ridge(call: Call[RidgeSolve], dweight: Tensor, dgram: Tensor, _: Any) -> Gradients:
    """The gradients with respect to G and C, as for a solve, and from them the gradients with respect to the rows.

    `gram` is an output of the operator, so that second derivatives reach the keys through `gram`.
    """
    alpha, (weight, gram) = call.inputs.alpha, call.kept
    # Reshaped, not flattened: `flatten` has no rule for batched gradients.
    penalty = alpha.reshape(alpha.numel())
    systems, rhs, solution = (t.reshape(alpha.numel(), *t.shape[2:]) for t in (gram, dweight, weight))
    z, _info = regularised_solve_op(RegularisedSolve(systems, rhs, penalty, call.inputs.impl))
    product = row_products(z, solution.mT)
    rows = gradient_of_sums(call, dgram - product.reshape(gram.shape), z.reshape(weight.shape), exact=False)
    return {**rows, "alpha": -_trace(product).reshape(alpha.shape)}


def _check_ridge(inputs: RidgeSolve) -> None:
    check_weights(inputs)
    refuse_negative("alpha", inputs.alpha)


regularised_solve_op = Operator(
    "intention.solve",
    "regularised_solve",
    RegularisedSolve,
    ("weight", "info"),
    shapes=lambda inputs: (
        inputs.rhs.new_empty(inputs.rhs.shape),
        inputs.rhs.new_empty(inputs.rhs.shape[:1], dtype=torch.int32),
    ),
    operations=lambda inputs: solve_operations(*inputs.rhs),
    backward=_backward_of_solve,
    keeps=("gram", "alpha", "weight"),
    constant=("info",),
    reference=lambda inputs: regularised_solve_reference(inputs.gram, inputs.rhs, inputs.alpha),
    check=lambda inputs: refuse_negative("alpha", inputs.alpha),
)
ridge_solve_op = Operator(
    "intention",
    "ridge_solve",
    RidgeSolve,
    ("weight", "gram", "info"),
    shapes=_ridge_shapes,
    operations=_ridge_operations,
    backward=_backward_of_ridge,
    keeps=(*ROWS, "alpha", "weight", "gram"),
    constant=("info",),
    check=_check_ridge,
)

FUSED = ("cuda",)
"""The implementations of Intention that have `ridge_solve`: sums and solve in one kernel."""
