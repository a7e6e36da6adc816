"""Models that keep all points of their context."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cmab_kernels.runtime.checks import mismatch

from .base import NeuralProcess, without_masked


class Points(NamedTuple):
    """The points of a context, and a mask of the points that are ignored."""

    x: Tensor
    """(B, N, dim_x), 0 where a point was masked"""
    y: Tensor
    """(B, N, dim_y)"""
    ignored: Tensor
    """(B, N) bool"""


class KeepsPoints(NeuralProcess):
    """Base class of models whose state is the context itself: memory and time of `predict` grow with it."""

    state_type = Points

    def condition(self, x: Tensor, y: Tensor, state: Points | None = None, mask: Tensor | None = None) -> Points:
        self._check(x, y, mask=mask, batch=None if state is None else self._known(state).ignored.shape[0], values=False)
        ignored = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        new = Points(*without_masked(x, y, mask), ignored)
        if state is None:
            return Points(*(part.clone() for part in new))  # the caller may change its own tensors
        return Points(*(torch.cat(parts, 1) for parts in zip(state, new, strict=True)))

    def forget(self, state: Points, x: Tensor, y: Tensor) -> Points:
        """Return the state without the points x, y; `ValueError` for a point that is not part of it."""
        self._check(x, y, batch=self._known(state).ignored.shape[0])
        ignored = state.ignored.clone()
        for i in range(x.shape[1]):
            same = (state.x == x[:, i : i + 1]).all(-1) & (state.y == y[:, i : i + 1]).all(-1) & ~ignored
            if not same.any(1).all():
                raise ValueError(mismatch("x, y", f"point {i}, which is not part of the state", "points of the state"))
            ignored |= same & (same.cumsum(1) == 1)
        return state._replace(ignored=ignored)
