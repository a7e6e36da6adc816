"""Accuracy bounds: the error of a result, row by row, and the largest error that promise P2 of the numerics page
allows."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _with_outlier(tensor: Tensor) -> Tensor:
    if tensor.numel():
        tensor.view(-1)[tensor.numel() // 2] = 1e3
    return tensor


LAWS: dict[str, Callable[..., Tensor]] = {
    "normal": lambda *shape: torch.randn(*shape),
    "ten times": lambda *shape: 10 * torch.randn(*shape),
    "one outlier": lambda *shape: _with_outlier(torch.randn(*shape)),
    "all equal": lambda *shape: torch.full(shape, 0.75),
}
"""name -> a generator of test inputs of a given shape, in torch's default dtype: N(0, 1), 10 N(0, 1), N(0, 1) with one
element of 1e3, and all elements equal"""

STREAMS: dict[str, Callable[[int], Tensor]] = {
    "normal": lambda length: torch.ones(length),
    "ten times": lambda length: torch.full((length,), 10.0),
    "spikes of 20": lambda length: 1 + 19.0 * (torch.arange(length) % 50 == 49),
    "spikes of 40": lambda length: 1 + 39.0 * (torch.arange(length) % 70 == 69),
}
"""name -> factors (length,) of the N(0, 1) keys of a stream. For queries of norm sqrt(D), logits are N(0, 1), 10 N(0,
1), or have rare large values"""


def row_error(result: Tensor, oracle: Tensor) -> Tensor:
    """Return ||result - oracle|| / ||oracle|| of each row (the last dimension), in float64.

    If the oracle's row is exactly 0, the error is 0 for a row that is exactly 0 too, and infinite otherwise. A NaN
    stays a NaN, which passes no bound.

    >>> row_error(torch.tensor([[3.0, 4.5], [0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([0.1000, 0.0000], dtype=torch.float64)
    """
    difference = (result.double() - oracle.double()).norm(dim=-1)
    size = oracle.double().norm(dim=-1)
    exact = torch.where(difference == 0, 0.0, difference + math.inf)  # a NaN stays a NaN
    return torch.where(size > 0, difference / size, exact)


def bound(dtype: torch.dtype, score: float, torch_error: Tensor | float, factor: float = 1.0) -> Tensor:
    """Return the largest relative error that promise P2 allows, in float64, of the shape of `torch_error`.

    `dtype` is the dtype of the result, `score` the largest absolute logit (0 if there are no logits), `torch_error` the
    error of torch's own result in the same dtype, and `factor` scales the bound (4 for gradients):

    - bfloat16 and float16: twice torch's own error, and at least eps;
    - float32: three times torch's own error, 32 eps or 4 eps `score`, whichever is largest;
    - float64: three times torch's own error, 1e-12 or 4 eps `score`, whichever is largest.

    >>> bound(torch.float64, 0.0, 0.0)
    tensor(1.0000e-12, dtype=torch.float64)
    """
    own = torch.as_tensor(torch_error, dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    if dtype in (torch.bfloat16, torch.float16):
        return factor * (2 * own).clamp(min=eps)
    floor = max(1e-12 if dtype == torch.float64 else 32 * eps, 4 * eps * score)
    return factor * (3 * own).clamp(min=floor)


def lapack_ratio(matrix: Tensor, solution: Tensor, rhs: Tensor) -> Tensor:
    """Return ||B - A X|| / (||A|| ||X|| n eps) in the 1-norm for each system A X = B of a batch: LAPACK's test of a
    solve (P6).

    `matrix` is (..., n, n), `solution` and `rhs` are (..., n, k); eps is that of the solution's dtype. LAPACK's own
    limit is 30. Usual values are 0.3 to 0.9.
    """

    def norm(matrices: Tensor) -> Tensor:
        return matrices.double().abs().sum(-2).amax(-1)

    residual = norm(rhs.double() - matrix.double() @ solution.double())
    return residual / (norm(matrix) * norm(solution) * matrix.shape[-1] * torch.finfo(solution.dtype).eps)
