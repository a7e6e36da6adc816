"""The batched regularised solve on the CPU: calls into csrc/solve, which fills the tensors that are allocated here."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.extension import load
from .contract import RegularisedSolve

_C = load()


def unsupported(gram: Tensor, rhs: Tensor) -> str | None:
    """The reason why this implementation cannot run these inputs, as a phrase; None if it can run them."""
    if gram.device.type != "cpu":
        return f"native code runs on the CPU, gram is on {gram.device}"
    if gram.dtype not in (torch.float64, torch.float32):
        return f"no native solve for {gram.dtype}"
    return None


def regularised_solve(inputs: RegularisedSolve) -> tuple[Tensor, Tensor]:
    """Return (weight, info), where weight = (gram + alpha I)^-1 rhs for each matrix of a batch.

    `info` is 0 for a sound solution, 1 for a matrix that is not positive definite, 2 for an ill-conditioned matrix.
    """
    gram, rhs, alpha, _ = inputs
    weight = torch.empty_like(rhs, memory_format=torch.contiguous_format)
    info = torch.empty_like(alpha, dtype=torch.int32, memory_format=torch.contiguous_format)
    _C.regularised_solve(gram=gram, rhs=rhs, alpha=alpha, weight=weight, info=info)
    return weight, info
