"""Modules built on the operators: few queries, any number of keys, and a state that survives between calls."""

from .cmab import CMAB, CMABRemoval, CMABUpdate
from .informer import InformerEncoderLayer
from .multihead_attention import Attended, MultiheadAttention
from .multihead_intention import MultiheadIntention, MultiheadSigmaIntention
from .replace import replace_modules
from .stream import AttentionStream, RidgeStream

__all__ = [
    "CMAB",
    "Attended",
    "AttentionStream",
    "CMABRemoval",
    "CMABUpdate",
    "InformerEncoderLayer",
    "MultiheadAttention",
    "MultiheadIntention",
    "MultiheadSigmaIntention",
    "RidgeStream",
    "replace_modules",
]
