"""Regression of functions from a Gaussian process. Its exact predictions give the upper bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.distributions import Normal

from ..data import gp
from ..neural_processes.base import Batch
from .base import BySystem, seeded
from .functions import FunctionTask, sizes_of_sets, streamed


@dataclass(frozen=True)
class _GP(FunctionTask):
    """Functions of x in (-2, 2) from points with noise 0.02; N ~ U[3, most_points - 3) points and M ~ U[3, most_points
    - N) targets.

    References: `exact`, the Gaussian process of each function with its own scales, which has the highest score of all
    predictions with independent targets; `exact_joint`, the highest score of any prediction; `prior`, the normal
    distribution before the first point.
    """

    drawn_anywhere: ClassVar[bool] = True
    kernel: ClassVar[str]
    dim_x: ClassVar[int] = 1
    dim_y: ClassVar[int] = 1
    of_system: ClassVar[BySystem] = {"cmanp": {"learning_rate": 1e-3}, "cmanp-and": {"learning_rate": 1e-3}}
    """At 3e-3, one of three seeds of CMANP, and all seeds of CMANP-AND, learned only the mean of their context. LBANP
    learns faster at 3e-3."""

    steps: int = 10_000
    most_points: int = 50
    stream_points: int = 40
    """The number of points of the streamed function."""

    def batch(self, generator: torch.Generator) -> Batch:
        return self._drawn(generator)[1]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.log_likelihoods(model, (batch for _, batch in self._held_out()))

    def references(self) -> dict[str, float]:
        scores = []
        for prior, batch in self._held_out():
            spread = prior.covariance(batch.target_x).diagonal(dim1=1, dim2=2).sqrt()
            scores.append(
                torch.stack(
                    [
                        *gp.exact_log_prob(prior, batch),
                        Normal(0.0, spread).log_prob(batch.target_y.squeeze(-1)).mean(-1),
                    ]
                )
            )
        means = torch.stack(scores).mean((0, 2)).tolist()
        return dict(zip(("exact", "exact_joint", "prior"), means, strict=True))

    def stream(self, model: nn.Module) -> Iterator[dict[str, float]]:
        """Yield after each point of one function: the likelihood of 200 targets, the likelihood of the exact process,
        and the time of the update."""
        generator = seeded(2)
        prior = gp.priors(self.kernel, 1, generator)
        batch = gp.draw(prior, self.stream_points, 200, generator)
        for step in streamed(model, batch):
            count = int(step["points"])
            known = batch._replace(context_x=batch.context_x[:, :count], context_y=batch.context_y[:, :count])
            yield step | {"exact": gp.exact_log_prob(prior, known)[0].item()}

    def _held_out(self) -> Iterator[tuple[gp.Prior, Batch]]:
        generator = seeded(1)
        return (self._drawn(generator) for _ in range(self.evaluation_batches))

    def _drawn(self, generator: torch.Generator) -> tuple[gp.Prior, Batch]:
        prior = gp.priors(self.kernel, self.functions, generator)
        return prior, gp.draw(prior, *sizes_of_sets(self.most_points, generator), generator)


@dataclass(frozen=True)
class RBF(_GP):
    __doc__ = _GP.__doc__
    name: ClassVar[str] = "gp-rbf"
    kernel: ClassVar[str] = "rbf"


@dataclass(frozen=True)
class Matern(_GP):
    __doc__ = _GP.__doc__
    name: ClassVar[str] = "gp-matern"
    kernel: ClassVar[str] = "matern"

    steps: int = 5_000
