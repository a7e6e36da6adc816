"""The dtype of likelihoods: half types hold neither the time between two events of the same time nor a density of a sharp prediction."""

from __future__ import annotations

from torch import Tensor

from cmab_kernels.dtypes import state_dtype


def in_single(tensor: Tensor) -> Tensor:
    """Return a floating tensor in float32, or as it is in float64 and float32: what a head predicts is never in a half type."""
    return tensor.to(state_dtype(tensor.dtype))
