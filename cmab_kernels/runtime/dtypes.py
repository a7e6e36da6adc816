"""The dtypes that operators take, and the dtypes in which they hold sums."""

from __future__ import annotations

import torch

from .tracing import traced_as_constant

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


_precision = getattr(torch._C, "_get_fp32_precision_getter", None)
"""A fast getter of `torch.backends.cuda.matmul.fp32_precision`, which itself takes ten times as long; None before torch
2.9."""


@traced_as_constant
def allows_tf32() -> bool:
    """Whether torch may multiply float32 in tf32 on a GPU."""
    return _precision("cuda", "matmul") == "tf32" if _precision else torch.backends.cuda.matmul.allow_tf32


def default_scale(width: int) -> float:
    """Return D^-0.5 for keys of width D. `torch.jit.trace` gives extents as tensors, whose roots would have torch's
    default dtype."""
    return float((width.double() if isinstance(width, torch.Tensor) else width) ** -0.5)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over inputs of `dtype`: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
