"""The square root of a pseudo-inverse, with a gradient that stays finite where eigenvalues are equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.autograd import differentiable


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues, with 1 in place of zeros; eigenvectors; and a mask (..., N), True for the nonzero eigenvalues.

    An eigenvalue counts as zero if it is 0 up to rounding.
    """
    values, vectors = torch.linalg.eigh(matrix)
    cutoff = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * values.detach().abs().amax(-1, keepdim=True) if values.numel() else 0.0
    kept = values > cutoff
    return torch.where(kept, values, 1.0), vectors, kept


def _forward(matrix: Tensor) -> Tensor:
    values, vectors, kept = _spectrum(matrix)
    return (vectors * (values.rsqrt() * kept).unsqueeze(-2)) @ vectors.mT


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dout: Tensor) -> Tensor:
    """U (F * U' dout U) U' with the divided differences F_ij = (f_i - f_j) / (l_i - l_j) of f = l^-1/2 (Daletskii and Krein).

    For two nonzero eigenvalues F_ij is -1 / (s_i s_j (s_i + s_j)) with s = l^1/2, which has no difference in the
    denominator. For a nonzero and a zero eigenvalue F_ij is f_i / l_i; for two zero eigenvalues it is 0.
    """
    values, vectors, kept = _spectrum(ctx.saved_tensors[0])
    root = values.sqrt()
    one, other = root.unsqueeze(-1), root.unsqueeze(-2)
    both, either = kept.unsqueeze(-1) & kept.unsqueeze(-2), kept.unsqueeze(-1) | kept.unsqueeze(-2)
    inside, across = -1 / (one * other * (one + other)), 1 / (one * other) ** 3  # a zero eigenvalue is stored as 1
    slopes = torch.where(both, inside, torch.where(either, across, 0.0))
    return vectors @ (slopes * (vectors.mT @ dout @ vectors)) @ vectors.mT


inverse_root = differentiable(_forward, _save, _backward)
"""A^-1/2 (..., N, N) of symmetric positive semi-definite A; 0 along eigenvectors whose eigenvalue is 0 up to rounding."""
