"""Modules built on the operators: attention of few queries over any number of keys, and streams that keep a state
between calls."""

import sys
from importlib import import_module

from .cmab import (
    CMAB,
    CMABRemoval,
    CMABStack,
    CMABUpdate,
    CrossAttention,
    FeedForward,
    LatentLayer,
    SelfAttention,
    WindowStream,
)
from .continual import (
    CircularPositionalEncoding,
    ContinualAttention,
    ContinualEncoder,
    ContinualEncoderLayer,
    ContinualNystromAttention,
    ContinualStream,
    FillingWindow,
    RecentStream,
    RecentTokens,
    RetroactiveEncoderLayer,
    StaggeredWindow,
)
from .multihead import Attended, MultiheadAttention, MultiheadIntention, MultiheadSigmaIntention, NystromAttention
from .replace import Replacement, Replacements, replace_modules
from .stream import AttentionStream, RidgeStream
from .transformer import InformerEncoderLayer, TransformerDecoderLayer, TransformerEncoderLayer

_MOVED = {
    "cmab_stack": "cmab.stack",
    "continual_encoder": "continual.encoder",
    "continual_stream": "continual.window",
    "informer": "transformer.informer",
    "layers": "cmab.layers",
    "multihead_attention": "multihead.attention",
    "multihead_intention": "multihead.intention",
    "nystrom_attention": "multihead.nystrom",
    "positional": "continual.positional",
}
"""Import path of a module in version 0.1.0 -> its current path. Pickles of version 0.1.0 name the
old path."""
sys.modules.update({f"{__name__}.{old}": import_module(f"{__name__}.{new}") for old, new in _MOVED.items()})

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
    "StaggeredWindow",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "WindowStream",
    "replace_modules",
]
