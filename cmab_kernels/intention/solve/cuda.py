"""The batched regularised solve on an NVIDIA GPU: one block of threads solves one system (csrc/solve)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.cuda_launch import CUDA, MAX_WIDTH, gpu_problem, launch
from .contract import RegularisedSolve


def unsupported(gram: Tensor, rhs: Tensor) -> str | None:
    """The reason why this implementation cannot run these inputs, as a phrase; None if it can run them."""
    if gram.device.type != "cuda":
        return f"it needs a GPU, and gram is on {gram.device}"
    if gram.dtype not in (torch.float64, torch.float32):
        return f"no CUDA kernel for {gram.dtype}"
    if gram.shape[-1] > MAX_WIDTH:
        return f"its systems have at most {MAX_WIDTH} unknowns, and gram is {gram.shape[-1]} wide"
    return gpu_problem(
        gram.device.index, "solve_shared_bytes", gram.shape[-1], rhs.shape[-1], gram.dtype == torch.float64
    )


MOST_FOR_TRITON = 64
"""The most unknowns of float32 systems that Triton solves faster.

On an H100, Triton took 37 us and this kernel 88 for 4,096 systems of 16 unknowns, 935 and 1,220 for 4,096 of 64, and
1,753 and 1,542 for 1,024 of 128 (docs/measured_gpu.md). In float64, in which Intention solves its systems, this kernel
is faster.
"""


def is_slower(gram: Tensor, rhs: Tensor) -> bool:
    """Whether Triton's kernel takes less time."""
    return gram.dtype == torch.float32 and gram.shape[-1] <= MOST_FOR_TRITON


def regularised_solve(inputs: RegularisedSolve) -> tuple[Tensor, Tensor]:
    """Return (weight, info): weight = (gram + alpha I)^-1 rhs, from the lower triangle of gram; info as in `native`."""
    gram, rhs, alpha, _ = inputs
    weight = torch.empty_like(rhs, memory_format=torch.contiguous_format)
    info = rhs.new_empty(rhs.shape[:1], dtype=torch.int32)
    launch(CUDA.regularised_solve, gram.device, gram=gram, rhs=rhs, alpha=alpha, weight=weight, info=info)
    return weight, info
