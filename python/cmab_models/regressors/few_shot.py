"""Classification from a few examples, by an estimator in closed form on learned features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cmab_kernels.intention.variants import kernel_features, lssvm, pooled_class_scatter
from cmab_kernels.runtime.checks import mismatch

from ..choices import classes_of
from .base import Regressor
from .images import embedding


class FewShot(Regressor):
    """Scores classes for queries from examples. Keys are the examples, and values are their classes as 0 and 1.

    Features are learned so that an estimator, fitted to the examples in closed form, classifies the queries. Gradients
    pass through the estimator. Source: Exploring the Space of Key-Value-Query Models with Intention (Garnelo and
    Czarnecki). The paper's "QDA" is `pooled_class_scatter`.

    Args:
        dim_key: columns of examples, such as the pixels of an image.
        dim_value: the number of classes.
        estimator: "lssvm", the least-squares support vector machine; "scatter", `pooled_class_scatter`; "kernel", the
            support vector machine with a Gaussian kernel; "attention", a softmax over the examples, as in a matching
            network (Vinyals et al., NeurIPS 2016).
        dim: width of the features.
        network: what makes features of keys and queries: "perceptron", or "conv4" for images, the convolutional network
            of `cmab_models.regressors.images.Conv4`.

    >>> model = cmab_models.FewShot(dim_key=64, dim_value=3)
    >>> examples, classes = torch.randn(2, 15, 64), torch.eye(3).repeat(5, 1).expand(2, -1, -1)
    >>> model(torch.randn(2, 7, 64), examples, classes).shape
    torch.Size([2, 7, 3])
    """

    def __init__(
        self, dim_key: int, dim_value: int, estimator: str = "lssvm", dim: int = 32, network: str = "perceptron"
    ) -> None:
        super().__init__()
        if estimator not in ESTIMATORS:
            raise ValueError(mismatch("estimator", repr(estimator), f"one of {', '.join(ESTIMATORS)}"))
        self.dim_key, self.dim_value, self.estimator = dim_key, dim_value, estimator
        self.embedding = nn.Sequential(embedding(network, dim_key, 4 * dim, dim, 3), nn.LayerNorm(dim))
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.log_scale = nn.Parameter(torch.ones(()))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the scores (B, M, dim_value). The values may have any dtype."""
        tensors = isinstance(query, Tensor) and isinstance(value, Tensor)
        return super().forward(query, key, value.to(query.dtype) if tensors else value)

    def _answer(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = self.embedding(query), self.embedding(key)
        scores = ESTIMATORS[self.estimator](query, key, value, self.log_alpha.exp())
        without = scores == -torch.inf  # a class without examples, which must not reach the scale's gradient
        return (self.log_scale.exp() * scores.masked_fill(without, 0.0)).masked_fill(without, -torch.inf)


def _lssvm(query: Tensor, key: Tensor, value: Tensor, alpha: Tensor) -> Tensor:
    machine = lssvm(key.unsqueeze(1), classes_of(value), value.shape[-1], alpha)
    return machine.decision(query.unsqueeze(1)).squeeze(1)


def _scatter(query: Tensor, key: Tensor, value: Tensor, alpha: Tensor) -> Tensor:
    classifier = pooled_class_scatter(key.unsqueeze(1), classes_of(value), value.shape[-1], alpha)
    return classifier.decision(query.unsqueeze(1)).squeeze(1)


def _kernel(query: Tensor, key: Tensor, value: Tensor, alpha: Tensor) -> Tensor:
    """Return the scores with a Gaussian kernel. Its width sqrt(dim) is the scale of distances between features of norm
    sqrt(dim)."""
    both = kernel_features(torch.cat([query, key], 1).unsqueeze(1), key.unsqueeze(1), 1 / key.shape[-1]).squeeze(1)
    query, key = both.split([query.shape[1], key.shape[1]], 1)
    return _lssvm(query, key, value, alpha)


def _attention(query: Tensor, key: Tensor, value: Tensor, alpha: Tensor) -> Tensor:
    return (query @ key.mT / (alpha * key.shape[-1] ** 0.5)).softmax(-1) @ value


ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "lssvm": _lssvm,
    "scatter": _scatter,
    "kernel": _kernel,
    "attention": _attention,
}
