"""The dtype of weights and of likelihoods, and the modes of torch in which a training runs.

Half types can represent neither the shortest time between events nor the density of a sharp prediction."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from cmab_kernels.runtime.dtypes import state_dtype

Given = ParamSpec("Given")
Result = TypeVar("Result")


def in_own_modes(training: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return a function that trains as it would outside `no_grad`, `inference_mode` and autocast of its caller. Within
    one autocast, torch keeps the casts of old weights."""

    @wraps(training)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            return training(*args, **kwargs)

    return called


def weight_of(module: nn.Module) -> Tensor:
    """Return a tensor with the dtype and device of a module's weights. If dynamic quantisation has packed them, it is
    float32 on the CPU."""
    weight = next(module.parameters(), None)
    return torch.empty(0, device="cpu", dtype=torch.float32) if weight is None else weight


def in_single(tensor: Tensor) -> Tensor:
    """Return a floating tensor in float32, or unchanged if it is float64 or float32. A head never predicts in a half
    type."""
    return tensor.to(state_dtype(tensor.dtype))
