"""Launches of the continual steps: block sizes, memory, and what Triton cannot run."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ....constants import SCHEDULE
from ....dtypes import FLOATING, state_dtype
from ....tiles import padded
from ....triton_common import device_problem, on_device, triton_dtype
from ...kernels.blocks import SQUARES
from ...kernels.launch import MOST_IN_REGISTERS, MOST_LANDMARKS, products, warps
from ..state import ContinualAttentionState, ContinualNystromState, State, next_state, refuse_other_output
from .attention import _attention_step
from .nystrom import _nystrom_step

MOST_VALUES = 512
ELEMENTS = {"nystrom": 1024, "attention": 2048}
"""How many elements of the values, or of rows of sums, a program holds at a time: more spills registers (test_cubin.py)."""


def unsupported(query: Tensor, key: Tensor, value: Tensor, landmarks: Tensor | None = None) -> str | None:
    """The reason why Triton's kernels cannot run these inputs, as a phrase; None if they can. `landmarks`: (B, H, m, D), or None."""
    if key.dtype not in FLOATING:
        return f"no Triton kernel for {key.dtype}"
    if value.shape[-1] > MOST_VALUES:
        return f"its values are at most {MOST_VALUES} wide, and value is {value.shape[-1]} wide"
    if landmarks is not None and landmarks.shape[-2] > MOST_LANDMARKS:
        return f"it has at most {MOST_LANDMARKS} landmarks, and the state has {landmarks.shape[-2]}"
    return device_problem(key)


def continual_nystrom_step(
    state: ContinualNystromState, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, ContinualNystromState]:
    """Return (out, state) after t >= 1 tokens: out is (B, H, t, E), or (B, H, n, E) if retroactive."""
    after = _after(state, key.shape[2], retroactive)
    landmarks = state.landmark_keys.shape[-2]
    size = padded(landmarks)
    chosen = products(state.inverse.dtype, size, key.device)
    scratch = state.sums.new_empty((*value.shape[:2], landmarks if retroactive else 0, value.shape[-1]))
    out = value.new_empty((*value.shape[:2], state.window if retroactive else value.shape[2], value.shape[-1]))
    in_registers = landmarks * state.inverse.element_size() <= 4 * MOST_IN_REGISTERS  # float64 of 64 takes 128 KiB of shared memory
    in_blocks = 0 if in_registers or state.fixed else landmarks
    squares = state.inverse.new_empty((*value.shape[:2], SQUARES.value * in_blocks, in_blocks))
    pairs = _both(state, after, "sums", "landmark_queries", "landmark_keys", "inverse")
    with on_device(key):
        _nystrom_step(
            key.shape[0] * key.shape[1],
            *_tokens(query, key, value),
            out,
            scratch,
            squares,
            *_both(state, after, "queries", "keys", "values"),
            *pairs,
            *_positions(state, after),
            state.scale.item(),
            *_extents(state, after, key, value),
            landmarks,
            state.fixed,
            int(after.keys is not state.keys),
            RETROACTIVE=retroactive,
            ITERATIONS=state.pinv_iterations,
            SCHEDULE=SCHEDULE,
            SIZE=size,
            IN_REGISTERS=in_registers,
            PRECISION=chosen.input_precision,
            **_constants("nystrom", value.dtype, value.shape[3], landmarks),
            num_warps=warps("nystrom.forward", chosen, key.device, size),
            num_stages=1,
        )
    return out, _advanced(after, key.shape[2])


def continual_attention_step(
    state: ContinualAttentionState, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, ContinualAttentionState]:
    """Return (out, state) as `continual_nystrom_step` does, for exact attention over the window."""
    after = _after(state, key.shape[2], retroactive)
    out = value.new_empty((*value.shape[:2], state.window if retroactive else value.shape[2], value.shape[-1]))
    with on_device(key):
        _attention_step(
            key.shape[0] * key.shape[1],
            *_tokens(query, key, value),
            out,
            *_both(state, after, "queries", "keys", "values", "sums"),
            *_positions(state, after),
            state.scale.item(),
            *_extents(state, after, key, value),
            int(state.sums.shape[-2] > 0),
            int(after.keys is not state.keys),
            RETROACTIVE=retroactive,
            SCHEDULE=SCHEDULE,
            **_constants("attention", value.dtype, value.shape[3], state.window),
            num_warps=4,
            num_stages=1,
        )
    return out, _advanced(after, key.shape[2])


def _after(state: State, tokens: int, retroactive: bool) -> State:
    """The state that the step writes to: during the capture of a CUDA graph the one that it reads, else the next one."""
    if not _captures(state.keys):
        return next_state(state, tokens, retroactive)
    refuse_other_output(state, retroactive)
    return state


def _captures(tensor: Tensor) -> bool:
    """Whether a CUDA graph captures what is launched."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _tokens(*tokens: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.contiguous() for t in tokens)


def _both(state: State, after: State, *fields: str) -> list[Tensor]:
    return [getattr(one, field) for field in fields for one in (state, after)]


def _positions(state: State, after: State) -> tuple[Tensor, Tensor]:
    """The positions before and after the step, (B, H) each. On a CPU, in Triton's interpreter, a state counts in an int."""
    if isinstance(state.position, Tensor) and isinstance(after.position, Tensor):
        return state.position, after.position
    before = torch.full(state.keys.shape[:2], int(state.position), device=state.keys.device)
    return before, torch.empty_like(before)


def _advanced(after: State, tokens: int) -> State:
    return after if isinstance(after.position, Tensor) else after._replace(position=after.position + tokens)


def _extents(state: State, after: State, key: Tensor, value: Tensor) -> tuple[int, ...]:
    return key.shape[2], state.window, state.keys.shape[2], after.keys.shape[2], key.shape[3], value.shape[3]


@functools.cache
def _constants(kernel: str, dtype: torch.dtype, value_width: int, rows: int) -> dict[str, Any]:
    """Block sizes: powers of two by the width of the values, and by the number of rows of sums where there are few."""
    width = padded(value_width)
    block = min(max(ELEMENTS[kernel] // width, 4), 128)
    return {
        "WIDTH": width,
        "BLOCK_N": max(block, 16),
        "ROWS": min(block, padded(rows)),
        "LARGEST": torch.finfo(state_dtype(dtype)).max,
        "OPERAND": triton_dtype(state_dtype(dtype)),
    }
