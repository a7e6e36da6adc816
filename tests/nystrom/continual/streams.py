"""Run streams through the continual steps, and compute the right results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

import cmab_kernels as ck


def step_of(state: Any) -> Any:
    """Return the function that steps a state."""
    return ck.continual_nystrom_step if isinstance(state, ck.ContinualNystromState) else ck.continual_attention_step


def stepped(
    state: Any, tokens: tuple[Tensor, ...], chunk: int = 1, **options: Any
) -> Iterator[tuple[int, Tensor, Any]]:
    """Yield (tokens taken so far, out, state) after each chunk."""
    taken = 0
    for parts in zip(*(t.split(chunk, dim=2) for t in tokens), strict=True):
        out, state = step_of(state)(state, *parts, **options)
        taken += parts[0].shape[2]
        yield taken, out, state


def last(state: Any, tokens: tuple[Tensor, ...], chunk: int = 1, **options: Any) -> tuple[Tensor, Any]:
    """Return (out, state) after the last chunk."""
    for _, out, new in stepped(state, tokens, chunk, **options):
        result = out, new
    return result


def window_at(stream: tuple[Tensor, ...], end: int, window: int) -> tuple[Tensor, ...]:
    return tuple(t[:, :, end - window : end] for t in stream)
