"""Regressors of several layers: Informer, sigma-Informer and Transformer."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from cmab_kernels.nn import FeedForward, InformerEncoderLayer, MultiheadIntention, MultiheadSigmaIntention

from ..encoder import EncoderLayer, attended
from ..neural_processes.parts import perceptron
from .base import Regressor
from .images import Conv4, embedding


class Stack(Regressor):
    """Base class: layers encode the points, each a key with its value. Queries then read the encoded points at the
    points' keys."""

    def __init__(
        self,
        dim_key: int,
        dim_value: int,
        dim_out: int,
        dim: int = 64,
        num_heads: int = 4,
        depth: int = 2,
        ff_dim: int | None = None,
        network: str = "perceptron",
    ) -> None:
        super().__init__()
        ff_dim = 2 * dim if ff_dim is None else ff_dim
        self.dim_key, self.dim_value = dim_key, dim_value
        self.key = embedding(network, dim_key, 2 * dim, dim, 3)
        self.of_images = isinstance(self.key, Conv4)
        self.point = perceptron((dim if self.of_images else dim_key) + dim_value, 2 * dim, dim, 2)
        self.encoder = nn.TransformerEncoder(self._layer(dim, num_heads, ff_dim), depth, enable_nested_tensor=False)
        self.cross = self._cross(dim, num_heads)
        self.feed_forward = FeedForward(dim, ff_dim)
        self.head = nn.Linear(dim, dim_out)

    @abstractmethod
    def _layer(self, dim: int, num_heads: int, ff_dim: int) -> nn.TransformerEncoderLayer:
        """Return an encoder layer, batch first."""

    @abstractmethod
    def _cross(self, dim: int, num_heads: int) -> nn.Module:
        """Return the layer through which queries read, with the arguments and results of `torch.nn.MultiheadAttention`,
        batch first."""

    def _answer(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        at_keys = self.key(key)
        points = self.encoder(self.point(torch.cat([at_keys if self.of_images else key, value], -1)))
        features = at_keys if self.of_images and query is key else self.key(query)
        read = attended(self.cross, features, at_keys, points)
        answer: Tensor = self.head(self.feed_forward(features + read))
        return answer


class Informer(Stack):
    """A Transformer with Intention, regularised least squares, in place of every attention.

    It is not the time-series model of the same name (Zhou et al., AAAI 2021), in which only a sample of the queries
    attends. Source: Exploring the Space of Key-Value-Query Models with Intention (Garnelo and Czarnecki).

    Args:
        dim_key: columns of queries and keys.
        dim_value, dim_out: columns of values and of answers.
        dim: width of all features.
        num_heads: a divisor of dim.
        depth: layers over the points.
        ff_dim: hidden width of feed-forward layers; None means 2 dim.
        network: what embeds queries and keys: "perceptron", or "conv4" for images, the convolutional network of
            `cmab_models.regressors.images.Conv4`; a point is then its key's features with its value.

    >>> model = cmab_models.Informer(dim_key=3, dim_value=3, dim_out=3, dim=16)
    >>> model(torch.randn(2, 4, 3), torch.randn(2, 5, 3), torch.randn(2, 5, 3)).shape
    torch.Size([2, 4, 3])
    """

    def _layer(self, dim: int, num_heads: int, ff_dim: int) -> nn.TransformerEncoderLayer:
        return InformerEncoderLayer(dim, num_heads, ff_dim, dropout=0.0, batch_first=True, norm_first=True)

    def _cross(self, dim: int, num_heads: int) -> nn.Module:
        return MultiheadIntention(dim, num_heads, batch_first=True)


class SigmaInformer(Stack):
    """An `Informer` with sigma-Intention, which takes a softmax of Intention's weights. The arguments are those of
    `Informer`.

    It is not the time-series model called Informer (Zhou et al., AAAI 2021).

    >>> model = cmab_models.SigmaInformer(dim_key=3, dim_value=3, dim_out=3, dim=16)
    >>> model(torch.randn(2, 4, 3), torch.randn(2, 5, 3), torch.randn(2, 5, 3)).shape
    torch.Size([2, 4, 3])
    """

    def _layer(self, dim: int, num_heads: int, ff_dim: int) -> nn.TransformerEncoderLayer:
        return InformerEncoderLayer(
            dim, num_heads, ff_dim, dropout=0.0, batch_first=True, norm_first=True, kind="sigma"
        )

    def _cross(self, dim: int, num_heads: int) -> nn.Module:
        return MultiheadSigmaIntention(dim, num_heads, batch_first=True)


class Transformer(Stack):
    """An `Informer` with torch's own attention and encoder layers. The arguments are those of `Informer`.

    >>> model = cmab_models.Transformer(dim_key=3, dim_value=3, dim_out=3, dim=16)
    >>> model(torch.randn(2, 4, 3), torch.randn(2, 5, 3), torch.randn(2, 5, 3)).shape
    torch.Size([2, 4, 3])
    """

    def _layer(self, dim: int, num_heads: int, ff_dim: int) -> nn.TransformerEncoderLayer:
        return EncoderLayer(dim, num_heads, ff_dim, norm_first=True)

    def _cross(self, dim: int, num_heads: int) -> nn.Module:
        return nn.MultiheadAttention(dim, num_heads, batch_first=True)
