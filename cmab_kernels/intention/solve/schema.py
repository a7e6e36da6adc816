"""The batched regularised solve as a `torch.library` operator: shapes, operation count, vmap rule and derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...autograd import Operator, folding_rule
from ...checks import refuse_negative
from ...flops import flop_formula
from .reference import regularised_solve_reference

LIB = torch.library.Library("cmab", "FRAGMENT")
LIB.define("regularised_solve(Tensor gram, Tensor rhs, Tensor alpha, str impl) -> (Tensor weight, Tensor info)")


@torch.library.register_fake("cmab::regularised_solve", lib=LIB)
def _(gram: Tensor, rhs: Tensor, alpha: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    return rhs.new_empty(rhs.shape), rhs.new_empty(rhs.shape[:1], dtype=torch.int32)


torch.library.register_vmap("cmab::regularised_solve", folding_rule(torch.ops.cmab.regularised_solve.default, 3), lib=LIB)


def solve_operations(systems: int, width: int, columns: int) -> int:
    """A Cholesky factor, and two triangular solves of each column."""
    return systems * (width**3 // 3 + 2 * width**2 * columns)


@flop_formula(torch.ops.cmab.regularised_solve)
def _regularised_solve_flops(gram: Any, rhs: Any, *rest: Any, **_: Any) -> int:
    return solve_operations(*rhs)


def _save_solution(ctx: Any, inputs: Any, output: Any) -> None:
    gram, _, alpha, ctx.impl = inputs
    weight, info = output
    ctx.mark_non_differentiable(info)
    ctx.save_for_backward(gram, alpha, weight)


def _backward_of_solve(ctx: Any, dweight: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """Another solve with the same matrix; nothing but the solution is kept."""
    gram, alpha, weight = ctx.saved_tensors
    z, _info = regularised_solve_op(gram, dweight, alpha, ctx.impl)
    product = z @ weight.mT
    return (product + product.mT) / -2, z, -(z * weight).sum((-2, -1)), None


def _check_penalty(gram: Tensor, rhs: Tensor, alpha: Tensor) -> None:
    refuse_negative("alpha", alpha)


regularised_solve_op = Operator(
    LIB,
    "intention.solve",
    "regularised_solve",
    3,
    _save_solution,
    _backward_of_solve,
    reference=regularised_solve_reference,
    check=_check_penalty,
)
