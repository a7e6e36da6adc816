"""The dual of ridge regression: an N x N system, for N < D.

Kernels with a fixed order of additions form all products, so that the bits of a result do not depend on threads, batch
or layout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.backends import choose
from ..runtime.dtypes import state_dtype
from ..runtime.operator import Call, Gradients, Operator
from ..runtime.tracing import needs_definition
from .contract import ApplyRows
from .reference import rows_of
from .schema import apply_rows_op, row_products
from .solve.api import solve_heads
from .solve.contract import RegularisedSolve
from .solve.schema import regularised_solve_op, solve_operations


class Dual:
    """The system W K K' + alpha I of keys (B, H, N, D), weights (B, H, N) or None, a mask (B, N) or None and alpha (B,
    H).

    `impl` is the implementation of the products, `solver` is the implementation of the solve. On a GPU there are
    kernels for up to 256 keys; for more keys, "auto" takes the reference, with a warning.
    """

    def __init__(
        self,
        key: Tensor,
        weights: Tensor | None,
        key_padding_mask: Tensor | None,
        penalty: Tensor,
        impl: str,
        solver: str,
    ) -> None:
        self._mask, self._penalty, self._solver = key_padding_mask, penalty, solver
        self._key = rows_of(key, key_padding_mask, torch.float64)
        self._impl = choose("intention", impl, self._key, self._key, self._key.mT)
        self._weights = None if weights is None else weights.double()
        if key_padding_mask is not None:
            weights = self._key.new_ones(()).expand(key.shape[:3]) if weights is None else weights
            self._weights = weights.double().masked_fill(key_padding_mask[:, None], 0.0)

    def intention(self, query: Tensor, value: Tensor) -> Tensor:
        """Q K' Y with Y = (W K K' + alpha I)^-1 W V, (B, H, M, E) in the dtype of query.

        The order is (Q K') Y if N < D, and Q (K' Y) otherwise. For N >= D, Y is so much larger than K' Y that the
        rounding of Q K' would be visible in the result.
        """
        rows, solution = query.to(state_dtype(query.dtype)), self._solve(rows_of(value, self._mask, torch.float64))
        if self._key.shape[2] < self._key.shape[3]:
            return self._times(self._times(rows, self._key.mT), solution).to(query.dtype)
        return self._times(rows, self._times(self._key.mT, solution)).to(query.dtype)

    def sigma_scores(self, query: Tensor) -> Tensor:
        """Q K' (K K' + alpha I)^-1, (B, H, M, N) in float64.

        The inverse would amplify the rounding of float32 products by 1 / alpha.
        """
        return self._solve(self._times(query.double(), self._key.mT).mT).mT

    def _times(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """rows @ matrix, in the dtype of rows."""
        return apply_rows_op(ApplyRows(rows, matrix, self._impl))

    def _solve(self, rhs: Tensor) -> Tensor:
        """(W K K' + alpha I)^-1 W B for a right-hand side B (B, H, N, E), in float64."""
        products = self._times(self._key, self._key.mT)
        if products.shape[-1] == 0:  # empty; alpha and the weights get gradients of 0
            return (
                rhs * self._penalty[..., None, None] * (1.0 if self._weights is None else self._weights.unsqueeze(-1))
            )
        if self._weights is None:
            return solve_heads(products, rhs, self._penalty, self._solver).weight
        flat = (products.flatten(0, 1), rhs.flatten(0, 1), self._weights.flatten(0, 1), self._penalty.flatten())
        if needs_definition():
            return _weighted_formula(*flat).view(rhs.shape)
        return _weighted_solve_op(WeightedSolve(*flat, choose("intention.solve", self._solver, *flat[:2]))).view(
            rhs.shape
        )


def _weighted_formula(products: Tensor, value: Tensor, weights: Tensor, alpha: Tensor) -> Tensor:
    """Y of `_kernel` without the square root, which has no derivative at a weight of 0.

    Forward mode uses this formula, because torch differentiates it there. Where a weight and alpha are 0, a 1 on the
    diagonal keeps the matrix regular. A matrix that is still singular gives NaN.
    """
    alpha = alpha.masked_fill(alpha < 0, torch.nan).unsqueeze(-1)
    diagonal = alpha + ((weights == 0) & (alpha == 0))
    system = weights.unsqueeze(-1) * products + torch.diag_embed(diagonal)
    factor, pivots, info = torch.linalg.lu_factor_ex(system)  # the forward derivative of `solve` has wrong derivatives
    return torch.linalg.lu_solve(factor, pivots, weights.unsqueeze(-1) * value).masked_fill(
        (info != 0)[:, None, None], torch.nan
    )


class WeightedSolve(NamedTuple):
    """The arguments of `cmab::weighted_solve`: M (S, N, N) symmetric, V (S, N, E), W = diag(weights) (S, N), alpha
    (S,), all float64."""

    products: Tensor
    value: Tensor
    weights: Tensor
    alpha: Tensor
    impl: str


def _kernel(inputs: WeightedSolve) -> Tensor:
    """Y = (W M + alpha I)^-1 W V.

    The system is solved in the symmetric positive definite form Y = r (r M r + alpha I)^-1 r V with r = W^1/2. The row
    of a key of weight 0 is zero; a 1 on the diagonal of this row keeps the matrix definite at alpha = 0.
    """
    products, value, weights, alpha, impl = inputs
    root = weights.sqrt().unsqueeze(-1)
    system = root * products * root.mT + torch.diag_embed((weights == 0).to(products.dtype))
    return root * regularised_solve_op(RegularisedSolve(system, root * value, alpha, impl))[0]


def _backward(call: Call[WeightedSolve], dout: Tensor) -> Gradients:
    """dV = T and dM = -(T Y' + Y T') / 2, where T is the same solve for dout.

    For each row, with y = w r / alpha and t = w u,

        dw = u r, r = V - M Y, u = (dout - M T) / alpha             dalpha = -sum u * y

    The square root has no derivative at a weight of 0, but Y has one. For a row of weight 0, the
    code computes r, u and y = w r / alpha by these formulas. They have the right higher
    derivatives. For any other row, r and u are y alpha / w and t / w.
    """
    products, value, weights, alpha, impl = call.inputs
    (solution,) = call.kept
    dvalue = _weighted_solve_op(WeightedSolve(products, dout, weights, alpha, impl))
    absent = weights == 0
    alpha = alpha.unsqueeze(-1)
    residuals = ((value - row_products(products, solution)) * (dout - row_products(products, dvalue))).sum(-1)
    penalty = alpha.masked_fill(~absent | (alpha == 0), 1.0)  # the derivative of 0 / 0 is NaN, even if masked
    present = weights.masked_fill(absent, 1.0)
    overlap = torch.where(absent, weights * residuals / penalty.square(), (dvalue * solution).sum(-1) / present)
    penalty = penalty.masked_fill(absent & (alpha == 0) & (residuals != 0), 0.0)
    dweights = torch.where(absent, residuals / penalty, alpha * overlap / present)
    dproducts = row_products(dvalue, solution.mT)
    return {
        "products": (dproducts + dproducts.mT) / -2,
        "value": dvalue,
        "weights": dweights,
        "alpha": -overlap.sum(-1),
    }


_weighted_solve_op = Operator(
    _kernel,
    "weighted_solve",
    WeightedSolve,
    ("solution",),
    shapes=lambda inputs: inputs.value.new_empty(inputs.value.shape),
    operations=lambda inputs: solve_operations(*inputs.value),
    backward=_backward,
    keeps=("products", "value", "weights", "alpha", "solution"),
)
