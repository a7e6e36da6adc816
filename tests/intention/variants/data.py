"""Random rows of overlapping classes, and a table of the estimators that are fitted to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cmab_kernels.intention import variants


def blobs(
    batch: int, heads: int, rows: int, width: int, classes: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return rows of overlapping classes and their labels (B, N); each class is present if there are enough rows."""
    labels = (
        torch.stack([torch.randperm(rows) for _ in range(batch)]) % classes
        if batch
        else torch.zeros(0, rows, dtype=torch.int64)
    )
    means = torch.randn(batch, heads, classes, width, dtype=torch.float64)
    index = labels[:, None, :, None].expand(batch, heads, rows, width)
    return (means.gather(2, index) + torch.randn(batch, heads, rows, width, dtype=torch.float64)).to(dtype), labels


def _ridge_one_hot(key: Tensor, labels: Tensor, classes: int, **options: Any) -> variants.LinearRegression:
    labels = labels if labels.dim() == 3 else labels[:, None].expand(key.shape[:3])
    value = (labels[..., None] == torch.arange(classes)).to(key.dtype)
    return variants.ridge(key, value, 0.3, **options)


CLASSIFIERS: dict[str, Callable[..., Any]] = {
    "lssvm": lambda k, y, c, **o: variants.lssvm(k, y, c, 0.3, **o),
    "lda": lambda k, y, c, **o: variants.lda(k, y, c, **o),
    "lda shrunk": lambda k, y, c, **o: variants.lda(k, y, c, shrinkage=0.2, **o),
    "pooled": lambda k, y, c, **o: variants.pooled_class_scatter(k, y, c, 0.1, **o),
    "qda": lambda k, y, c, **o: variants.qda(k, y, c, regularisation=0.1, **o),
}
"""name -> (key, labels, classes, **options) -> classifier"""

FITTED = {"ridge": _ridge_one_hot, **CLASSIFIERS}


def score(model: Any, query: Tensor) -> Tensor:
    return model.predict(query) if isinstance(model, variants.LinearRegression) else model.decision(query)
