"""Layers of a transformer as one call each: norm, projections, attention or feed-forward network, and residual
connection."""

from .api import attention_layer, check_residual, feed_forward_layer
from .block import Settings, attended_blocks, differentiated_blocks, read_blocks, updated_blocks
from .contract import AttentionLayer, FeedForwardLayer
from .schema import attention, feed_forward

__all__ = [
    "AttentionLayer",
    "FeedForwardLayer",
    "Settings",
    "attended_blocks",
    "attention",
    "attention_layer",
    "check_residual",
    "differentiated_blocks",
    "feed_forward",
    "feed_forward_layer",
    "read_blocks",
    "updated_blocks",
]
