"""Attention that never stores what it has read: fused kernels with a mergeable, streaming state."""

from .attention import (
    AttentionState,
    Removal,
    attention_state,
    empty_state,
    latent_attention,
    merge_states,
    remove_from_state,
)
from .backends import Explanation, explain, use_impl

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "Explanation",
    "Removal",
    "attention_state",
    "empty_state",
    "explain",
    "latent_attention",
    "merge_states",
    "remove_from_state",
    "use_impl",
]
