"""Conditional Neural Processes: the context is the mean of its embeddings."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Normal

from ..precision import in_single
from .base import NeuralProcess, without_masked
from .parts import NormalHead, point_embedding


class Total(NamedTuple):
    """The sum of the embeddings of a context, and the number of points in it."""

    features: Tensor
    """(B, dim), at least float32"""
    points: Tensor
    """(B, 1), at least float32, because a half type cannot count beyond 2,048"""


class KeepsTotal(NeuralProcess):
    """Base class of models whose state is a sum over the points."""

    state_type = Total

    @abstractmethod
    def _embedded(self, points: Tensor) -> Tensor:
        """Return the features (B, N, width) of points (B, N, dim_x + dim_y)."""

    def condition(self, x: Tensor, y: Tensor, state: Total | None = None, mask: Tensor | None = None) -> Total:
        new = self._total(x, y, mask, state)
        return new if state is None else Total(state.features + new.features, state.points + new.points)

    def forget(self, state: Total, x: Tensor, y: Tensor) -> Total:
        self._known(state)
        old = self._total(x, y, None, state)
        return Total(state.features - old.features, state.points - old.points)

    def _total(self, x: Tensor, y: Tensor, mask: Tensor | None, state: Total | None) -> Total:
        """Return the total of the points x, y, which can be added to `state` or subtracted from it."""
        self._check(x, y, mask=mask, batch=None if state is None else self._known(state).points.shape[0], values=False)
        features = in_single(self._embedded(torch.cat(without_masked(x, y, mask), -1)))
        if mask is None:
            return Total(features.sum(1), features.new_full((x.shape[0], 1), x.shape[1]))
        return Total(
            features.masked_fill(mask.unsqueeze(-1), 0.0).sum(1), (~mask).sum(1, keepdim=True).to(features.dtype)
        )


class CNP(KeepsTotal):
    """The simplest neural process: a multilayer perceptron at each point, a mean over the context, and a multilayer
    perceptron at each target.

    Args:
        dim_x, dim_y: columns of x and y.
        dim: width of all layers.
        depth: linear layers of the encoder and of the decoder, at least 2.
        bound_std: whether standard deviations are at least 0.05.

    The state of a context has constant size. Source: Conditional Neural Processes (Garnelo et al., ICML 2018).

    >>> model = cmab_models.CNP(dim_x=1, dim_y=1)
    >>> x, y = torch.randn(2, 3, 50, 1)
    >>> state = model.forget(model.condition(x, y), x[:, 40:], y[:, 40:])
    >>> torch.allclose(model.predict(state, x).mean, model(x[:, :40], y[:, :40], x).mean, atol=1e-5)
    True
    """

    def __init__(self, dim_x: int, dim_y: int, dim: int = 128, depth: int = 4, bound_std: bool = False) -> None:
        super().__init__()
        self.dim_x, self.dim_y = dim_x, dim_y
        self.embedding = point_embedding(dim_x + dim_y, dim, depth, "depth")
        self.decoder = point_embedding(dim_x + dim, dim, depth, "depth")
        self.head = NormalHead(dim, dim, dim_y, bound_std)

    def predict(self, state: Total, target_x: Tensor) -> Normal:
        self._check(target_x, batch=self._known(state).points.shape[0], of="target_")
        mean = (state.features / state.points.clamp(min=1)).to(target_x.dtype)
        context = mean.unsqueeze(1).expand(-1, target_x.shape[1], -1)
        result: Normal = self.head(self.decoder(torch.cat([target_x, context], -1)).relu())
        return result

    def _embedded(self, points: Tensor) -> Tensor:
        result: Tensor = self.embedding(points)
        return result
