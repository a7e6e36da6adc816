"""Latent cross-attention with a mergeable log-sum-exp state."""

from .api import attention_state, latent_attention, merge_states, remove_from_state
from .prefix import prefix_attention_states
from .projected import NO_CHUNK, AfterChunk, attention_state_of_chunks, projected_attention_state
from .state import (
    AttentionState,
    Removal,
    check_mergeable,
    check_state,
    decayed,
    empty_state,
    subtract_state,
    unlikely_attention,
)

__all__ = [
    "NO_CHUNK",
    "AfterChunk",
    "AttentionState",
    "Removal",
    "attention_state",
    "attention_state_of_chunks",
    "check_mergeable",
    "check_state",
    "decayed",
    "empty_state",
    "latent_attention",
    "merge_states",
    "prefix_attention_states",
    "projected_attention_state",
    "remove_from_state",
    "subtract_state",
    "unlikely_attention",
]
