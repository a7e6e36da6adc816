"""Latent cross-attention over inputs whose keys and values are projected inside, and never written."""

from .api import projected_attention_state

__all__ = ["projected_attention_state"]
