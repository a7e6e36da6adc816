"""Constant Memory Attention Blocks, their layers and their streams."""

from .block import CMAB
from .layers import CrossAttention, FeedForward, LatentLayer, SelfAttention
from .stack import CMABStack
from .streaming import CMABRemoval, CMABUpdate
from .window import WindowStream

__all__ = [
    "CMAB",
    "CMABRemoval",
    "CMABStack",
    "CMABUpdate",
    "CrossAttention",
    "FeedForward",
    "LatentLayer",
    "SelfAttention",
    "WindowStream",
]
