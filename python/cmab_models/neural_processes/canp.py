"""Conditional Attentive Neural Processes."""

from __future__ import annotations

from .family import FromPair, ValueDecoder, attentive_pair
from .points import KeepsPoints


class CANP(FromPair, KeepsPoints):
    """A neural process without a latent variable, whose targets attend to the points.

    Time is quadratic in the context, because the points attend to each other. Standard deviations are at least 0.1.
    Source: the baseline CANP of the published tables, in the form of the published code (`family`).

    Args:
        dim_x, dim_y: columns of x and y.
        dim: width of all layers.
        num_heads: a divisor of dim.
        encoder_depth: linear layers of a point; two of them are replaced by self-attention.
        query_depth: linear layers of the coordinates of queries and keys, at least 2.
        pooled_depth: linear layers after the mean over the points, at least 2.
        decoder_depth: linear layers of the decoder, at least 2.

    >>> model = cmab_models.CANP(dim_x=1, dim_y=1, dim=32)
    >>> model(torch.randn(3, 50, 1), torch.randn(3, 50, 1), torch.randn(3, 7, 1)).mean.shape
    torch.Size([3, 7, 1])
    """

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        dim: int = 128,
        num_heads: int = 8,
        encoder_depth: int = 4,
        query_depth: int = 2,
        pooled_depth: int = 2,
        decoder_depth: int = 3,
    ) -> None:
        super().__init__()
        self.dim_x, self.dim_y = dim_x, dim_y
        self.encoders = attentive_pair(dim_x, dim_y, dim, encoder_depth, query_depth, pooled_depth, num_heads)
        self.decoder = ValueDecoder(2 * dim, dim, dim_x, dim_y, decoder_depth)
