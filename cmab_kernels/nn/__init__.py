"""Modules built on the operators: attention of few queries over any number of keys, and streams that keep a state between calls."""

from .cmab import CMAB, CMABRemoval, CMABUpdate
from .cmab_stack import CMABStack
from .continual import ContinualAttention, ContinualNystromAttention
from .continual_encoder import ContinualEncoder, ContinualEncoderLayer, RetroactiveEncoderLayer
from .continual_stream import ContinualStream, FillingWindow, RecentStream, RecentTokens
from .informer import InformerEncoderLayer
from .layers import CrossAttention, FeedForward, LatentLayer, SelfAttention
from .multihead_attention import Attended, MultiheadAttention
from .multihead_intention import MultiheadIntention, MultiheadSigmaIntention
from .nystrom_attention import NystromAttention
from .positional import CircularPositionalEncoding
from .replace import replace_modules
from .replacements import Replacement, Replacements
from .stream import AttentionStream, RidgeStream
from .transformer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "CMAB",
    "Attended",
    "AttentionStream",
    "CMABRemoval",
    "CMABStack",
    "CMABUpdate",
    "CircularPositionalEncoding",
    "ContinualAttention",
    "ContinualEncoder",
    "ContinualEncoderLayer",
    "ContinualNystromAttention",
    "ContinualStream",
    "CrossAttention",
    "FeedForward",
    "FillingWindow",
    "InformerEncoderLayer",
    "LatentLayer",
    "MultiheadAttention",
    "MultiheadIntention",
    "MultiheadSigmaIntention",
    "NystromAttention",
    "RecentStream",
    "RecentTokens",
    "Replacement",
    "Replacements",
    "RetroactiveEncoderLayer",
    "RidgeStream",
    "SelfAttention",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "replace_modules",
]
