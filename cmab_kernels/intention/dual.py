"""The dual of ridge regression: an N x N system, for fewer keys than they are wide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autograd import differentiable
from .solve.api import solve_heads


def dual_solve(products: Tensor, value: Tensor, weights: Tensor | None, alpha: Tensor, impl: str) -> Tensor:
    """Y = (W M + alpha I)^-1 W V of M (S, N, N) symmetric, V (S, N, E), W = diag(weights) (S, N) and alpha (S,), all float64.

    Symmetric and positive definite in the form Y = r (r M r + alpha I)^-1 r V with r = W^1/2. A key of weight 0 drops out of it: a 1 on
    its diagonal keeps the factorisation alive at alpha = 0.
    """
    if products.shape[-1] == 0:
        return value
    return solve_heads(products, value, alpha, impl).weight if weights is None else _weighted(products, value, weights, alpha, impl)


def _weighted_forward(products: Tensor, value: Tensor, weights: Tensor, alpha: Tensor, impl: str) -> Tensor:
    root = weights.sqrt().unsqueeze(-1)
    system = root * products * root.mT + torch.diag_embed((weights == 0).to(products.dtype))
    return root * solve_heads(system, root * value, alpha, impl).weight


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.impl = inputs
    ctx.save_for_backward(*tensors, output)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    """With T the same solve of dout: dV = T, dM = -T Y', and row by row, where y = w r / alpha and t = w u / alpha,

        dw = u r, r = V - M Y, u = (dout - M T) / alpha             dalpha = -sum u * y

    The square root has no derivative at a weight of 0, Y has: there r and u are formed, elsewhere they are had from y / w and t / w.
    """
    products, value, weights, alpha, solution = ctx.saved_tensors
    dvalue = _weighted(products, dout, weights, alpha, ctx.impl)
    absent = weights == 0
    overlap = (dvalue * solution).sum(-1) / weights.masked_fill(absent, 1.0)
    penalty = alpha.unsqueeze(-1)
    residuals = ((value - products @ solution) * (dout - products @ dvalue)).sum(-1)
    dweights = torch.where(absent, residuals / penalty, penalty * overlap / weights.masked_fill(absent, 1.0))
    dproducts = dvalue @ solution.mT
    return (dproducts + dproducts.mT) / -2, dvalue, dweights, -overlap.sum(-1), None


_weighted = differentiable(_weighted_forward, _save, _backward)
