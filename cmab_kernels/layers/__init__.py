"""Layers of a transformer as one call each: norm, projections, attention or feed-forward network, and residual
connection."""

from .api import attention_layer, check_residual, feed_forward_layer
from .contract import AttentionLayer, FeedForwardLayer
from .schema import attention, feed_forward
from .stack import BlockStack, BlockStackRead, block_stack, block_stack_op, block_stack_read_op, stacked

__all__ = [
    "AttentionLayer",
    "BlockStack",
    "BlockStackRead",
    "FeedForwardLayer",
    "attention",
    "attention_layer",
    "block_stack",
    "block_stack_op",
    "block_stack_read_op",
    "check_residual",
    "feed_forward",
    "feed_forward_layer",
    "stacked",
]
