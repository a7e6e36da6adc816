"""Linear classifiers from class means and one matrix: the pooled covariance (LDA), or the sum of the class scatters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..solve import regularised_solve
from .inputs import divided, fraction_of, priors_of, solver_of
from .models import LinearClassifier, log_of, scaled_solve
from .moments import ClassMoments, check_moments, class_moments


def lda(
    key: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    shrinkage: float | Tensor = 0.0,
    priors: Tensor | Sequence[float] | None = None,
    weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    impl: str = "auto",
) -> LinearClassifier:
    """Linear discriminant analysis: one Gaussian per class, all with the same covariance Sigma.

    Args:
        key, labels, num_classes, weights, key_padding_mask, impl: as in `class_moments`.
        shrinkage: s from 0 to 1, a number or a tensor that broadcasts to (B, H): Sigma becomes (1 - s) Sigma + s (trace
            Sigma / D) I.
        priors: probabilities of the classes, (C,) or a shape that broadcasts to (B, H, C), normalised to sum to 1.
            None: the shares of the classes in the rows.

    Returns:
        LinearClassifier; its probabilities are the posterior probabilities. A class without members has score -inf and
        probability 0. Where Sigma is singular (a constant feature, fewer rows than features), `info` is 1 and the
        scores are NaN; `info` is 2 if Sigma is singular only up to rounding. Use shrinkage then, or omit features.
        Differentiable in key, weights, shrinkage and priors. Where all weights of a class are 0, the scatter, and
        therefore the result, has only the one-sided derivatives that `class_moments` describes.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.

    Sigma = sum_c S_c / n is the maximum-likelihood estimate. Source: Fisher; as a form of Intention, Garnelo and
    Czarnecki. The relabelling y / N1 - (1 - y) / N0 turns X'y into m_1 - m_0; the paper prints it with another sign and
    other weights.

    >>> key = torch.tensor([[0.0, 0], [1, 1], [0, 1], [4, 4], [5, 5], [5, 4]])[None, None]
    >>> model = cmab_kernels.intention.variants.lda(key, torch.tensor([[0, 0, 0, 1, 1, 1]]), 2)
    >>> model.predict(torch.tensor([[[[1.0, 0.0], [4.0, 5.0]]]])).tolist()
    [[[0, 1]]]
    """
    moments = class_moments(
        key, labels, num_classes, pooled=True, weights=weights, key_padding_mask=key_padding_mask, impl=impl
    )
    return solve_lda(moments, shrinkage=shrinkage, priors=priors, impl=impl)


def solve_lda(
    moments: ClassMoments,
    *,
    shrinkage: float | Tensor = 0.0,
    priors: Tensor | Sequence[float] | None = None,
    impl: str = "auto",
) -> LinearClassifier:
    """`lda` of the rows that these moments summarise.

    >>> moments = cmab_kernels.intention.variants.class_moments(torch.randn(1, 1, 9, 2), torch.arange(9)[None] % 3, 3)
    >>> cmab_kernels.intention.variants.solve_lda(moments).coefficients.shape
    torch.Size([1, 1, 2, 3])
    """
    check_moments(moments)
    probability = priors_of(priors, moments.weight)
    covariance = shrunk(divided(moments.scatter.sum(2), moments.weight.sum(-1)[..., None, None]), shrinkage)
    centre = (probability.unsqueeze(-2) @ moments.mean).squeeze(-2)
    away = _from(centre, moments)
    weight, info = scaled_solve(covariance, away.mT, impl)
    return LinearClassifier(weight, centre, log_of(probability) - (weight * away.mT).sum(-2) / 2, info)


def pooled_class_scatter(
    key: Tensor,
    labels: Tensor,
    num_classes: int,
    alpha: float | Tensor = 0.0,
    *,
    weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    impl: str = "auto",
) -> LinearClassifier:
    """A linear classifier with w_c = (sum_j S_j + alpha I)^-1 (m_c - m_rest) for each class c.

    The score of class c is 0 midway between its mean m_c and the mean m_rest of all other rows. The paper calls this
    classifier "QDA", but it is linear, and for two classes its direction is the direction of LDA. `qda` is quadratic.

    Args:
        key, labels, num_classes, weights, key_padding_mask, impl: as in `class_moments`.
        alpha: >= 0, in the units of the scatter: a number, or a tensor that broadcasts to (B, H).

    Returns:
        LinearClassifier, one column per class; with two classes, one column is the negative of the other. A class
        without members scores -inf. Differentiable in key, alpha and weights; like `lda` where all weights of a class
        are 0.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.

    Source: Exploring the Space of Key-Value-Query Models with Intention (Garnelo and Czarnecki).

    >>> key, labels = torch.randn(1, 1, 50, 3, dtype=torch.float64), torch.arange(50)[None] % 2
    >>> ours = cmab_kernels.intention.variants.pooled_class_scatter(key, labels, 2).coefficients
    >>> fisher = cmab_kernels.intention.variants.lda(key, labels, 2).coefficients
    >>> f"{torch.cosine_similarity(ours, fisher, dim=-2).min().item():.6f}"
    '1.000000'
    """
    moments = class_moments(
        key, labels, num_classes, pooled=True, weights=weights, key_padding_mask=key_padding_mask, impl=impl
    )
    return solve_pooled_class_scatter(moments, alpha, impl=impl)


def solve_pooled_class_scatter(
    moments: ClassMoments, alpha: float | Tensor = 0.0, *, impl: str = "auto"
) -> LinearClassifier:
    """`pooled_class_scatter` of the rows that these moments summarise.

    >>> moments = cmab_kernels.intention.variants.class_moments(torch.randn(1, 1, 9, 2), torch.arange(9)[None] % 3, 3)
    >>> cmab_kernels.intention.variants.solve_pooled_class_scatter(moments, alpha=0.1).coefficients.shape
    torch.Size([1, 1, 2, 3])
    """
    check_moments(moments)
    share = divided(moments.weight, moments.weight.sum(-1, keepdim=True))
    centre = (share.unsqueeze(-2) @ moments.mean).squeeze(-2)
    to_own = _from(centre, moments)
    # The mean of all rows is 0 here, so share own + (1 - share) rest = 0.
    to_rest = -to_own * divided(share, 1 - share).unsqueeze(-1)
    weight, info = regularised_solve(moments.scatter.sum(2), (to_own - to_rest).mT, alpha, impl=solver_of(impl))
    offset = -(weight * (to_own + to_rest).mT).sum(-2) / 2
    return LinearClassifier(weight, centre, offset.masked_fill(moments.weight == 0, -torch.inf), info)


def shrunk(covariance: Tensor, shrinkage: float | Tensor) -> Tensor:
    """(1 - s) Sigma + s (trace Sigma / D) I for Sigma (B, H, D, D) and the shrinkage s."""
    amount = fraction_of("shrinkage", shrinkage, covariance)
    spread = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    one = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return (1 - amount) * covariance + amount * spread * one


def _from(centre: Tensor, moments: ClassMoments) -> Tensor:
    """The vector from the centre to the mean of each class, (B, H, C, D); 0 for a class without members."""
    return (moments.mean - centre.unsqueeze(2)).masked_fill((moments.weight == 0).unsqueeze(-1), 0.0)
