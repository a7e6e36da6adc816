"""Steps that record a gradient and have a fused backward pass, part by part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ....runtime.checks import autocasts
from ....runtime.tracing import as_row, is_observed, may_bypass_dispatcher
from ...api import iterative_pinv
from ...reference import segment_ends
from ..reference import replaced, segment_ending
from ..schema import TYPES
from ..state import (
    EXTRA_SUMS,
    KINDS,
    UNSURE,
    ContinualAttentionState,
    ContinualNystromState,
    ContinualState,
    check_state,
    window_of,
)
from .function import attached_sums, attention_step, native, nystrom_step, triton

Result = tuple[Tensor, ContinualState] | None


def recorded_step(
    state: Any, query: Tensor, key: Tensor, value: Tensor, retroactive: bool, impl: str, checked: bool
) -> Result:
    """Return (out, state) with their gradients, by the implementation `impl`. "auto" is native code on a CPU and Triton
    on a GPU. Native code checks its arguments; Triton runs only if they have been `checked`.

    Return None for a wrong argument, for which the path with checks raises an error. Also return
    None if the definition must run: for retroactive outputs of exact attention outside native code;
    for continual landmarks with an exact pseudo-inverse; under a compiler, a tracer, a dispatch
    mode, a transform, forward mode or autocast; and for subclasses of Tensor.
    """
    code = _supporting(state, query, key, value, impl, checked)
    if code is None:
        return None
    if type(state) is ContinualAttentionState:
        if retroactive and code is not native():
            return None
        with as_row("cmab::continual_attention_step"):
            return _in_parts(state, partial(attention_step, code), query, key, value, retroactive)
    with as_row("cmab::continual_nystrom_step"):
        return _in_parts(state, partial(_nystrom_part, code), query, key, value, retroactive)


def _supporting(state: Any, query: Tensor, key: Tensor, value: Tensor, impl: str, checked: bool) -> Any:
    """Return the module of the implementation that steps this state and has its gradient; None if there is none."""
    kind, tokens = type(state), (query, key, value)
    if kind not in KINDS or is_observed():
        return None
    if [Tensor if each is Parameter else each for each in (*map(type, state), *map(type, tokens))] != TYPES[kind]:
        return None
    if not may_bypass_dispatcher(*tokens, *[field for field in state if isinstance(field, Tensor)]):
        return None
    if any(token.layout != torch.strided for token in tokens) or not query.dim() == value.dim() == 4:
        return None
    if query.shape != key.shape or query.shape[:3] != value.shape[:3] or not query.shape[2] or state.window < 1:
        return None
    if state.scale.requires_grad or autocasts(key.device):
        return None
    on_cpu = key.device.type == "cpu"
    code = native() if on_cpu and impl in ("auto", "native") else None
    if checked and (impl == "triton" or (impl == "auto" and not on_cpu)) and triton() is not None:
        landmarks = (state.landmark_keys,) if kind is ContinualNystromState else ()
        code = triton() if triton().unsupported(*tokens, *landmarks) is None else None
    if code is not None and kind is ContinualNystromState and not state.fixed:
        check_state(state, kind)  # torch reads the state before native code does
        return code if state.pinv_iterations > 0 else None
    return code


def _in_parts(
    state: Any, part: Callable[..., Result], query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> Result:
    """Take some tokens at a time. For retroactive outputs, the outputs of the last part count."""
    lengths, outs = _lengths(state, query.shape[2]), []
    if len(lengths) == 1:  # splitting would cost as much as the step
        return part(state, query, key, value, retroactive)
    for i, tokens in enumerate(zip(*(t.split(lengths, 2) for t in (query, key, value)), strict=True)):
        result = part(state, *tokens, retroactive and i + 1 == len(lengths))
        if result is None:
            return None
        out, state = result
        outs.append(out)
    return outs[-1] if retroactive else torch.cat(outs, 2), state


def _nystrom_part(
    code: Any, state: ContinualNystromState, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> Result:
    sums = attached_sums(state)
    if not state.fixed:
        state, sums = _with_new_landmark(state, sums, query, key)
    return nystrom_step(code, state, sums, query, key, value, retroactive)


def _lengths(state: ContinualState, tokens: int) -> list[int]:
    """Divide the tokens into parts of at most n, such that only the first of a part ends a segment."""
    if isinstance(state, ContinualAttentionState) or state.fixed:
        starts = [*range(0, tokens, state.window)]
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
    state: ContinualNystromState, sums: Tensor, query: Tensor, key: Tensor
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
    state = replaced(state, segment, newest[0], newest[1], iterative_pinv)
    ends = (segment > 0)[..., None, None]
    last = sums[:, :, -1:].detach().clone()
    last[..., 1 - EXTRA_SUMS] = UNSURE
    return state, torch.cat([sums[:, :, 1:], last], 2).where(ends, sums)
