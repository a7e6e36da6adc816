"""The batched regularised solve on the CPU: calls into csrc, which gets addresses and strides and fills what is allocated here."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dtypes import NATIVE_DTYPES
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
    sizes = (NATIVE_DTYPES[gram.dtype], *rhs.shape, torch.get_num_threads())
    operands = (gram.data_ptr(), gram.stride(), rhs.data_ptr(), rhs.stride(), alpha.data_ptr(), alpha.stride(0))
    _C.regularised_solve(sizes, *operands, weight.data_ptr(), info.data_ptr())
    return weight, info
