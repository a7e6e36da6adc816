"""Steps of continual attention on an NVIDIA GPU: one launch each, a block a head (csrc/continual).

The kernels read how far a stream is from the GPU's memory, so a step waits for nothing, and a captured one streams on when it is replayed:
while a CUDA graph captures, a state is advanced in place, since a replay finds the next state where it found the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...checks import wrong
from ...cuda_launch import CUDA, gpu_problem, operand, stream_of
from ...dtypes import NATIVE_DTYPES
from ...extension import load
from .state import ContinualAttentionState, ContinualNystromState, State

NATIVE = load()


def unsupported(query: Tensor, key: Tensor, value: Tensor, landmarks: Tensor | None = None) -> str | None:
    """Why this implementation cannot run these inputs, or None. `landmarks`: a tensor with as many rows as there are."""
    if key.device.type != "cuda":
        return f"it needs a GPU, and key is on {key.device}"
    if key.dtype not in NATIVE_DTYPES:
        return f"no CUDA kernel for {key.dtype}"
    if value.shape[-1] > CUDA.MAX_VALUE_WIDTH:
        return f"its values are at most {CUDA.MAX_VALUE_WIDTH} wide, and value is {value.shape[-1]} wide"
    if landmarks is not None and landmarks.shape[-2] > CUDA.MAX_LANDMARKS:
        return f"it has at most {CUDA.MAX_LANDMARKS} landmarks, and the state has {landmarks.shape[-2]}"
    return gpu_problem(key.device.index)


def continual_nystrom_step(
    state: ContinualNystromState, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, ContinualNystromState]:
    """(out, state) after t >= 1 tokens: out (B, H, t, E), or (B, H, n, E) if retroactive."""
    landmarks = state.landmark_keys.shape[-2]
    after = state
    if not torch.cuda.is_current_stream_capturing():
        small: dict[str, Any] = {name: torch.empty_like(getattr(state, name)) for name in ("landmark_queries", "landmark_keys", "inverse")}
        after = _next(state, key.shape[2], landmarks)._replace(**small)
    out = _out(query, state, retroactive)
    CUDA.nystrom_step(
        [
            *_numbers(state, after, query, key, value, retroactive, out, True),
            *(landmarks, state.pinv_iterations, state.fixed),
            *_renewal(state.landmark_queries, after.landmark_queries),
            *_renewal(state.landmark_keys, after.landmark_keys),
            *_renewal(state.inverse, after.inverse),
        ]
    )
    return out, after


def continual_attention_step(
    state: ContinualAttentionState, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, ContinualAttentionState]:
    """As `continual_nystrom_step`, of exact attention."""
    known = state.sums.shape[-2] > 0
    after = state
    if not torch.cuda.is_current_stream_capturing():
        after = _next(state, key.shape[2], state.window if retroactive else 0)
    elif known != retroactive:
        kinds = ("single", "retroactive")
        allowed = "a captured step keeps the state's memory; take a step of this kind before the capture"
        raise RuntimeError(wrong("output", f"is {kinds[retroactive]!r}, and the state is that of {kinds[known]} steps", allowed))
    out = _out(query, state, retroactive)
    CUDA.attention_step(_numbers(state, after, query, key, value, retroactive, out, known))
    return out, after


def _next(state: State, tokens: int, rows: int) -> State:
    """Where the step goes: the state's own rings and its spare sums if nobody else has them and they fit, else new memory."""
    sole = NATIVE.is_sole_owner(state)
    batch, heads, capacity, _ = state.keys.shape
    changes: dict[str, Any] = {"position": torch.empty_like(state.position), "sums": state.spare, "spare": state.sums}  # type: ignore[arg-type]  # a tensor on a GPU
    if not sole or state.sums.shape[2] != rows:
        changes |= {name: state.sums.new_empty(batch, heads, rows, state.sums.shape[3]) for name in ("sums", "spare")}
    if capacity < state.window + tokens:
        sole, capacity = False, state.window + min(tokens, state.window)
    if not sole:
        for name in ("queries", "keys", "values"):
            ring: Tensor = getattr(state, name)
            changes[name] = ring.new_empty(batch, heads, capacity, ring.shape[3])
    return state._replace(**changes)


def _out(query: Tensor, state: State, retroactive: bool) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, heads, state.window if retroactive else tokens, state.values.shape[-1])


def _renewal(before: Tensor, after: Tensor) -> tuple[int, int]:
    return before.data_ptr(), after.data_ptr()


def _numbers(
    state: State, after: State, query: Tensor, key: Tensor, value: Tensor, retroactive: bool, out: Tensor, known: bool
) -> list[int]:
    """What both steps are told: csrc/calls.cuh reads it in this order."""
    return [
        *stream_of(key),
        *(NATIVE_DTYPES[key.dtype], *query.shape[:3], state.window, query.shape[3], value.shape[3]),
        *(retroactive, state.scale.data_ptr()),
        *operand(query, 4),
        *operand(key, 4),
        *operand(value, 4),
        *(state.keys.shape[2], after.keys.shape[2]),
        *_renewal(state.queries, after.queries),
        *_renewal(state.keys, after.keys),
        *_renewal(state.values, after.values),
        *_renewal(state.sums if known else after.sums, after.sums),
        *_renewal(state.position, after.position),  # type: ignore[arg-type]  # tensors on a GPU
        *(out.data_ptr(), known),
    ]
