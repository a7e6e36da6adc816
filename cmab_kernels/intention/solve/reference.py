"""The definition of a regularised solve, in plain PyTorch.

For a symmetric positive (semi-)definite matrix A, a right-hand side B and a penalty alpha >= 0:

    X = (A + alpha I)^-1 B

by a Cholesky factorisation and two triangular solves. The gradient, given dX, takes a solve with the same matrix:

    Z = (A + alpha I)^-1 dX      dB = Z      dA = -(Z X' + X Z') / 2      dalpha = -sum(Z * X)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.constants import ILL_CONDITIONED, INFO_ILL_CONDITIONED, INFO_NOT_POSITIVE_DEFINITE, INFO_SOUND
from ...runtime.tracing import exports_to_onnx, needs_definition


class _Mirrored(torch.autograd.Function):
    """The symmetric matrix with the given lower triangle. Only this triangle is read, but the
    gradient is symmetrised."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gram: Tensor) -> Tensor:
        return gram.tril() + gram.tril(-1).mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save nothing: the function is linear."""

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return (slope + slope.mT) / 2


def _mirrored(gram: Tensor) -> Tensor:
    """The matrix of `_Mirrored`, also in forward mode.

    `_Mirrored` has no `jvp`, because the compiler does not accept a Function that has one.
    """
    if not needs_definition():
        mirrored: Tensor = _Mirrored.apply(gram)
        return mirrored
    mirrored = gram.tril() + gram.tril(-1).mT
    skew = (gram + gram.mT) / 2 - mirrored
    return mirrored + (skew - skew.detach()).nan_to_num()  # adds 0, with the derivative of skew


def regularised_solve_reference(gram: Tensor, rhs: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """(A + alpha I)^-1 B and info, for A (..., D, D), B (..., D, E) and alpha (...), by Cholesky from the lower
    triangle of A.

    info: `INFO_NOT_POSITIVE_DEFINITE` where the factorisation fails or alpha is negative (the solution is NaN),
    `INFO_ILL_CONDITIONED` where the condition number in the 1-norm, times eps, exceeds `ILL_CONDITIONED` (at most two
    digits are left), else `INFO_SOUND`.
    """
    alpha = alpha.masked_fill(alpha < 0, torch.nan)
    one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    matrix = _mirrored(gram) + alpha[..., None, None] * one
    solution, inverse, failed = _by_halves(matrix, rhs) if exports_to_onnx() else _by_cholesky(matrix, rhs, one)
    solution = solution.masked_fill(failed[..., None, None], torch.nan)
    condition = matrix.detach().abs().sum(-2).amax(-1) * inverse.abs().sum(-2).amax(-1)
    doubtful = ~(condition * torch.finfo(gram.dtype).eps <= ILL_CONDITIONED)
    return solution, torch.where(
        failed, INFO_NOT_POSITIVE_DEFINITE, torch.where(doubtful, INFO_ILL_CONDITIONED, INFO_SOUND)
    ).int()


def _by_cholesky(matrix: Tensor, rhs: Tensor, one: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return A^-1 B, A^-1 without a gradient, and a mask of the systems whose A is not positive
    definite. In these systems `one` replaces the factor of A."""
    factor, failure = torch.linalg.cholesky_ex(matrix)
    failed = (failure > 0) | ~factor.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)
    factor = torch.where(failed[..., None, None], one, factor)
    # `cholesky_solve` would be wrong under `vmap`, which removes a dimension of rhs: its forward
    # mode may then read the matrices as a batch of vectors.
    halfway = torch.linalg.solve_triangular(factor, rhs, upper=False)
    solution = torch.linalg.solve_triangular(factor.mT, halfway, upper=True)
    return solution, torch.cholesky_inverse(factor.detach()), failed


def _by_halves(matrix: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_by_cholesky` returns, computed by matrix products, because ONNX has no
    factorisation."""
    inverse = _inverse_factor(matrix)
    diagonal = inverse.diagonal(dim1=-2, dim2=-1)
    return inverse.mT @ (inverse @ rhs), inverse.mT @ inverse, ~(diagonal.isfinite() & (diagonal > 0)).all(-1)


def _inverse_factor(matrix: Tensor) -> Tensor:
    """J = L^-1 of A = L L'. With A and L in blocks, J is

    (  J_1         0  )        J_1 of A_11,  S = A_21 J_1' = L_21,
    ( -J_2 S J_1  J_2 )        J_2 of A_22 - S S'
    """
    size = matrix.shape[-1]
    if size < 2:
        return matrix.rsqrt()
    half = size // 2
    first = _inverse_factor(matrix[..., :half, :half])
    below = matrix[..., half:, :half] @ first.mT
    last = _inverse_factor(matrix[..., half:, half:] - below @ below.mT)
    corner = -(last @ (below @ first))
    return torch.cat([F.pad(first, (0, size - half)), torch.cat([corner, last], -1)], -2)
