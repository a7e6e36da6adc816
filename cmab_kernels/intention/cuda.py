"""Sums over rows and the solve of their system on an NVIDIA GPU, fused in one CUDA kernel (csrc/intention)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.cuda_launch import CUDA, MAX_WIDTH, gpu_problem, launch
from ..runtime.dtypes import FLOATING
from .solve.contract import RidgeSolve

MOST_WORKSPACE = 2**25
"""The most float64 partial sums held at a time (256 MiB), unless a single matrix needs more."""


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """The reason why this implementation cannot run these inputs, as a phrase; None if it can run them."""
    if key.device.type != "cuda":
        return f"it needs a GPU, and key is on {key.device}"
    if key.dtype not in FLOATING:
        return f"no CUDA kernel for {key.dtype}"
    if key.shape[-1] > MAX_WIDTH:
        return f"its keys are at most {MAX_WIDTH} wide, and key is {key.shape[-1]} wide"
    return gpu_problem(
        key.device.index, "ridge_shared_bytes", key.shape[-1], value.shape[-1], key.dtype == torch.float64
    )


def is_slower(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether Triton's sums, followed by a solve, take less time than this kernel, whose sums use no tensor cores.

    On an H100 this was so at every timed shape (docs/measured_gpu.md), from 1,024 sets of 256 keys of width 16 to one
    set of a million keys of width 64.
    """
    return True


def ridge_solve(inputs: RidgeSolve) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weight, gram, info): weight = (gram + alpha I)^-1 K'WV in float64, with gram = K'WK."""
    key, value, weights, key_padding_mask, alpha, _ = inputs
    (batch, heads, _, width), value_width = key.shape, value.shape[-1]
    together, workspace_size, ticket_count = CUDA.ridge_needs(key=key, value=value, most_workspace=MOST_WORKSPACE)
    weight = key.new_empty((batch, heads, width, value_width), dtype=torch.float64)
    gram = key.new_empty((batch, heads, width, width), dtype=torch.float64)
    info = key.new_empty((batch, heads), dtype=torch.int32)
    launch(
        CUDA.ridge_solve,
        key.device,
        key=key,
        value=value,
        weights=weights,
        key_padding_mask=key_padding_mask,
        alpha=alpha,
        weight=weight,
        gram=gram,
        info=info,
        workspace=key.new_empty(workspace_size, dtype=torch.float64),
        tickets=key.new_zeros(ticket_count, dtype=torch.int32),
        together=together,
    )
    return weight, gram, info
