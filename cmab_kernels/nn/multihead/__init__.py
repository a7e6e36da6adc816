"""`torch.nn.MultiheadAttention` on the operators: the same constructor, weights and forward for three kinds of
attention."""

from .attention import Attended, MultiheadAttention
from .intention import MultiheadIntention, MultiheadSigmaIntention
from .nystrom import NystromAttention

__all__ = [
    "Attended",
    "MultiheadAttention",
    "MultiheadIntention",
    "MultiheadSigmaIntention",
    "NystromAttention",
]
