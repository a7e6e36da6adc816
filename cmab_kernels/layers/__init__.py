"""Layers of a transformer as one call each: norm, projections, attention or feed-forward network, and residual connection."""

from .api import attention_layer, feed_forward_layer

__all__ = ["attention_layer", "feed_forward_layer"]
