"""Launches of the continual steps: block sizes, memory, and the inputs that Triton cannot run."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ....runtime.constants import SCHEDULE
from ....runtime.dtypes import FLOATING, state_dtype
from ....runtime.tiles import chosen_once, padded
from ....runtime.triton_launch import Kernel, device_problem, on_device, triton_dtype
from ...triton.blocks import SQUARES
from ...triton.launch import MOST_IN_REGISTERS, MOST_LANDMARKS, products, warps
from ..state import (
    ContinualAttentionState,
    ContinualNystromState,
    State,
    StepResult,
    next_state,
    refuse_other_output,
)
from .attention import _attention_step
from .backward import _step_backward
from .nystrom import _nystrom_step
from .sliding_rows import RECORD

MOST_VALUES = 512
ELEMENTS = {"nystrom": 1024, "attention": 2048, "backward": 512}
"""The number of elements of the values, or of rows of sums, that a program holds at a time; with more, registers spill
(test_cubin.py)."""


def unsupported(query: Tensor, key: Tensor, value: Tensor, landmarks: Tensor | None = None) -> str | None:
    """The reason why Triton's kernels cannot run these inputs, as a phrase; None if they can. `landmarks`: (B, H, m,
    D), or None."""
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
    return _nystrom_run(state, _after(state, key.shape[2], retroactive), query, key, value, retroactive, None)


def continual_nystrom_recorded_step(
    state: ContinualNystromState, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[StepResult[ContinualNystromState], Tensor]:
    """Return (result, history) after at most n tokens, in new memory. `history` (B, H, t m, E + 3) has the sums after
    every token, as far as the gradient reads them, and 1 where a row was recomputed."""
    (B, H, t, _), (*_, E), m = key.shape, value.shape, state.sums.shape[2]
    history = state.sums.new_empty(B, H, t * m, E + RECORD.value)
    after = next_state(state, t, retroactive)
    return StepResult(*_nystrom_run(state, after, query, key, value, retroactive, history)), history


def _nystrom_run(
    state: ContinualNystromState,
    after: ContinualNystromState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    retroactive: bool,
    history: Tensor | None,
) -> tuple[Tensor, ContinualNystromState]:
    (B, H, t, D), (*_, E), m = key.shape, value.shape, state.sums.shape[2]
    given = value.dtype, key.device, E, m, state.pinv_iterations, retroactive, history is not None
    step, in_registers = _nystrom(*given)
    unused = state.inverse  # passed for memory that this step does not use
    with on_device(key):
        step(
            B * H,
            query,
            key,
            value,
            out := value.new_empty(B, H, state.window if retroactive else t, E),
            unused.new_empty(B, H, m, E) if retroactive else unused,
            unused if in_registers or state.fixed else unused.new_empty(B, H, SQUARES.value * m, m),
            unused if history is None else history,
            *(*state[:4], *state[5:8], state.position),
            *(*after[:4], *after[5:8], after.position),
            *(query.stride(), key.stride(), value.stride()),
            *(state.scale.item(), H),
            *(t, state.window, state.keys.shape[2], after.keys.shape[2], D, E),
            m,
            state.fixed,
            int(after.keys is not state.keys),
        )
    return out, after


def continual_attention_step(
    state: ContinualAttentionState, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, ContinualAttentionState]:
    """Return (out, state) as `continual_nystrom_step` does, for exact attention over the window."""
    return _attention_run(state, _after(state, key.shape[2], retroactive), query, key, value, retroactive)


def continual_attention_recorded_step(
    state: ContinualAttentionState, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[StepResult[ContinualAttentionState], None]:
    """Return (result, None) after at most n tokens, in new memory. The gradient reads only the tokens."""
    after = next_state(state, key.shape[2], retroactive)
    return StepResult(*_attention_run(state, after, query, key, value, retroactive)), None


def _attention_run(
    state: ContinualAttentionState,
    after: ContinualAttentionState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    retroactive: bool,
) -> tuple[Tensor, ContinualAttentionState]:
    (B, H, t, D), (*_, E) = key.shape, value.shape
    step = _attention(value.dtype, E, state.window, retroactive)
    with on_device(key):
        step(
            B * H,
            query,
            key,
            value,
            out := value.new_empty(B, H, state.window if retroactive else t, E),
            *(*state[:4], state.position),
            *(*after[:4], after.position),
            *(query.stride(), key.stride(), value.stride()),
            *(state.scale.item(), H),
            *(t, state.window, state.keys.shape[2], after.keys.shape[2], D, E),
            int(state.sums.shape[2] > 0),
            int(after.keys is not state.keys),
        )
    return out, after


def step_backward(
    step: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    landmarks: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None,
    position: Tensor,
    dout: Tensor | None,
    dnew_keys: Tensor | None,
    dnew_values: Tensor | None,
    dsums: Tensor | None,
) -> list[Tensor | None]:
    """Return the gradients of query, key, value, the rings of keys and values, the landmarks and their inverse, in the
    state dtype; None where `dout` is needed and None.

    `keys` and `values` are the rings after a recorded step, `landmarks` are (sums before it, landmark queries, landmark
    keys, inverse, history), and None for exact attention. `dout` is the gradient of single outputs, and None for
    retroactive outputs. `dsums` (B, H, m, E + 5) becomes the gradient of the sums before the step.
    """
    (B, H, _, D), E, t = keys.shape, values.shape[-1], step.tokens
    wide = state_dtype(keys.dtype)
    m = 0 if dsums is None else dsums.shape[2]

    def new(rows: int, columns: int, needed: bool = True) -> Tensor | None:
        return keys.new_empty(B, H, rows, columns, dtype=wide) if needed else None

    has_output, has_landmarks = dout is not None, landmarks is not None
    made = (
        *(new(t, D, has_output), new(t, D), new(t, E), new(step.capacity, D), new(step.capacity, E)),
        dsums,
        new(m, D, has_landmarks),
        *(new(m, columns, has_landmarks and has_output) for columns in (D, m)),
    )
    with on_device(keys):
        _backward(keys.dtype, E, max(m, 1))(
            B * H,
            *(query, keys, values, *(landmarks or (None,) * 5), position, dout, dnew_keys, dnew_values),
            *made,
            *(step.scale, t, step.window, step.capacity, D, E, m),
        )
    return [*made[:5], *made[6:]]


@functools.cache
def _backward(dtype: torch.dtype, value_width: int, rows: int) -> Kernel:
    """`_step_backward` with its constants for such a state. With fused multiply-adds, threads that sum the same
    products would have sums of different bits."""
    constants = _constants(ELEMENTS["backward"], dtype, value_width, rows)
    return _step_backward.given(SIZE=padded(rows), **constants, num_warps=8, enable_fp_fusion=False)


def _after(state: State, tokens: int, retroactive: bool) -> State:
    """The state that the step writes to: the state that it reads, during the capture of a CUDA graph, and otherwise the
    next state."""
    if not _captures(state.keys):
        return next_state(state, tokens, retroactive)
    refuse_other_output(state, retroactive)
    return state


def _captures(tensor: Tensor) -> bool:
    """Whether a CUDA graph is capturing launches."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@chosen_once
def _nystrom(
    dtype: torch.dtype,
    device: torch.device,
    value_width: int,
    landmarks: int,
    iterations: int,
    retroactive: bool,
    recorded: bool,
) -> tuple[Kernel, bool]:
    """`_nystrom_step` with its constants for such a state, and whether it inverts in registers instead of memory: 64
    landmarks of float64 would take 128 KiB of shared memory."""
    size, wide = padded(landmarks), state_dtype(dtype)
    in_registers = landmarks * wide.itemsize <= 4 * MOST_IN_REGISTERS
    chosen = products(wide, size, device)
    step = _nystrom_step.given(
        dtype,
        RETROACTIVE=retroactive,
        RECORDED=recorded,
        SCHEDULE=SCHEDULE,
        ITERATIONS=iterations,
        SIZE=size,
        IN_REGISTERS=in_registers,
        PRECISION=chosen.input_precision,
        **_constants(ELEMENTS["nystrom"], dtype, value_width, landmarks),
        num_warps=8 if recorded else warps("nystrom.step", chosen, device, size),
    )
    return step, in_registers


@functools.cache
def _attention(dtype: torch.dtype, value_width: int, window: int, retroactive: bool) -> Kernel:
    """`_attention_step` with its constants for such a state. Tiles of rows of sums, with the addresses of their
    elements, do not fit in the registers of 4 warps, and in float64 only half as many fit in those of 8
    (test_cubin.py)."""
    elements = ELEMENTS["attention"] // (2 if retroactive and dtype == torch.float64 else 1)
    constants = _constants(elements, dtype, value_width, window)
    return _attention_step.given(
        dtype, RETROACTIVE=retroactive, SCHEDULE=SCHEDULE, **constants, num_warps=8 if retroactive else 4
    )


def _constants(elements: int, dtype: torch.dtype, value_width: int, rows: int) -> dict[str, Any]:
    """The options that all kernels share. Block sizes are powers of two. They depend on the width of the values, and
    on the number of rows of sums if there are few rows."""
    width = padded(value_width)
    block = min(max(elements // width, 4), 128)
    return {
        "WIDTH": width,
        "BLOCK_N": max(block, 16),
        "ROWS": min(block, padded(rows)),
        "LARGEST": torch.finfo(state_dtype(dtype)).max,
        "OPERAND": triton_dtype(state_dtype(dtype)),
        "num_stages": 1,
    }
