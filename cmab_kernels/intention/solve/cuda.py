"""The batched regularised solve on an NVIDIA GPU: one block of threads solves one system (csrc/solve)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.cuda_launch import CUDA, MAX_ORDER, gpu_problem, launch
from .contract import RegularisedSolve


def unsupported(gram: Tensor, rhs: Tensor) -> str | None:
    """The reason why this implementation cannot run these inputs, as a phrase; None if it can run them."""
    if gram.device.type != "cuda":
        return f"it needs a GPU, and gram is on {gram.device}"
    if gram.dtype not in (torch.float64, torch.float32):
        return f"no CUDA kernel for {gram.dtype}"
    if gram.shape[-1] > MAX_ORDER:
        return f"its systems have at most {MAX_ORDER} unknowns, and gram is {gram.shape[-1]} wide"
    return gpu_problem(
        gram.device.index, "solve_shared_bytes", gram.shape[-1], rhs.shape[-1], gram.dtype == torch.float64
    )


def regularised_solve(inputs: RegularisedSolve) -> tuple[Tensor, Tensor]:
    """Return (weight, info): weight = (gram + alpha I)^-1 rhs, from the lower triangle of gram; info as in `native`."""
    gram, rhs, alpha, _ = inputs
    weight = torch.empty_like(rhs, memory_format=torch.contiguous_format)
    info = rhs.new_empty(rhs.shape[:1], dtype=torch.int32)
    launch(CUDA.regularised_solve, gram.device, gram=gram, rhs=rhs, alpha=alpha, weight=weight, info=info)
    return weight, info
