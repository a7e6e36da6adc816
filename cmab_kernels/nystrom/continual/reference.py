"""The definition of a continual step: token by token, everything is recomputed from the window.

After P tokens the window consists of the last n tokens. Continual landmarks are the means of segments of the stream.
When a segment ends with token P (`segment_ending`), its mean replaces the oldest landmark. With the landmarks after
this replacement,

    Delta V = rho(q~, K) V      phi(Delta) = rho(q~, K) 1      Z = pinv(Gamma / phi(Gamma))
    single: out = (rho(q, k~) / phi(rho(q, k~))) Z (Delta V / phi(Delta)), where q is the newest query
    retroactive:  the same for every query of the window

Exact attention is Delta V / phi(Delta) with the queries in place of the landmarks. A token costs O(n m), and every
operation is differentiable. Kernels are compared with this definition. Source: Continual Low-Rank Scaled Dot-product
Attention (Carreto Picon et al.). The updates printed in that paper contain errors (inverted terms of a sum, a missing
pseudo-inverse of kept rows, the new landmark's column subtracted). Recomputation does not need these updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...runtime.dtypes import state_dtype
from ...runtime.tracing import has_values
from ..reference import landmark_kernel, logits, pinv_reference
from .state import EXTRA_SUMS, ContinualAttentionState, ContinualNystromState, State, window_of


def row_sums(queries: Tensor, keys: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Return the sums (B, H, rows, E + 5) of queries (B, H, rows, D) over a window.

    With c the largest logit, the columns are exp(-c) Delta V, exp(-c) phi(Delta), c, the peak of exp(-c) phi(Delta),
    exp(-c) sum exp(S) |v|_1, and the peak of this sum, which is set to the largest number of the dtype.

    A kernel rounds logits in another way, so it could not subtract exactly what was added here. Because the peak is the
    largest number, the next step of a kernel recomputes the row.
    """
    scores = logits(queries, keys.to(queries.dtype), scale)
    top = scores.amax(-1, keepdim=True).detach()
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    sizes = (weights @ values.to(queries.dtype).abs().sum(-1, keepdim=True)).detach()
    peak = torch.full_like(sizes, torch.finfo(sizes.dtype).max)
    return torch.cat([weights @ values.to(queries.dtype), total, top, total.detach(), sizes, peak], dim=-1)


def row_means(sums: Tensor) -> Tensor:
    """Return the attention output Delta V / phi(Delta), (B, H, rows, E), from the sums of `row_sums`."""
    return sums[..., :-EXTRA_SUMS] / sums[..., -EXTRA_SUMS, None]


def segment_ending(position: Tensor, window: int, landmarks: int) -> Tensor:
    """Return the length (B, H) of the segment that ends after `position` (B, H) tokens of the stream; 0 if no segment
    ends there."""
    each = torch.arange(landmarks + 1, device=position.device)
    # These are 0 and `segment_ends`. They are computed, because an exporter cannot record a tensor
    # made from Python numbers.
    bounds = each * (window // landmarks) + each.clamp(max=window % landmarks)
    phase = (position - 1) % window + 1
    return ((phase[..., None] == bounds[1:]) * bounds.diff()).sum(-1)


def kept_where(absent: Tensor, before: State, out: Tensor, after: State) -> tuple[Tensor, State]:
    """Return (out, state) after a step of one token in which some rows of the batch had none.

    `out` and `after` are the step's results with any finite token in these rows, `absent` (B,) bool. The rows get the
    state that they had before the step, and outputs of NaN. Their rings need no change: the step wrote to a free row.
    """
    rows = absent[:, None, None, None]
    changed = [name for name in ("sums", "landmark_queries", "landmark_keys", "inverse") if hasattr(before, name)]
    kept = {
        name: getattr(before, name).where(rows, getattr(after, name))
        for name in changed
        if getattr(after, name).shape[2]
    }
    position = before.position.where(absent[:, None], after.position)
    return out.masked_fill(rows, math.nan), _with(after, position=position, **kept)


def nystrom_step_reference(
    state: ContinualNystromState, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, ContinualNystromState]:
    """Return (out, state) after the tokens (B, H, t, *). Single outputs: one for each token. Retroactive: the outputs
    of the window after the last token."""
    outs = []
    for tokens in zip(query.split(1, -2), key.split(1, -2), value.split(1, -2), strict=True):
        state = _advanced(state, *tokens)
        if not retroactive:
            outs.append(_nystrom_rows(state, tokens[0]))
    if not retroactive:
        return torch.cat(outs, dim=-2), state
    return _nystrom_rows(state, window_of(state.queries, state.position, state.window)), state


def _advanced(state: ContinualNystromState, *tokens: Tensor) -> ContinualNystromState:
    """Return the state after one more token. The token enters the window and may complete a landmark, and the sums are
    recomputed."""
    state = _pushed(state, *tokens)
    if not state.fixed:
        segment = segment_ending(state.position, state.window, state.sums.shape[-2])
        if not has_values(segment) or segment.any():
            longest = -(-state.window // state.sums.shape[-2])
            queries, keys = (window_of(ring, state.position, longest) for ring in (state.queries, state.keys))
            state = replaced(state, segment, queries, keys)
    keys, values = (window_of(ring, state.position, state.window) for ring in (state.keys, state.values))
    sums = row_sums(state.landmark_queries, keys, values, state.scale)
    return _with(state, sums=sums, spare=torch.empty_like(sums))


def _pushed(state: State, *tokens: Tensor) -> State:
    rows = (state.position % state.keys.shape[-2])[..., None, None]
    # The state is not sliced, because the compiler of torch 2.6 cannot trace a slice.
    rings = (
        state.queries,
        state.keys,
        state.values,
    )
    queries, keys, values = (
        ring.scatter(-2, rows.expand_as(token), token) for ring, token in zip(rings, tokens, strict=True)
    )
    return _with(state, queries=queries, keys=keys, values=values, position=state.position + 1)


def _with(state: State, **changed: Any) -> State:
    """Do the same as `state._replace`, which the compiler of torch 2.6 cannot trace."""
    return type(state)(**{name: changed.get(name, getattr(state, name)) for name in type(state)._fields})


def replaced(
    state: ContinualNystromState,
    segment: Tensor,
    newest_queries: Tensor,
    newest_keys: Tensor,
    pinv: Callable[[Tensor, int], Tensor] = pinv_reference,
) -> ContinualNystromState:
    """Return the state whose oldest landmark is replaced by the mean of the newest `segment` (B, H) tokens, with the
    new pseudo-inverse. The newest tokens (B, H, *, D) are at least as many as the longest segment has.

    Where `segment` is 0, no landmark is replaced."""
    length, ends = segment[..., None, None].clamp(min=1), segment[..., None, None] > 0
    too_old = torch.arange(-newest_keys.shape[-2], 0, device=segment.device)[:, None] < -length

    def after(old: Tensor, newest: Tensor) -> Tensor:
        newest = newest.to(old.dtype).masked_fill(too_old, 0.0)
        return old.where(~ends, torch.cat([old[..., 1:, :], newest.sum(-2, keepdim=True) / length], dim=-2))

    queries, keys = after(state.landmark_queries, newest_queries), after(state.landmark_keys, newest_keys)
    inverse = pinv(landmark_kernel(queries, keys, None, state.scale), state.pinv_iterations)
    return _with(state, landmark_queries=queries, landmark_keys=keys, inverse=inverse.where(ends, state.inverse))


def _nystrom_rows(state: ContinualNystromState, queries: Tensor) -> Tensor:
    near = logits(queries.to(state.landmark_keys.dtype), state.landmark_keys, state.scale).softmax(-1)
    return (near @ state.inverse @ row_means(state.sums)).to(queries.dtype)


def attention_step_reference(
    state: ContinualAttentionState, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, ContinualAttentionState]:
    """Do the same as `nystrom_step_reference`, for exact attention over the window; return (out, state)."""
    outs = []
    for tokens in zip(query.split(1, -2), key.split(1, -2), value.split(1, -2), strict=True):
        state = _pushed(state, *tokens)
        if not retroactive:
            outs.append(row_means(_exact_rows(state, tokens[0])))
    if not retroactive:
        none = state.sums[..., :0, :]
        return torch.cat(outs, dim=-2).to(query.dtype), _with(state, sums=none, spare=none.clone())
    sums = _exact_rows(state, window_of(state.queries, state.position, state.window))
    return row_means(sums).to(query.dtype), _with(state, sums=sums, spare=torch.empty_like(sums))


def _exact_rows(state: ContinualAttentionState, queries: Tensor) -> Tensor:
    keys, values = (window_of(ring, state.position, state.window) for ring in (state.keys, state.values))
    return row_sums(queries.to(state_dtype(queries.dtype)), keys, values, state.scale)
