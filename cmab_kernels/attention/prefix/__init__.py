"""The attention states of all prefixes of a row of keys."""

from .api import prefix_attention_states

__all__ = ["prefix_attention_states"]
