"""The batched regularised solve on the CPU: calls into csrc/solve, which fills the tensors that are allocated here."""

from __future__ import annotations

import torch
from torch import Tensor

from ...extension import load

_C = load()


def unsupported(gram: Tensor, rhs: Tensor) -> str | None:
    """Why this implementation cannot run these inputs, or None."""
    if gram.device.type != "cpu":
        return f"native code runs on the CPU, gram is on {gram.device}"
    if gram.dtype not in (torch.float64, torch.float32):
        return f"no native solve for {gram.dtype}"
    return None


def regularised_solve(gram: Tensor, rhs: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """(weight, info): (gram + alpha I)^-1 rhs for every matrix of a batch, and what it is worth."""
    weight = torch.empty_like(rhs, memory_format=torch.contiguous_format)
    info = torch.empty_like(alpha, dtype=torch.int32, memory_format=torch.contiguous_format)
    _C.regularised_solve(gram=gram, rhs=rhs, alpha=alpha, weight=weight, info=info)
    return weight, info
