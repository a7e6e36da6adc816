"""The dtypes that operators take, and the dtypes in which they hold sums."""

from __future__ import annotations

import torch

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over inputs of `dtype`: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
