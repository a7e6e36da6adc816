"""Stacked Constant Memory Attention Blocks in one call: their first cross-attentions share one pass over the inputs."""

from .api import block_stack
from .contract import BlockStack, BlockStackRead
from .schema import block_stack as stacked
from .schema import block_stack_op, block_stack_read_op

__all__ = ["BlockStack", "BlockStackRead", "block_stack", "block_stack_op", "block_stack_read_op", "stacked"]
