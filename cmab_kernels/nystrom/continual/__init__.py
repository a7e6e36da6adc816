"""Continual attention: a window that slides over a stream, one step at a time."""

from .api import (
    OUTPUTS,
    continual_attention_init,
    continual_attention_step,
    continual_nystrom_init,
    continual_nystrom_step,
)
from .state import (
    EXTRA_SUMS,
    LAST_POSITION,
    ContinualAttentionState,
    ContinualNystromState,
    StepResult,
    check_state,
    move_state,
    state_from_tensors,
    state_to_tensors,
    unlikely_totals,
    with_sums,
)

__all__ = [
    "EXTRA_SUMS",
    "LAST_POSITION",
    "OUTPUTS",
    "ContinualAttentionState",
    "ContinualNystromState",
    "StepResult",
    "check_state",
    "continual_attention_init",
    "continual_attention_step",
    "continual_nystrom_init",
    "continual_nystrom_step",
    "move_state",
    "state_from_tensors",
    "state_to_tensors",
    "unlikely_totals",
    "with_sums",
]
