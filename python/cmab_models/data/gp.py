"""Functions drawn from Gaussian processes, and the exact predictions for them.

The length scale of each function is drawn from U(0.1, 0.6), its output scale from U(0.1, 1); x ~ U(-2, 2). The noise
has a standard deviation of 0.02. The code behind the published tables uses these numbers. The text of the paper gives
other length scales, which do not agree with the published numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from ..neural_processes.base import Batch

NOISE = 0.02


def rbf(distance: Tensor) -> Tensor:
    """Return exp(-r^2 / 2) for distances r in length scales."""
    return (-0.5 * distance.square()).exp()


def matern(distance: Tensor) -> Tensor:
    """Return the Matérn 5/2 kernel, (1 + a + a^2 / 3) exp(-a) with a = sqrt(5) r, for distances r in length scales."""
    a = math.sqrt(5.0) * distance
    return (1 + a + a.square() / 3) * (-a).exp()


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {"rbf": rbf, "matern": matern}


class Prior(NamedTuple):
    """The Gaussian processes from which a batch of functions is drawn."""

    kernel: str
    """A name in `KERNELS`."""
    length: Tensor
    """(B,) float64"""
    scale: Tensor
    """(B,) float64, the standard deviation without noise"""

    def covariance(self, x: Tensor) -> Tensor:
        """Return the covariance (B, N, N) of noisy values at x (B, N, 1), float64."""
        distance = (x - x.mT).abs().double() / self.length[:, None, None]
        noise = NOISE**2 * torch.eye(x.shape[1], dtype=torch.float64)
        return self.scale.square()[:, None, None] * KERNELS[self.kernel](distance) + noise

    def posterior(self, x: Tensor, y: Tensor, target_x: Tensor) -> MultivariateNormal:
        """Return the joint distribution of noisy values at M targets given N >= 0 points: batch shape (B,), event shape
        (M,), float64.

        It follows from the Cholesky factor of the joint covariance of points and targets. The block of the factor that
        belongs to the targets alone is the factor of their covariance given the points.
        """
        points = x.shape[1]
        factor = torch.linalg.cholesky(self.covariance(torch.cat([x, target_x], 1)))
        white = torch.linalg.solve_triangular(factor[:, :points, :points], y.double(), upper=False)
        mean = (factor[:, points:, :points] @ white).squeeze(-1)
        return MultivariateNormal(mean, scale_tril=factor[:, points:, points:], validate_args=False)


def priors(kernel: str, functions: int, generator: torch.Generator) -> Prior:
    """Return processes whose length and output scales are drawn as in the published code."""
    length, scale = torch.rand(2, functions, dtype=torch.float64, generator=generator)
    return Prior(kernel, 0.1 + 0.5 * length, 0.1 + 0.9 * scale)


def draw(prior: Prior, context: int, targets: int, generator: torch.Generator) -> Batch:
    """Return one function of each process, at points of U(-2, 2), float32."""
    shape = (len(prior.scale), context + targets, 1)
    x = 4 * torch.rand(shape, generator=generator) - 2
    factor = torch.linalg.cholesky(prior.covariance(x))
    y = (factor @ torch.randn(shape, dtype=torch.float64, generator=generator)).float()
    return Batch(x[:, :context], y[:, :context], x[:, context:], y[:, context:])


def exact_log_prob(prior: Prior, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return two log-likelihoods (B,) of the targets: for each target given the context, and for all targets jointly,
    divided by their number.

    The first is the highest expected score of predictions that are independent between targets. The second is the
    highest expected score of any predictions.
    """
    posterior = prior.posterior(batch.context_x, batch.context_y, batch.target_x)
    y = batch.target_y.squeeze(-1).double()
    alone = Normal(posterior.mean, posterior.stddev, validate_args=False).log_prob(y).mean(-1)
    return alone, posterior.log_prob(y) / y.shape[-1]
