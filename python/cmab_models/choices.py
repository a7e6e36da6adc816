"""The choice of the largest score. A NaN is never chosen."""

import torch
from torch import Tensor


def largest(scores: Tensor) -> Tensor:
    """Return the index, int64, of the largest of scores (..., C); -1 if all are NaN. `argmax` alone would choose a
    NaN."""
    missing = scores.isnan()
    return torch.where(missing.all(-1), -1, scores.masked_fill(missing, -torch.inf).argmax(-1))


def classes_of(shares: Tensor) -> Tensor:
    """Return the classes (...), int64, of rows (..., C) of 0 and 1; -1, which is not a class, for a row with a NaN."""
    return shares.argmax(-1).masked_fill(shares.isnan().any(-1), -1)
