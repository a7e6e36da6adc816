"""Continual attention: a window that slides over a stream, one step at a time."""

from .api import continual_attention_init, continual_attention_step, continual_nystrom_init, continual_nystrom_step
from .state import ContinualAttentionState, ContinualNystromState, StepResult, move_state, state_from_tensors, state_to_tensors

__all__ = [
    "ContinualAttentionState",
    "ContinualNystromState",
    "StepResult",
    "continual_attention_init",
    "continual_attention_step",
    "continual_nystrom_init",
    "continual_nystrom_step",
    "move_state",
    "state_from_tensors",
    "state_to_tensors",
]
