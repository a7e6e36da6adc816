"""The dtype of weights and of likelihoods.

Half types can represent neither the shortest time between events nor the density of a sharp prediction."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cmab_kernels.runtime.dtypes import state_dtype


def weight_of(module: nn.Module) -> Tensor:
    """Return a tensor with the dtype and device of a module's weights. If dynamic quantisation has packed them, it is
    float32 on the CPU."""
    weight = next(module.parameters(), None)
    return torch.empty(0, device="cpu", dtype=torch.float32) if weight is None else weight


def in_single(tensor: Tensor) -> Tensor:
    """Return a floating tensor in float32, or unchanged if it is float64 or float32. A head never predicts in a half
    type."""
    return tensor.to(state_dtype(tensor.dtype))
