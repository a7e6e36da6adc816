"""Steps of continual attention on an NVIDIA GPU: one kernel launch per step, one thread block per head
(csrc/continual).

The kernels read the position in the stream from GPU memory, so that a step does not synchronise. While a CUDA graph is
captured, the state is advanced in place, because a replay reads and writes the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...runtime.cuda_launch import CUDA, gpu_problem, launch
from ...runtime.dtypes import FLOATING
from .state import ContinualAttentionState, ContinualNystromState, State, next_state, refuse_other_output


def unsupported(query: Tensor, key: Tensor, value: Tensor, landmarks: Tensor | None = None) -> str | None:
    """The reason why this implementation cannot run these inputs, as a phrase; None if it can.

    `landmarks`: (B, H, m, D), or None.
    """
    if key.device.type != "cuda":
        return f"it needs a GPU, and key is on {key.device}"
    if key.dtype not in FLOATING:
        return f"no CUDA kernel for {key.dtype}"
    if value.shape[-1] > CUDA.MAX_VALUE_WIDTH:
        return f"its values are at most {CUDA.MAX_VALUE_WIDTH} wide, and value is {value.shape[-1]} wide"
    if landmarks is not None and landmarks.shape[-2] > CUDA.MAX_LANDMARKS:
        return f"it has at most {CUDA.MAX_LANDMARKS} landmarks, and the state has {landmarks.shape[-2]}"
    number = 0 if landmarks is None else landmarks.shape[-2]
    return gpu_problem(key.device.index, "step_shared_bytes", value.shape[-1], number, key.dtype == torch.float64)


def continual_nystrom_step(
    state: ContinualNystromState, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, ContinualNystromState]:
    """Return (out, state) after t >= 1 tokens: out is (B, H, t, E), or (B, H, n, E) if retroactive."""
    return _step(CUDA.nystrom_step, state, query, key, value, retroactive)


def continual_attention_step(
    state: ContinualAttentionState, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, ContinualAttentionState]:
    """Return (out, state) as `continual_nystrom_step` does, for exact attention over the window."""
    if torch.cuda.is_current_stream_capturing():
        refuse_other_output(state, retroactive)
    return _step(CUDA.attention_step, state, query, key, value, retroactive)


def _step(
    kernel: Callable[..., None], state: State, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, State]:
    """Return (out, state); a captured step writes in place."""
    tokens = key.shape[2]
    after = state if torch.cuda.is_current_stream_capturing() else next_state(state, tokens, retroactive)
    out = query.new_empty(*query.shape[:2], state.window if retroactive else tokens, value.shape[-1])
    launch(
        kernel,
        key.device,
        state=state,
        after=after,
        query=query,
        key=key,
        value=value,
        retroactive=retroactive,
        out=out,
    )
    return out, after
