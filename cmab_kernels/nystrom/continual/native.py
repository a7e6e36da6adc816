"""The steps of continual attention on the CPU: the functions of csrc/continual, called directly.

Each function takes (state, query, key, value, retroactive) and returns a `StepResult`. A function returns None, without
having written anything, if the path with checks must decide: for an unexpected shape, dtype, device or layout, a token
that is not finite, or a tensor subclass. The masked steps also take (B,) bool: True where a row of the batch has no
token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...runtime.dtypes import FLOATING
from ...runtime.extension import load
from .state import ContinualAttentionState, ContinualNystromState, State, StepResult

_C = load()

continual_nystrom_step: Callable[[ContinualNystromState, Tensor, Tensor, Tensor, bool], StepResult | None] = (
    _C.continual_nystrom_step
)
is_sole_owner: Callable[[ContinualNystromState | ContinualAttentionState], bool] = _C.is_sole_owner
remember: Callable[[ContinualNystromState | ContinualAttentionState], None] = _C.remember
remembered: Callable[[], int] = _C.remembered
"""Remove tensors that no longer exist from the table, and return the number of tensors that a step may still write
to."""
continual_attention_step: Callable[[ContinualAttentionState, Tensor, Tensor, Tensor, bool], StepResult | None] = (
    _C.continual_attention_step
)

Masked = Callable[[State, Tensor, Tensor, Tensor, bool, Tensor], StepResult | None]
continual_nystrom_masked_step: Masked[ContinualNystromState] = _C.continual_nystrom_masked_step
continual_attention_masked_step: Masked[ContinualAttentionState] = _C.continual_attention_masked_step

Recorded = Callable[[State, Tensor, Tensor, Tensor, bool], tuple[StepResult, Any, Any, Tensor, Tensor] | None]
"""Takes at most n tokens; returns the result, and the tensors that its gradient reads: (result,
history, queries, keys, values)."""
continual_nystrom_recorded_step: Recorded[ContinualNystromState] = _C.continual_nystrom_recorded_step
continual_attention_recorded_step: Recorded[ContinualAttentionState] = _C.continual_attention_recorded_step
continual_nystrom_step_backward: Callable[..., tuple[Tensor | None, ...]] = _C.continual_nystrom_step_backward
continual_attention_step_backward: Callable[..., tuple[Tensor | None, ...]] = _C.continual_attention_step_backward


def unsupported(query: Tensor, key: Tensor, value: Tensor, landmarks: Tensor | None = None) -> str | None:
    """Return why this implementation cannot run these inputs, as a phrase; None if it can. Any number of landmarks is
    supported."""
    if key.device.type != "cpu":
        return f"native code runs on the CPU, key is on {key.device}"
    if key.dtype not in FLOATING:
        return f"no native kernel for {key.dtype}"
    return None
