"""The choice of the largest score, which a NaN never is."""

import torch
from torch import Tensor


def largest(scores: Tensor) -> Tensor:
    """Return the index of the largest of scores (..., C), int64, and -1 where all are NaN, which `argmax` would take."""
    missing = scores.isnan()
    return torch.where(missing.all(-1), -1, scores.masked_fill(missing, -torch.inf).argmax(-1))


def classes_of(shares: Tensor) -> Tensor:
    """Return the classes (...), int64, that rows (..., C) of 0 and 1 stand for; -1, which is no class, for a row with a NaN."""
    return shares.argmax(-1).masked_fill(shares.isnan().any(-1), -1)
