"""Nyström attention, over whole windows and continually, and the exact continual baselines."""

from .api import iterative_pinv, nystrom_attention
from .continual import (
    ContinualAttentionState,
    ContinualNystromState,
    StepResult,
    continual_attention_init,
    continual_attention_step,
    continual_nystrom_init,
    continual_nystrom_step,
    move_state,
    state_from_tensors,
    state_to_tensors,
)

__all__ = [
    "ContinualAttentionState",
    "ContinualNystromState",
    "StepResult",
    "continual_attention_init",
    "continual_attention_step",
    "continual_nystrom_init",
    "continual_nystrom_step",
    "iterative_pinv",
    "move_state",
    "nystrom_attention",
    "state_from_tensors",
    "state_to_tensors",
]
