"""Latent cross-attention over inputs whose keys and values are projected inside, and never stored in full."""

from .api import NO_CHUNK, AfterChunk, attention_state_of_chunks, projected_attention_state

__all__ = [
    "NO_CHUNK",
    "AfterChunk",
    "attention_state_of_chunks",
    "projected_attention_state",
]
