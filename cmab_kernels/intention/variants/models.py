"""The results of the estimators: the fitted parameters, and predictions at new points."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.checks import is_read
from ...runtime.constants import INFO_NOT_POSITIVE_DEFINITE
from ..solve import RidgeSolution, regularised_solve
from .inputs import check_query, solver_of


class LinearRegression(NamedTuple):
    """An affine function of a point x: offset + (x - centre) coefficients. Fields are float64 and carry gradients."""

    coefficients: Tensor
    """(B, H, D, E)."""
    centre: Tensor
    """(B, H, D): the point where the value is `offset`. A mean of the data avoids cancellation for data far from 0."""
    offset: Tensor
    """(B, H, E)."""
    info: Tensor
    """(B, H) int32, as in `cmab_kernels.solve_ridge`: 0 sound; 1 not positive definite, coefficients are NaN;
    2 ill-conditioned."""

    @property
    def intercept(self) -> Tensor:
        """The value at x = 0, (B, H, E)."""
        return self.offset - (self.centre.unsqueeze(-2) @ self.coefficients).squeeze(-2)

    def predict(self, query: Tensor) -> Tensor:
        """Predictions (B, H, M, E) at query (B, H, M, D), in its dtype."""
        return _affine(query, self.coefficients, self.centre, self.offset)


class LinearClassifier(NamedTuple):
    """A classifier with one affine score per class. Its fields are as in `LinearRegression`, with C classes for E."""

    coefficients: Tensor
    """(B, H, D, C)."""
    centre: Tensor
    """(B, H, D)."""
    offset: Tensor
    """(B, H, C); -inf for a class of probability 0."""
    info: Tensor
    """(B, H) int32, as in `LinearRegression`."""

    @property
    def intercept(self) -> Tensor:
        """The scores at x = 0, (B, H, C)."""
        return self.offset - (self.centre.unsqueeze(-2) @ self.coefficients).squeeze(-2)

    def decision(self, query: Tensor) -> Tensor:
        """The scores (B, H, M, C) of query (B, H, M, D), in its dtype.

        With two classes, the sign of the difference of their scores decides.
        """
        return _affine(query, self.coefficients, self.centre, self.offset)

    def predict(self, query: Tensor) -> Tensor:
        """The class with the largest score, (B, H, M) int64; -1 where no class has a score.

        Heads without a model have `info` 1, scores of NaN and predictions of -1. On the CPU, a `RuntimeWarning` says
        so.
        """
        warn_of_none(self.info, "heads")
        return most_likely(self.decision(query))

    def probabilities(self, query: Tensor) -> Tensor:
        """softmax(decision), (B, H, M, C): posterior probabilities if the scores are log densities, as in `lda`."""
        return class_probabilities(self.decision(query))


class QuadraticClassifier(NamedTuple):
    """One Gaussian per class: mean, precision (inverse covariance), and offset = log(prior) - log(det covariance) /
    2."""

    mean: Tensor
    """(B, H, C, D)."""
    precision: Tensor
    """(B, H, C, D, D)."""
    offset: Tensor
    """(B, H, C); -inf for a class of probability 0."""
    info: Tensor
    """(B, H, C) int32, for each covariance: 0 sound; 1 singular, the scores of the class are NaN; 2 ill-conditioned."""

    def decision(self, query: Tensor) -> Tensor:
        """log(prior) - log(det covariance) / 2 - (x - mean)' precision (x - mean) / 2 of each class.

        The result is (B, H, M, C) for query (B, H, M, D), in the dtype of query.
        """
        batch, heads, _, width = self.mean.shape
        away = check_query(query, batch, heads, width).unsqueeze(2) - self.mean.unsqueeze(3)
        distance = ((away @ self.precision) * away).sum(-1)
        return (self.offset.unsqueeze(-1) - distance / 2).mT.to(query.dtype)

    def predict(self, query: Tensor) -> Tensor:
        """The most probable class, (B, H, M) int64; -1 where no class has a score.

        A class without a model has `info` 1 and scores of NaN, and is never chosen. On the CPU, a `RuntimeWarning` says
        so.
        """
        warn_of_none(self.info, "classes")
        return most_likely(self.decision(query))

    def probabilities(self, query: Tensor) -> Tensor:
        """The posterior probabilities of the classes, (B, H, M, C)."""
        return class_probabilities(self.decision(query))


def most_likely(scores: Tensor) -> Tensor:
    """The class with the largest score (..., C); -1 where all scores are -inf or NaN.

    A NaN is never the largest score, unlike in `argmax`.
    """
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    return torch.where(scores.amax(-1) == -torch.inf, -1, scores.argmax(-1))


def warn_of_none(info: Tensor, of: str) -> None:
    """Warn of systems without a solution, if the values of `info` may be read."""
    if is_read(info) and bool((info == INFO_NOT_POSITIVE_DEFINITE).any()):
        allowed = (
            "these are never chosen; use more rows, leave out constant features, or use shrinkage, "
            "regularisation or alpha"
        )
        warnings.warn(f"info: some {of} have 1, as they have no model; {allowed}", RuntimeWarning, stacklevel=3)


def class_probabilities(decision: Tensor) -> Tensor:
    """softmax over the classes; all 0 where every score is -inf."""
    nothing = (decision == -torch.inf).all(-1, keepdim=True)
    return decision.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)


def log_of(probability: Tensor) -> Tensor:
    """log(probability); at 0 the value is -inf and the gradient 0."""
    never = probability == 0
    return probability.masked_fill(never, 1.0).log().masked_fill(never, -torch.inf)


def scaled_solve(matrix: Tensor, rhs: Tensor, impl: str) -> RidgeSolution:
    """A^-1 B for symmetric A, first scaled to a diagonal of 1: features in different units would ill-condition A."""
    diagonal = matrix.detach().diagonal(dim1=-2, dim2=-1)
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt().unsqueeze(-1)
    weight, info = regularised_solve(scale * matrix * scale.mT, scale * rhs, 0.0, impl=solver_of(impl))
    return RidgeSolution(scale * weight, info)


def _affine(query: Tensor, coefficients: Tensor, centre: Tensor, offset: Tensor) -> Tensor:
    batch, heads, width, _ = coefficients.shape
    away = check_query(query, batch, heads, width) - centre.unsqueeze(2)
    return (away @ coefficients + offset.unsqueeze(2)).to(query.dtype)
