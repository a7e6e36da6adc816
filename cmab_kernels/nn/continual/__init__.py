"""Attention and encoders over the newest tokens of a stream; a step takes a token and returns an output."""

from .attention import ContinualAttention, ContinualNystromAttention
from .encoder import ContinualEncoder
from .layer import ContinualEncoderLayer, RetroactiveEncoderLayer
from .positional import CircularPositionalEncoding
from .window import ContinualStream, FillingWindow, RecentStream, RecentTokens, StaggeredWindow

__all__ = [
    "CircularPositionalEncoding",
    "ContinualAttention",
    "ContinualEncoder",
    "ContinualEncoderLayer",
    "ContinualNystromAttention",
    "ContinualStream",
    "FillingWindow",
    "RecentStream",
    "RecentTokens",
    "RetroactiveEncoderLayer",
    "StaggeredWindow",
]
