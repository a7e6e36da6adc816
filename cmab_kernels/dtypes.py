"""The types that operators take, and the types in which they add up."""

from __future__ import annotations

import torch

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums are held in float32, or in float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
