"""Modules built on the operators: few queries, any number of keys, and a state that survives between calls."""

from .cmab import CMAB, CMABRemoval, CMABUpdate
from .multihead_attention import Attended, MultiheadAttention
from .replace import replace_modules
from .stream import AttentionStream

__all__ = [
    "CMAB",
    "Attended",
    "AttentionStream",
    "CMABRemoval",
    "CMABUpdate",
    "MultiheadAttention",
    "replace_modules",
]
