"""Constant Memory Attention Blocks, their layers and their streams."""

from .block import CMAB, CMABRemoval, CMABUpdate
from .layers import CrossAttention, FeedForward, LatentLayer, SelfAttention
from .stack import CMABStack

__all__ = [
    "CMAB",
    "CMABRemoval",
    "CMABStack",
    "CMABUpdate",
    "CrossAttention",
    "FeedForward",
    "LatentLayer",
    "SelfAttention",
]
