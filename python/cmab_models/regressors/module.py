"""The paper's module of Intention: a perceptron embeds the values, and another reads the regression's weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cmab_kernels import ridge_state, solve_ridge

from ..neural_processes.parts import perceptron
from .base import Regressor


class IntentionModule(Regressor):
    """The weights w of a ridge regression of embedded values on embedded keys, read by a perceptron.

    w = (K^T K + alpha I)^-1 K^T V, with the rows e_K(key) of K and e_V(value) of V, where e_K and e_V are perceptrons
    and alpha > 0 is learned. An answer is r(e_K(query) w, w), where the perceptron r reads the prediction at the query
    and all numbers of w. In `Intention`, the embedding of values and the readout are linear, and see the prediction
    alone. Here one layer can also answer what is not asked at a place: the task `target` asks at 0 always.

    Source: Exploring the Space of Key-Value-Query Models with Intention (Garnelo and Czarnecki).

    Args:
        dim_key: columns of queries and keys.
        dim_value, dim_out: columns of values and of answers.
        dim: width of the features of keys, and of the readout's hidden layers; those of the embeddings have 2 dim.
        dim_embedded: width of the embedded values; the readout reads dim x dim_embedded weights.

    >>> model = cmab_models.IntentionModule(dim_key=1, dim_value=1, dim_out=1)
    >>> model(torch.randn(3, 5, 1), torch.randn(3, 10, 1), torch.randn(3, 10, 1)).shape
    torch.Size([3, 5, 1])
    """

    def __init__(self, dim_key: int, dim_value: int, dim_out: int, dim: int = 64, dim_embedded: int = 8) -> None:
        super().__init__()
        self.dim_key, self.dim_value = dim_key, dim_value
        self.embedding = perceptron(dim_key, 2 * dim, dim, 3)
        self.value = perceptron(dim_value, 2 * dim, dim_embedded, 3)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.readout = perceptron((1 + dim) * dim_embedded, dim, dim_out, 3)

    def _answer(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        state = ridge_state(self.embedding(key).unsqueeze(1), self.value(value).unsqueeze(1))
        features = self.embedding(query)
        weight = solve_ridge(state, self.log_alpha.exp()).weight.squeeze(1).to(features.dtype)
        read = weight.flatten(1).unsqueeze(1).expand(-1, query.shape[1], -1)
        answer: Tensor = self.readout(torch.cat([features @ weight, read], -1))
        return answer
