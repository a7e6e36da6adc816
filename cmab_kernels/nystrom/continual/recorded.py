"""Steps that record a gradient, on the CPU: of native code and of other operators, which have fused backward passes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...attention import latent_attention
from ...runtime.checks import autocasts, refuse_not_finite
from ...runtime.tracing import as_row, is_observed, may_bypass_dispatcher
from ..api import iterative_pinv
from ..reference import segment_ends
from .gradient import attached_sums, differentiable_step, native
from .reference import pushed, replaced, row_means, segment_ending
from .state import ContinualAttentionState, ContinualNystromState, ContinualState, window_of

Result = tuple[Tensor, ContinualNystromState]


def recorded_step(
    state: Any, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, ContinualState] | None:
    """Return (out, state) with their gradients.

    Return None if the path with checks must decide, or the definition must run: for a wrong argument, under a
    compiler, a tracer, a dispatch mode or a transform, in forward mode, under autocast, and for subclasses of Tensor.
    """
    if not _is_supported(state, query, key, value):
        return None
    with as_row("cmab::continual_nystrom_step"):
        result = _nystrom(state, query, key, value)
        if result is None or not retroactive:
            return result
        return _window_rows(result[1]), result[1]


def _is_supported(state: Any, *tokens: Tensor) -> bool:
    if type(state) is not ContinualNystromState or native() is None or is_observed():
        return False
    if not may_bypass_dispatcher(*tokens, *[field for field in state if isinstance(field, Tensor)]):
        return False
    query, key, value = tokens
    if not state.fixed and not state.pinv_iterations:
        return False
    same = query.dim() == value.dim() == 4 and query.shape == key.shape and query.shape[:3] == value.shape[:3]
    return same and key.device.type == "cpu" and not state.scale.requires_grad and not autocasts(key.device)


def _nystrom(state: ContinualNystromState, query: Tensor, key: Tensor, value: Tensor) -> Result | None:
    lengths = _lengths(state, query.shape[2])
    outs = []
    for tokens in zip(*(token.split(lengths, 2) for token in (query, key, value)), strict=True):
        sums = attached_sums(state)
        if not state.fixed:
            state, sums = _with_new_landmark(state, sums, *tokens)
        result = differentiable_step(state, sums, *tokens)
        if result is None:
            return None
        out, state = result
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2), state


def _lengths(state: ContinualNystromState, tokens: int) -> list[int]:
    """Divide the tokens into at most n at a time, such that only the first of them ends a segment."""
    if state.fixed:
        starts = range(0, tokens, state.window)
    else:
        ends = _segment_ends(state.window, state.sums.shape[2])
        positions = set(state.position.flatten().tolist())
        starts = [i for i in range(tokens) if not i or any((p + i) % state.window in ends for p in positions)]
    return [end - start for start, end in zip(starts, [*starts[1:], tokens], strict=True)]


@functools.lru_cache(maxsize=64)
def _segment_ends(window: int, landmarks: int) -> frozenset[int]:
    """Return the numbers of the tokens of a window, from 0, with which a segment ends."""
    return frozenset(end - 1 for end in segment_ends(window, landmarks))


def _with_new_landmark(
    state: ContinualNystromState, sums: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[ContinualNystromState, Tensor]:
    """Return the state and its sums with the landmark that the first of the tokens completes. The step then recomputes
    the row of the new landmark."""
    segment = segment_ending(state.position + 1, state.window, sums.shape[2])
    if not segment.any():
        return state, sums
    longest = -(-state.window // sums.shape[2])
    newest = [
        torch.cat([window_of(ring, state.position, longest - 1), token[:, :, :1]], 2)
        for ring, token in ((state.queries, query), (state.keys, key))
    ]
    state = replaced(state, segment, *newest, pinv=iterative_pinv)
    ends = (segment > 0)[..., None, None]
    last = sums[:, :, -1:].detach().clone()
    last[..., -1] = torch.finfo(sums.dtype).max
    return state, torch.cat([sums[:, :, 1:], last], 2).where(ends, sums)


def _window_rows(state: ContinualNystromState) -> Tensor:
    """Return the outputs of all queries of the window."""
    queries = window_of(state.queries, state.position, state.window)
    values = state.inverse @ row_means(state.sums)
    wide = queries.to(values.dtype)
    return latent_attention(wide, state.landmark_keys, values, scale=float(state.scale)).to(queries.dtype)


def recorded_attention(
    state: ContinualAttentionState, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ContinualAttentionState]:
    """Return the same for single outputs of exact attention. The arguments have been checked."""
    refuse_not_finite(query=query, key=key, value=value)
    outs = []
    for tokens in zip(query.split(1, 2), key.split(1, 2), value.split(1, 2), strict=True):
        state = pushed(state, *tokens)
        keys, values = (window_of(ring, state.position, state.window) for ring in (state.keys, state.values))
        outs.append(latent_attention(tokens[0], keys, values, scale=float(state.scale)))
    none = state.sums[:, :, :0]
    return torch.cat(outs, 2), state._replace(sums=none, spare=none.clone())
