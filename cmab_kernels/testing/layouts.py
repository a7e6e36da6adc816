"""Layouts: copies of a tensor with the same values at other strides and offsets in memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _offset(by: int) -> Callable[[Tensor], Tensor]:
    def layout(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.new_full((by,), math.nan), tensor.reshape(-1), tensor.new_full((7,), math.nan)])[
            by:-7
        ].view(tensor.shape)

    return layout


def _step_2(tensor: Tensor, *dims: int) -> Tensor:
    """Return a copy of `tensor` with stride 2 along those of the (negative) `dims` that it has, and NaN between its
    elements."""
    for dim in (tensor.dim() + dim for dim in dims if -dim <= tensor.dim()):
        spread = torch.stack([tensor, torch.full_like(tensor, math.nan)], dim + 1).flatten(dim, dim + 1)
        tensor = spread[(slice(None),) * dim + (slice(None, None, 2),)]
    return tensor


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() > 2 else t,
    "batch inside": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0) if t.dim() > 1 else t,
    "columns first": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "step 2": lambda t: _step_2(t, -1),
    "rows of step 2": lambda t: _step_2(t, -2),
    "flipped copy": lambda t: t.flip(-1).flip(-1) if t.dim() else t,
    **{f"offset by {by}": _offset(by) for by in (1, 2, 3)},
}
"""name -> a function that copies a floating tensor to other strides or to an offset, with NaN in the memory in
between"""


def lazily_negated(tensor: Tensor) -> Tensor:
    """Return a real tensor equal to `tensor` whose memory holds its negative: the imaginary part of a lazy conjugate.

    >>> lazily_negated(torch.tensor([1.0])).is_neg()
    True
    """
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
