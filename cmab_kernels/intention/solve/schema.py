"""The `torch.library` operator that solves regularised systems."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.checks import refuse_negative
from ...runtime.operator import Call, Gradients, Operator
from ..schema import row_products
from .contract import RegularisedSolve
from .reference import regularised_solve_reference


def solve_operations(systems: int, width: int, columns: int) -> int:
    """FLOPs of a Cholesky factorisation and two triangular solves for each column."""
    return systems * (width**3 // 3 + 2 * width**2 * columns)


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
