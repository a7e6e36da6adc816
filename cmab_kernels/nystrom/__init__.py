"""Nyström attention, over whole windows and continually, and the exact continual baselines."""

from .api import Landmarks, check_pinv, choose_landmarks, iterative_pinv, nystrom_attention
from .continual import (
    EXTRA_SUMS,
    LAST_POSITION,
    OUTPUTS,
    ContinualAttentionState,
    ContinualNystromState,
    StepResult,
    check_state,
    continual_attention_init,
    continual_attention_step,
    continual_nystrom_init,
    continual_nystrom_step,
    move_state,
    state_from_tensors,
    state_to_tensors,
    unlikely_totals,
    with_sums,
)
from .reference import landmark_values_reference, logits, segment_ends

__all__ = [
    "EXTRA_SUMS",
    "LAST_POSITION",
    "OUTPUTS",
    "ContinualAttentionState",
    "ContinualNystromState",
    "Landmarks",
    "StepResult",
    "check_pinv",
    "check_state",
    "choose_landmarks",
    "continual_attention_init",
    "continual_attention_step",
    "continual_nystrom_init",
    "continual_nystrom_step",
    "iterative_pinv",
    "landmark_values_reference",
    "logits",
    "move_state",
    "nystrom_attention",
    "segment_ends",
    "state_from_tensors",
    "state_to_tensors",
    "unlikely_totals",
    "with_sums",
]
