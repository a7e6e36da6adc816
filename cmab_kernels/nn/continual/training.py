"""Continual attention over a whole stream at once, with gradients. The results are those of the steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...nystrom import iterative_pinv, pinv_reference, segment_ends
from ...runtime.dtypes import default_scale, state_dtype


def attention_over_stream(
    query: Tensor, key: Tensor, value: Tensor, window: int, retroactive: bool, dropout: float = 0.0
) -> Tensor:
    """Return the outputs of exact attention after each of the tokens n, n + 1, ..., T of a stream (B, H, T, *).

    n is `window`. The shape is (B, H, T - n + 1, 1, E), for the newest query of each window. Retroactive outputs are
    (B, H, T - n + 1, n, E), for all queries of each window.
    """
    return _over_windows(_asking(query, window, retroactive), key, value, window, dropout)


def nystrom_over_stream(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    retroactive: bool,
    landmarks: tuple[Tensor, Tensor] | int,
    iterations: int,
) -> Tensor:
    """Return what `attention_over_stream` returns, for Nyström attention with the stream's landmarks at each token.

    `landmarks` are fixed landmarks, (H, m, D) each, or the number m of continual landmarks. Continual landmarks are the
    means of the m newest full segments. `iterations` is the number of iterations of the pseudo-inverse; 0 means the
    exact pseudo-inverse.

    Source: Continual Low-Rank Scaled Dot-product Attention (Carreto Picon et al.), section 3.
    """
    dtype, steps = state_dtype(key.dtype), key.shape[2] - window + 1
    queries, keys, values = (t.to(dtype) for t in (query, key, value))
    if isinstance(landmarks, int):
        ends = _segment_ends(key.shape[2], window, landmarks)
        near, far = (_sets_of_means(t, ends, landmarks) for t in (queries, keys))
        last = torch.arange(window, window + steps, device=key.device)
        held = _full_segments(last, window, landmarks) - landmarks
    else:
        near, far = (t.to(dtype).expand(key.shape[0], -1, -1, -1).unsqueeze(2) for t in landmarks)
        held = torch.zeros(steps, dtype=torch.int64, device=key.device)
    scale = default_scale(key.shape[-1])
    kernel = (scale * near @ far.mT).softmax(-1)
    inverse = iterative_pinv(kernel, iterations) if iterations else pinv_reference(kernel, 0)
    landmark_values = inverse[:, :, held] @ _over_windows(near[:, :, held], keys, values, window)
    weights = (scale * _asking(queries, window, retroactive) @ far[:, :, held].mT).softmax(-1)
    return (weights @ landmark_values).to(query.dtype)


def _asking(query: Tensor, window: int, retroactive: bool) -> Tensor:
    """Return the queries (B, H, T - n + 1, 1 or n, D) for which each window has outputs."""
    return query.unfold(2, window, 1).mT if retroactive else query[:, :, window - 1 :].unsqueeze(3)


def _over_windows(query: Tensor, key: Tensor, value: Tensor, window: int, dropout: float = 0.0) -> Tensor:
    """Return the attention (B, H, S, R, E) of queries (B, H, S, R, D) over the keys of their window.

    There are S windows with R queries each.

    A group of n windows is computed at a time, for windows of n tokens. A group has fewer than 2 n keys in all.
    """
    outs = []
    for first in range(0, query.shape[2], window):
        part = query[:, :, first : first + window]
        number, rows = part.shape[2:4]
        start = torch.arange(number, device=key.device).unsqueeze(-1)
        place = torch.arange(number + window - 1, device=key.device)
        seen = ((place >= start) & (place < start + window)).repeat_interleave(rows, 0)
        keys, values = (t[:, :, first : first + len(place)] for t in (key, value))
        out = F.scaled_dot_product_attention(part.flatten(2, 3), keys, values, attn_mask=seen, dropout_p=dropout)
        outs.append(out.unflatten(2, (number, rows)))
    return torch.cat(outs, 2)


def _segment_ends(tokens: int, window: int, landmarks: int) -> list[int]:
    """Return the token counts, up to `tokens`, at which a segment of the stream becomes full."""
    every = [first + end for first in range(0, tokens, window) for end in segment_ends(window, landmarks)]
    return [end for end in every if end <= tokens]


def _full_segments(tokens: Tensor, window: int, landmarks: int) -> Tensor:
    """Return the number of full segments after each number of `tokens`.

    It is computed on their device, because a graph for a GPU must not copy a list from the host.
    """
    size, longer = window // landmarks, window % landmarks
    rest = tokens % window
    after = rest - longer * (size + 1)  # tokens of the shorter segments
    return tokens // window * landmarks + torch.where(after < 0, rest // (size + 1), longer + after // size)


def _sets_of_means(tokens: Tensor, ends: list[int], landmarks: int) -> Tensor:
    """Return the segments' means in all sets of m consecutive segments: (B, H, segments - m + 1, m, D).

    `ends` are the ends of the segments.
    """
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    means = torch.stack([segment.mean(2) for segment in tokens[:, :, : ends[-1]].split(sizes, 2)], 2)
    return means.unfold(2, landmarks, 1).mT
