"""Conditional Neural Processes: the context is a mean of its embeddings."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Normal

from ..precision import in_single, weight_of
from .base import NeuralProcess, without_masked
from .family import Everywhere, ValueDecoder, pooled_pair


class Total(NamedTuple):
    """The sum of the embeddings of a context, and the number of points in it."""

    features: Tensor
    """(B, 2 dim), at least float32"""
    points: Tensor
    """(B, 1), at least float32, because a half type cannot count beyond 2,048"""


class KeepsTotal(NeuralProcess):
    """Base class of models with two encoders, whose state is the sum of both embeddings over the points."""

    state_type = Total

    @abstractmethod
    def _embedded(self, points: Tensor) -> Tensor:
        """Return the features (B, N, 2 dim) of points (B, N, dim_x + dim_y), those of the first encoder first."""

    def _means(self, state: Total) -> tuple[Tensor, Tensor]:
        """Return the means (B, dim) of the embeddings of each encoder."""
        mean = (state.features / state.points.clamp(min=1)).to(weight_of(self).dtype)
        first, second = mean.chunk(2, -1)
        return first, second

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


class CNP(Everywhere, KeepsTotal):
    """The simplest neural process: two means over the embedded context, and a multilayer perceptron at each target.

    Standard deviations are at least 0.1. Source: Conditional Neural Processes (Garnelo et al., ICML 2018), in the form
    of the published code (`family`), which has two encoders.

    Args:
        dim_x, dim_y: columns of x and y.
        dim: width of all layers.
        encoder_depth, pooled_depth: linear layers before and after the mean over the points, at least 2.
        decoder_depth: linear layers of the decoder, at least 2.

    The state of a context has constant size.

    >>> model = cmab_models.CNP(dim_x=1, dim_y=1)
    >>> x, y = torch.randn(2, 3, 50, 1)
    >>> state = model.forget(model.condition(x, y), x[:, 40:], y[:, 40:])
    >>> torch.allclose(model.predict(state, x).mean, model(x[:, :40], y[:, :40], x).mean, atol=1e-5)
    True
    """

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        dim: int = 128,
        encoder_depth: int = 4,
        pooled_depth: int = 2,
        decoder_depth: int = 3,
    ) -> None:
        super().__init__()
        self.dim_x, self.dim_y = dim_x, dim_y
        self.encoders: Any = pooled_pair(dim_x, dim_y, dim, encoder_depth, pooled_depth)
        self.decoder = ValueDecoder(2 * dim, dim, dim_x, dim_y, decoder_depth)

    def predict(self, state: Total, target_x: Tensor) -> Normal:
        self._check(target_x, batch=self._known(state).points.shape[0], of="target_")
        means = self._means(state)
        pooled = [encoder.pooled(mean) for encoder, mean in zip(self.encoders, means, strict=True)]
        context = torch.cat(pooled, -1).unsqueeze(1).expand(-1, target_x.shape[1], -1)
        result: Normal = self.decoder(context, target_x)
        return result

    def _embedded(self, points: Tensor) -> Tensor:
        return torch.cat([encoder.points.layers(points) for encoder in self.encoders], -1)
