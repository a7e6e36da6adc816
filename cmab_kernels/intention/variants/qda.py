"""Quadratic discriminants: a Gaussian with its own covariance for each class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .inputs import divided, fraction_of, priors_of
from .models import QuadraticClassifier, log_of, scaled_solve
from .moments import ClassMoments, check_moments, class_moments


def qda(
    key: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    regularisation: float | Tensor = 0.0,
    priors: Tensor | Sequence[float] | None = None,
    weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    impl: str = "auto",
) -> QuadraticClassifier:
    """Quadratic discriminant analysis: one Gaussian per class, each with its own covariance Sigma_c = S_c / n_c.

    Args:
        key, labels, num_classes, weights, key_padding_mask, impl: as in `class_moments`. Each class costs a Gram
            matrix.
        regularisation: r from 0 to 1, a number or a tensor that broadcasts to (B, H): Sigma_c becomes (1 - r) Sigma_c +
            r I.
        priors: as in `lda`.

    Returns:
        QuadraticClassifier with an `info` for each class. A class without members has score -inf and probability 0. A
        class whose covariance is singular (one member, a constant feature) has scores of NaN unless it is regularised,
        and is never predicted. Differentiable in key, weights, regularisation and priors.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.

    This is not the "QDA" of the paper (Garnelo and Czarnecki), which is `pooled_class_scatter` here.

    >>> rows = torch.randn(1, 1, 400, 2, dtype=torch.float64)
    >>> inner, ring = rows * 0.3, 3 * torch.nn.functional.normalize(rows, dim=-1)
    >>> labels = torch.arange(800)[None] // 400
    >>> model = cmab_kernels.intention.variants.qda(torch.cat([inner, ring], 2), labels, 2)
    >>> bool(model.predict(inner).eq(0).double().mean() > 0.95), bool(model.predict(ring).eq(1).all())
    (True, True)
    """
    moments = class_moments(key, labels, num_classes, weights=weights, key_padding_mask=key_padding_mask, impl=impl)
    return solve_qda(moments, regularisation=regularisation, priors=priors, impl=impl)


def solve_qda(
    moments: ClassMoments,
    *,
    regularisation: float | Tensor = 0.0,
    priors: Tensor | Sequence[float] | None = None,
    impl: str = "auto",
) -> QuadraticClassifier:
    """`qda` of the rows that these moments summarise. The moments must not be pooled (`ValueError`).

    >>> moments = cmab_kernels.intention.variants.class_moments(torch.randn(1, 1, 9, 2), torch.arange(9)[None] % 2, 2)
    >>> cmab_kernels.intention.variants.solve_qda(moments).precision.shape
    torch.Size([1, 1, 2, 2, 2])
    """
    check_moments(moments)
    check_moments(moments, moments.mean.shape, moments.mean.shape[2])
    amount = fraction_of("regularisation", regularisation, moments.weight).unsqueeze(-1)
    one = torch.eye(moments.mean.shape[-1], dtype=torch.float64, device=moments.mean.device)
    covariance = (1 - amount) * divided(moments.scatter, moments.weight[..., None, None]) + amount * one
    absent = moments.weight == 0
    covariance = torch.where(absent[..., None, None], one, covariance)
    precision, info = scaled_solve(covariance, one.expand(covariance.shape), impl)
    offset = log_of(priors_of(priors, moments.weight)) - _log_determinant(covariance, info) / 2
    return QuadraticClassifier(moments.mean, precision, offset.masked_fill(absent, -torch.inf), info)


def _log_determinant(covariance: Tensor, info: Tensor) -> Tensor:
    """log det covariance, (B, H, C); NaN where the covariance is not positive definite."""
    failed = info == 1
    one = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    factor = torch.linalg.cholesky_ex(torch.where(failed[..., None, None], one, covariance)).L
    return (2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)).masked_fill(failed, torch.nan)
