"""Latent cross-attention with a mergeable log-sum-exp state."""

from .api import attention_state, latent_attention, merge_states, remove_from_state
from .prefix import prefix_attention_states
from .projected import projected_attention_state
from .state import AttentionState, Removal, empty_state

__all__ = [
    "AttentionState",
    "Removal",
    "attention_state",
    "empty_state",
    "latent_attention",
    "merge_states",
    "prefix_attention_states",
    "projected_attention_state",
    "remove_from_state",
]
