"""torch's Transformer layers on the operators, and its encoder layer with Intention in place of attention."""

from .informer import InformerEncoderLayer
from .layers import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "InformerEncoderLayer",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
]
