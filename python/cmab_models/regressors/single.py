"""Regressors with a single layer of Intention or attention, and a multilayer perceptron."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from cmab_kernels.nn import MultiheadIntention
from cmab_kernels.runtime.checks import mismatch

from ..encoder import attended
from ..neural_processes.parts import perceptron
from .base import Regressor
from .images import embedding


class OneLayer(Regressor):
    """Base class: queries and keys share an embedding, values are projected, and one layer reads them."""

    def __init__(
        self,
        dim_key: int,
        dim_value: int,
        dim_out: int,
        dim: int = 64,
        num_heads: int = 1,
        network: str = "perceptron",
    ) -> None:
        super().__init__()
        self.dim_key, self.dim_value = dim_key, dim_value
        self.embedding = embedding(network, dim_key, 2 * dim, dim, 3)
        self.value = nn.Linear(dim_value, dim)
        self.layer = self._made(dim, num_heads)
        self.head = nn.Linear(dim, dim_out)

    @abstractmethod
    def _made(self, dim: int, num_heads: int) -> nn.Module:
        """Return the layer, with the arguments and results of `torch.nn.MultiheadAttention`, batch first."""

    def _answer(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        answer: Tensor = self.head(attended(self.layer, self.embedding(query), self.embedding(key), self.value(value)))
        return answer


class Intention(OneLayer):
    """One layer of Intention: it regresses the values on learned features of the keys, and predicts at the features of
    the queries.

    Source: Exploring the Space of Key-Value-Query Models with Intention (Garnelo and Czarnecki).

    Args:
        dim_key: columns of queries and keys.
        dim_value, dim_out: columns of values and of answers.
        dim: width of all features.
        num_heads: a divisor of dim.
        network: what embeds queries and keys: "perceptron", or "conv4" for images, the convolutional network of
            `cmab_models.regressors.images.Conv4`.

    >>> model = cmab_models.Intention(dim_key=1, dim_value=1, dim_out=1)
    >>> model(torch.randn(3, 5, 1), torch.randn(3, 10, 1), torch.randn(3, 10, 1)).shape
    torch.Size([3, 5, 1])
    """

    def _made(self, dim: int, num_heads: int) -> nn.Module:
        return MultiheadIntention(dim, num_heads, batch_first=True)


class Attention(OneLayer):
    """A regressor like `Intention`, with `torch.nn.MultiheadAttention`: weighted means of values. The arguments are
    those of `Intention`.

    >>> model = cmab_models.Attention(dim_key=1, dim_value=1, dim_out=1)
    >>> model(torch.randn(3, 5, 1), torch.randn(3, 10, 1), torch.randn(3, 10, 1)).shape
    torch.Size([3, 5, 1])
    """

    def _made(self, dim: int, num_heads: int) -> nn.Module:
        return nn.MultiheadAttention(dim, num_heads, batch_first=True)


class MLP(Regressor):
    """A multilayer perceptron that reads a query and all keys and values as one row, in their order. The number of keys
    is fixed.

    Args:
        num_points: N, the number of keys.
        depth: the number of linear layers.
        The other arguments are those of `Intention`.

    >>> model = cmab_models.MLP(dim_key=1, dim_value=1, dim_out=1, num_points=10)
    >>> model(torch.randn(3, 5, 1), torch.randn(3, 10, 1), torch.randn(3, 10, 1)).shape
    torch.Size([3, 5, 1])
    """

    def __init__(
        self, dim_key: int, dim_value: int, dim_out: int, num_points: int, dim: int = 128, depth: int = 4
    ) -> None:
        super().__init__()
        self.dim_key, self.dim_value, self.num_points = dim_key, dim_value, num_points
        self.layers = perceptron(dim_key + num_points * (dim_key + dim_value), dim, dim_out, depth)

    def _answer(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if key.shape[1] != self.num_points:
            raise ValueError(
                mismatch("key", f"{key.shape[1]} keys", f"{self.num_points}, the num_points of this model")
            )
        points = torch.cat([key, value], -1).flatten(1).unsqueeze(1).expand(-1, query.shape[1], -1)
        answer: Tensor = self.layers(torch.cat([query, points], -1))
        return answer
