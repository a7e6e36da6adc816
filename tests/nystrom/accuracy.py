"""The formulas once more, dense, in the precision that they are given; and streams for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import cmab_kernels as ck

from ..attention.accuracy import LAWS, bound, row_error

__all__ = ["LAWS", "STREAMS", "bound", "dense", "dense_pinv", "last", "means", "row_error", "stepped", "window_at"]


def means(tokens: Tensor, segments: int, mask: Tensor | None = None) -> Tensor:
    """(B, H, m, D), one segment after the other; 0 for one without tokens."""
    size, longer = divmod(tokens.shape[2], segments)
    start, found = 0, []
    for j in range(segments):
        end = start + size + (j < longer)
        present = torch.ones(tokens.shape[0], end - start, dtype=torch.bool) if mask is None else ~mask[:, start:end]
        kept = torch.where(present[:, None, :, None], tokens[:, :, start:end], 0)
        found.append(kept.sum(2) / present.sum(1).clamp(min=1)[:, None, None])
        start = end
    return torch.stack(found, dim=2).to(tokens.dtype)


def dense_pinv(matrix: Tensor, iterations: int) -> Tensor:
    """One matrix after the other."""
    if matrix.dim() > 2:
        return torch.stack([dense_pinv(part, iterations) for part in matrix]) if matrix.shape[0] else matrix
    if not matrix.any():
        return torch.zeros_like(matrix.mT)
    z = matrix.mT / (matrix.abs().sum(0).max() * matrix.abs().sum(1).max())
    one = torch.eye(len(matrix), dtype=matrix.dtype)
    for _ in range(iterations):
        z = 0.25 * z @ (13 * one - matrix @ z @ (15 * one - matrix @ z @ (7 * one - matrix @ z)))
    return z


def dense(
    query: Tensor, key: Tensor, value: Tensor, landmarks: tuple[Tensor, Tensor], iterations: int = 6, scale: float | None = None
) -> Tensor:
    """Three softmaxes and a pseudo-inverse; 0 iterations: the exact one."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    near, far = landmarks
    gamma = (scale * near @ far.mT).softmax(-1)
    inverse = dense_pinv(gamma, iterations) if iterations else torch.linalg.pinv(gamma)
    return (scale * query @ far.mT).softmax(-1) @ (inverse @ ((scale * near @ key.mT).softmax(-1) @ value))


STREAMS: dict[str, Callable[[int], Tensor]] = {
    "normal": lambda length: torch.ones(length),
    "ten times": lambda length: torch.full((length,), 10.0),
    "spikes of 20": lambda length: 1 + 19.0 * (torch.arange(length) % 50 == 49),
    "spikes of 40": lambda length: 1 + 39.0 * (torch.arange(length) % 70 == 69),
}
"""The size of each key of a stream, with queries of 1: logits N(0, 1), N(0, 10^2), and N(0, 1) with rare spikes."""


def stepped(state: Any, tokens: tuple[Tensor, ...], chunk: int = 1, **options: Any) -> Iterator[tuple[int, Tensor, Any]]:
    """(tokens taken of these, out, state) after each chunk."""
    step = ck.continual_nystrom_step if isinstance(state, ck.ContinualNystromState) else ck.continual_attention_step
    taken = 0
    for parts in zip(*(t.split(chunk, dim=2) for t in tokens), strict=True):
        out, state = step(state, *parts, **options)
        taken += parts[0].shape[2]
        yield taken, out, state


def last(state: Any, tokens: tuple[Tensor, ...], chunk: int = 1, **options: Any) -> tuple[Tensor, Any]:
    """(out, state) after all of them."""
    for _, out, new in stepped(state, tokens, chunk, **options):
        result = out, new
    return result


def window_at(stream: tuple[Tensor, ...], end: int, window: int) -> tuple[Tensor, ...]:
    return tuple(t[:, :, end - window : end] for t in stream)
