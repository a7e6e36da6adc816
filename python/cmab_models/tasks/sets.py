"""Tasks of keys, values and queries: answers that follow from a set of points."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Task, reduction, seeded

HELD_OUT = 2000
"""The number of held-out questions."""


class Question(NamedTuple):
    """Points, a query about them, and the answer."""

    query: Tensor
    """(B, M, dim_key)"""
    key: Tensor
    """(B, N, dim_key)"""
    value: Tensor
    """(B, N, dim_value)"""
    answer: Tensor
    """(B, M, dim_out)"""


@dataclass(frozen=True)
class SetTask(Task):
    """Base class of tasks with new random questions in every batch. The loss and the score are the mean squared
    error."""

    drawn_anywhere: ClassVar[bool] = True
    systems: ClassVar[tuple[str, ...]] = ("intention", "informer", "sigma-informer", "attention", "transformer", "mlp")

    steps: int = 1500
    batch_size: int = 128
    dim: int = 64

    @abstractmethod
    def drawn(self, generator: torch.Generator, count: int) -> Question:
        """Return questions, in float32."""

    @abstractmethod
    def exact(self, question: Question) -> Tensor:
        """Return the best answers that can be computed from the inputs of a model."""

    def sizes(self, system: str) -> dict[str, Any]:
        one = self.drawn(seeded(0), 1)
        widths = {"dim_key": one.key.shape[-1], "dim_value": one.value.shape[-1], "dim_out": one.answer.shape[-1]}
        return {**widths, "num_points": one.key.shape[1]} if system == "mlp" else {**widths, "dim": self.dim}

    def batch(self, generator: torch.Generator) -> Question:
        return self.drawn(generator, self.batch_size)

    def loss(self, model: nn.Module, batch: Question) -> Tensor:
        return F.mse_loss(model(*batch[:3]), batch.answer, reduction=reduction(batch.answer))

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        return {"mse": self.loss(model, Question(*(part.to(device) for part in self._held_out()))).item()}

    def references(self) -> dict[str, float]:
        """Return the error of the exact answers, in float64, and the error of the mean of all answers."""
        question = Question(*(part.double() for part in self._held_out()))
        exact = F.mse_loss(self.exact(question), question.answer).item()
        return {"exact": exact, "mean": question.answer.var((0, 1), correction=0).mean().item()}

    def _held_out(self) -> Question:
        return self.drawn(seeded(23), HELD_OUT)


@dataclass(frozen=True)
class Sine(SetTask):
    """Predict a sine of unknown amplitude and phase from 10 points of it."""

    name = "sine"

    def drawn(self, generator: torch.Generator, count: int) -> Question:
        amplitude = _uniform(generator, 0.1, 5.0, count, 1, 1)
        phase = _uniform(generator, 0.0, math.pi, count, 1, 1)
        x = _uniform(generator, -5.0, 5.0, count, 20, 1)
        key, query = x.split(10, 1)
        value, answer = (amplitude * (x - phase).sin()).split(10, 1)
        return Question(query, key, value, answer)

    def exact(self, question: Question) -> Tensor:
        query, key = (torch.cat([x.sin(), x.cos()], -1) for x in question[:2])
        return _least_squares(query, key, question.value)


@dataclass(frozen=True)
class Kabsch(SetTask):
    """Predict where a rotation, a scaling and a translation move points, from 5 others that were moved."""

    name = "kabsch"

    def drawn(self, generator: torch.Generator, count: int) -> Question:
        points = torch.randn(count, 10, 3, generator=generator)
        rotation = _rotations(generator, count)
        size, shift = _uniform(generator, 0.5, 2.0, count, 1, 1), torch.randn(count, 1, 3, generator=generator)
        moved = size * points @ rotation + shift
        (key, query), (value, answer) = points.split(5, 1), moved.split(5, 1)
        return Question(query, key, value, answer)

    def exact(self, question: Question) -> Tensor:
        """Return the answers of the algorithm of Kabsch and Umeyama."""
        query, key, value, _ = question
        centre, moved_centre = key.mean(1, keepdim=True), value.mean(1, keepdim=True)
        away, moved = key - centre, value - moved_centre
        u, s, vh = torch.linalg.svd(away.mT @ moved)
        sign = torch.ones_like(s)
        sign[:, -1] = (u @ vh).det().sign()
        size = (s * sign).sum(-1) / away.square().sum((1, 2))
        return size[:, None, None] * (query - centre) @ (u * sign.unsqueeze(1)) @ vh + moved_centre


@dataclass(frozen=True)
class LeastSquares(SetTask):
    """Predict a linear function of `variables` variables from twice as many points; `dim` is the latent width that may
    be too small."""

    name = "least-squares"

    steps: int = 400
    variables: int = 8

    def drawn(self, generator: torch.Generator, count: int) -> Question:
        x = torch.randn(count, 3 * self.variables, self.variables, generator=generator)
        weight = torch.randn(count, self.variables, 1, generator=generator) / self.variables**0.5
        (key, query), (value, answer) = (
            each.split([2 * self.variables, self.variables], 1) for each in (x, x @ weight)
        )
        return Question(query, key, value, answer)

    def exact(self, question: Question) -> Tensor:
        return _least_squares(question.query, question.key, question.value)


@dataclass(frozen=True)
class Target(SetTask):
    """Find a target in the plane from its squared distances to 5 observers of variance 1/4; the query is always 0."""

    name = "target"

    def sizes(self, system: str) -> dict[str, Any]:
        """Return the usual sizes, but with 4 heads for a single layer too. With one query, a head gives only one number
        from all values."""
        return super().sizes(system) | ({"num_heads": 4} if system in ("intention", "attention") else {})

    def drawn(self, generator: torch.Generator, count: int) -> Question:
        target, observers = (
            torch.randn(count, 1, 2, generator=generator),
            torch.randn(count, 5, 2, generator=generator) / 2,
        )
        squared = (observers - target).square().sum(-1, keepdim=True)
        return Question(torch.zeros(count, 1, 2), observers, squared, target)

    def exact(self, question: Question) -> Tensor:
        """Return the solution t of the linear equations 2 p t - |t|^2 = |p|^2 - d^2 for observers p and squared
        distances d^2."""
        _, key, squared, _ = question
        equations = torch.cat([2 * key, -torch.ones_like(squared)], -1)
        return torch.linalg.lstsq(equations, key.square().sum(-1, keepdim=True) - squared).solution[:, None, :2, 0]


def _uniform(generator: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)


def _rotations(generator: torch.Generator, count: int) -> Tensor:
    """Return rotations (B, 3, 3), uniformly distributed."""
    q, r = torch.linalg.qr(torch.randn(count, 3, 3, generator=generator))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(1)
    return q * q.det().sign()[:, None, None]


def _least_squares(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query @ torch.linalg.lstsq(key, value).solution
