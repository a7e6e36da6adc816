"""Efficient-Query Transformer Neural Processes: the points attend to each other, and targets to the points of each
layer."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from cmab_kernels import latent_attention
from cmab_kernels.nn import FeedForward, SelfAttention
from cmab_kernels.runtime.tracing import has_values

from .parts import Decoder, NormalHead, point_embedding
from .points import KeepsPoints, Points


class EQTNP(KeepsPoints):
    """A neural process whose points attend to each other, and whose targets attend to the points: one layer of the
    decoder to the embedded points, and one to the result of each layer of the encoder.

    The time for the points is quadratic in the size of the context. The time for a target is linear in it. Each
    prediction reads the context again. It has the decoder and the arguments of `LBANP`, without latents. Source: the
    baseline EQTNP of Latent Bottlenecked Attentive Neural Processes (Feng et al., ICLR 2023).

    Args:
        dim_x, dim_y, dim, num_heads, ff_dim, embedding_depth, bound_std, residual: as in `CMANP`.
        depth: layers of the decoder; the encoder has one layer less.

    >>> model = cmab_models.EQTNP(dim_x=1, dim_y=1, dim=16, num_heads=2, depth=2)
    >>> model(torch.randn(3, 50, 1), torch.randn(3, 50, 1), torch.randn(3, 7, 1)).mean.shape
    torch.Size([3, 7, 1])
    """

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        dim: int = 64,
        num_heads: int = 4,
        depth: int = 6,
        ff_dim: int | None = None,
        embedding_depth: int = 4,
        bound_std: bool = False,
        residual: str = "normed",
    ) -> None:
        super().__init__()
        ff_dim = 2 * dim if ff_dim is None else ff_dim
        self.dim_x, self.dim_y = dim_x, dim_y
        self.embedding = point_embedding(dim_x + dim_y, dim, embedding_depth)
        self.attentions = nn.ModuleList(SelfAttention(dim, num_heads, residual) for _ in range(depth - 1))
        self.feed_forwards = nn.ModuleList(FeedForward(dim, ff_dim, residual) for _ in range(depth - 1))
        self.decoder = Decoder(dim_x, dim, num_heads, ff_dim, depth, embedding_depth, residual)
        self.head = NormalHead(dim, ff_dim, dim_y, bound_std)

    def predict(self, state: Points, target_x: Tensor) -> Distribution:
        self._check(target_x, batch=self._known(state).ignored.shape[0], of="target_")
        mask = None if has_values(state.ignored) and not state.ignored.any() else state.ignored
        features = self.embedding(torch.cat([state.x, state.y], -1))
        every = [features]
        for attention, feed_forward in zip(self.attentions, self.feed_forwards, strict=True):
            features = feed_forward(_attended(cast("SelfAttention", attention), features, mask))
            every.append(features)
        result: Distribution = self.head(self.decoder(target_x, torch.stack(every), mask))
        return result


def _attended(attention: SelfAttention, features: Tensor, mask: Tensor | None) -> Tensor:
    """Return the result of a layer of self-attention that ignores points."""
    if mask is None:
        return attention(features)
    normed = attention.norm(features)
    projected = (attention.heads(part, normed) for part in (attention.query, attention.key, attention.value))
    return attention.add(features, latent_attention(*projected, key_padding_mask=mask))
