"""`torch.library` operators that solve regularised systems: given systems, or sums over rows, fused with the solve."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.autograd import Operator, folding_rule
from ...runtime.checks import refuse_negative
from ...runtime.flops import flop_formula
from ..schema import check_weights, gradient_of_sums, gram_operations, row_products, sums_like
from .reference import regularised_solve_reference

LIB = torch.library.Library("cmab", "FRAGMENT")
LIB.define("regularised_solve(Tensor gram, Tensor rhs, Tensor alpha, str impl) -> (Tensor weight, Tensor info)")
LIB.define(
    "ridge_solve(Tensor key, Tensor value, Tensor? weights, Tensor? key_padding_mask, Tensor alpha, str impl) "
    "-> (Tensor weight, Tensor gram, Tensor info)"
)


@torch.library.register_fake("cmab::regularised_solve", lib=LIB)
def _(gram: Tensor, rhs: Tensor, alpha: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    return rhs.new_empty(rhs.shape), rhs.new_empty(rhs.shape[:1], dtype=torch.int32)


@torch.library.register_fake("cmab::ridge_solve", lib=LIB)
def _(key: Tensor, value: Tensor, weights: Any, mask: Any, alpha: Tensor, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    gram, moment = sums_like(key, value)
    return moment, gram, key.new_empty(key.shape[:2], dtype=torch.int32)


for _name, _tensors in {"regularised_solve": 3, "ridge_solve": 5}.items():
    torch.library.register_vmap(f"cmab::{_name}", folding_rule(getattr(torch.ops.cmab, _name).default, _tensors), lib=LIB)


def solve_operations(systems: int, width: int, columns: int) -> int:
    """FLOPs of a Cholesky factorisation and two triangular solves for each column."""
    return systems * (width**3 // 3 + 2 * width**2 * columns)


@flop_formula(torch.ops.cmab.regularised_solve)
def _regularised_solve_flops(gram: Any, rhs: Any, *rest: Any, **_: Any) -> int:
    return solve_operations(*rhs)


@flop_formula(torch.ops.cmab.ridge_solve)
def _ridge_solve_flops(key: Any, value: Any, *rest: Any, **_: Any) -> int:
    batch, heads, _, width = key
    return gram_operations(key, value, (True, True)) + solve_operations(batch * heads, width, value[-1])


def _save_solution(ctx: Any, inputs: Any, output: Any) -> None:
    gram, _, alpha, ctx.impl = inputs
    weight, info = output
    ctx.mark_non_differentiable(info)
    ctx.save_for_backward(gram, alpha, weight)


def _backward_of_solve(ctx: Any, dweight: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """dA = -(Z X' + X Z') / 2, dB = Z and dalpha = -trace(Z X'), where Z = (A + alpha I)^-1 dX.

    Z is another solve with the same matrix.
    """
    gram, alpha, weight = ctx.saved_tensors
    z, _info = regularised_solve_op(gram, dweight, alpha, ctx.impl)
    product = row_products(z, weight.mT)
    return (product + product.mT) / -2, z, -_trace(product), None


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _save_ridge(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.impl = inputs
    weight, gram, info = output
    ctx.mark_non_differentiable(info)
    ctx.save_for_backward(*tensors, weight, gram)


def _backward_of_ridge(ctx: Any, dweight: Tensor, dgram: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    """The gradients with respect to G and C, as for a solve, and from them the gradients with respect to the rows.

    `gram` is an output of the operator, so that second derivatives reach the keys through `gram`.
    """
    key, value, weights, mask, alpha, weight, gram = ctx.saved_tensors
    # Reshaped, not flattened: `flatten` has no rule for batched gradients.
    penalty = alpha.reshape(alpha.numel())
    systems, rhs, solution = (t.reshape(alpha.numel(), *t.shape[2:]) for t in (gram, dweight, weight))
    z, _info = regularised_solve_op(systems, rhs, penalty, ctx.impl)
    product = row_products(z, solution.mT)
    slopes = dgram - product.reshape(gram.shape), z.reshape(weight.shape)
    rows = gradient_of_sums(ctx, *slopes, (key, value, weights, mask), exact=False)
    return *rows, None, -_trace(product).reshape(alpha.shape), None


def _check_penalty(gram: Tensor, rhs: Tensor, alpha: Tensor) -> None:
    refuse_negative("alpha", alpha)


def _check_ridge(key: Tensor, value: Tensor, weights: Tensor | None, mask: Tensor | None, alpha: Tensor) -> None:
    check_weights(weights, mask)
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
ridge_solve_op = Operator(LIB, "intention", "ridge_solve", 5, _save_ridge, _backward_of_ridge, check=_check_ridge)

FUSED = ("cuda",)
"""The implementations of Intention that have `ridge_solve`: sums and solve in one kernel."""
