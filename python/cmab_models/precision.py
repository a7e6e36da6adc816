"""The dtype of weights, and of likelihoods: half types hold neither the time between two events of the same time nor a density of a
sharp prediction."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cmab_kernels.runtime.dtypes import state_dtype

_NONE = torch.empty(0, device="cpu", dtype=torch.float32)


def weight_of(module: nn.Module) -> Tensor:
    """Return a tensor with the dtype and device of a module's weights: float32 on the CPU where dynamic quantisation has packed them."""
    return next(module.parameters(), _NONE)


def in_single(tensor: Tensor) -> Tensor:
    """Return a floating tensor in float32, or as it is in float64 and float32: what a head predicts is never in a half type."""
    return tensor.to(state_dtype(tensor.dtype))
