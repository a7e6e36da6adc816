"""The formulas once more, dense and in float64, and what torch makes of them in the precision of the inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.accuracy import LAWS, bound, row_error

__all__ = ["LAWS", "bound", "dense", "dense_sigma", "lapack_ratio", "row_error", "same_precision"]


def _hidden(rows: Tensor, mask: Tensor | None) -> Tensor:
    return rows if mask is None else rows.masked_fill(mask[:, None, :, None], 0.0)


def _system(key: Tensor, alpha: Tensor | float, weights: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """K'WK + alpha I, and K'W."""
    key = _hidden(key, mask)
    weighted = key if weights is None else _hidden((weights if weights.dim() == 3 else weights[:, None])[..., None] * key, mask)
    penalty = torch.as_tensor(alpha, dtype=key.dtype).expand(key.shape[:2])
    return weighted.mT @ key + penalty[..., None, None] * torch.eye(key.shape[-1], dtype=key.dtype), weighted.mT


def dense(
    query: Tensor, key: Tensor, value: Tensor, alpha: Tensor | float, weights: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Q (K'WK + alpha I)^-1 K'WV in the dtype that it is given, by Cholesky; autograd's own gradients."""
    system, weighted = _system(key, alpha, weights, mask)
    return query @ torch.cholesky_solve(weighted @ _hidden(value, mask), torch.linalg.cholesky(system))


def dense_sigma(
    query: Tensor, key: Tensor, value: Tensor, alpha: Tensor | float, weights: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """softmax(Q (K'WK + alpha I)^-1 K') V."""
    system, _ = _system(key, alpha, weights, mask)
    scores = query @ torch.cholesky_solve(_hidden(key, mask).mT, torch.linalg.cholesky(system))
    if mask is not None:
        scores = scores.masked_fill(mask[:, None, None], -torch.inf)
    return scores.softmax(-1) @ _hidden(value, mask)


def same_precision(query: Tensor, key: Tensor, value: Tensor, alpha: float) -> Tensor:
    """What one would write in torch: products in the dtype of the inputs, the system in float32 where there is no Cholesky for it."""
    system = (key.mT @ key).to(torch.promote_types(key.dtype, torch.float32))
    system = system + alpha * torch.eye(key.shape[-1], dtype=system.dtype)
    factor, failure = torch.linalg.cholesky_ex(system)
    weight = torch.cholesky_solve((key.mT @ value).to(system.dtype), factor).masked_fill(failure[..., None, None] > 0, torch.nan)
    return query @ weight.to(query.dtype)


def lapack_ratio(matrix: Tensor, solution: Tensor, rhs: Tensor) -> Tensor:
    """||B - A X|| / (||A|| ||X|| n eps) in the 1-norm, of each system: LAPACK's test, 30 is its limit."""

    def norm(matrices: Tensor) -> Tensor:
        return matrices.double().abs().sum(-2).amax(-1)

    residual = norm(rhs.double() - matrix.double() @ solution.double())
    return residual / (norm(matrix) * norm(solution) * matrix.shape[-1] * torch.finfo(solution.dtype).eps)
