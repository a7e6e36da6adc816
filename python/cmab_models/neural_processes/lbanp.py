"""Latent Bottlenecked Attentive Neural Processes: every layer of latents attends to all points, so the state keeps all
points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from cmab_kernels.nn import CrossAttention, LatentLayer
from cmab_kernels.runtime.tracing import has_values

from . import official
from .parts import Decoder, Joint, JointHead, NormalHead, point_embedding
from .points import KeepsPoints, Points

if TYPE_CHECKING:
    from typing import Self


class LBANP(KeepsPoints):
    """A neural process whose latents attend to the points in every layer, so each prediction reads all points again.

    It is the baseline of `CMANP`, with the same decoder and the same arguments except `num_block_latents`. Source:
    Latent Bottlenecked Attentive Neural Processes (Feng et al., ICLR 2023).

    >>> model = cmab_models.LBANP(dim_x=1, dim_y=1, dim=16, num_latents=8, num_heads=2, depth=2)
    >>> model(torch.randn(3, 50, 1), torch.randn(3, 50, 1), torch.randn(3, 7, 1)).mean.shape
    torch.Size([3, 7, 1])
    """

    before: ClassVar = {"residual": "input"}

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        dim: int = 64,
        num_latents: int = 128,
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
        self.latents = nn.Parameter(torch.randn(num_latents, dim))
        self.embedding = point_embedding(dim_x + dim_y, dim, embedding_depth)
        self.layers = nn.ModuleList(LatentLayer(dim, num_heads, ff_dim, residual) for _ in range(depth))
        self.decoder = Decoder(dim_x, dim, num_heads, ff_dim, depth, embedding_depth, residual)
        self.head: nn.Module = NormalHead(dim, ff_dim, dim_y, bound_std)

    @classmethod
    def from_official(cls, state_dict: Mapping[str, Tensor], *, num_heads: int, bound_std: bool = False) -> Self:
        """Return a model with the weights that the authors' code saves, as `CMANP.from_official` does."""
        return official.load(cls, state_dict, num_heads=num_heads, bound_std=bound_std)

    def predict(self, state: Points, target_x: Tensor) -> Distribution:
        result: Distribution = self.head(self._features(state, target_x))
        return result

    def _features(self, state: Points, target_x: Tensor) -> Tensor:
        """Return the features (B, M, dim) of the targets."""
        self._check(target_x, batch=self._known(state).ignored.shape[0], of="target_")
        embedded = self.embedding(torch.cat([state.x, state.y], -1))
        mask = None if has_values(state.ignored) and not state.ignored.any() else state.ignored
        latents, every = self.latents.expand(embedded.shape[0], -1, -1), []
        for layer in cast("list[LatentLayer]", list(self.layers)):
            latents = layer.after_context(_attended(layer.cross_attention, latents, embedded, mask))
            every.append(latents)
        result: Tensor = self.decoder(target_x, torch.stack(every))
        return result


class LBANPND(Joint, LBANP):
    """An `LBANP` with a joint distribution over all targets (ND: not diagonal), from the head of `CMANPAND`.

    Args:
        rank: columns of the factor's projection, for each output dimension.
        projection_depth: linear layers of that projection.
        covariance: as in `CMANPAND`.
        The other arguments are those of `LBANP`.

    >>> model = cmab_models.LBANPND(dim_x=1, dim_y=1, dim=16, num_latents=8, num_heads=2, depth=2)
    >>> model(torch.randn(3, 50, 1), torch.randn(3, 50, 1), torch.randn(3, 7, 1)).covariance_matrix.shape
    torch.Size([3, 7, 7])
    """

    before: ClassVar = {}

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        dim: int = 64,
        num_latents: int = 128,
        num_heads: int = 4,
        depth: int = 6,
        ff_dim: int | None = None,
        embedding_depth: int = 4,
        bound_std: bool = False,
        rank: int = 20,
        projection_depth: int = 4,
        residual: str = "normed",
        covariance: str = "cholesky",
    ) -> None:
        sizes = dim, num_latents, num_heads, depth, ff_dim, embedding_depth
        super().__init__(dim_x, dim_y, *sizes, bound_std, residual)
        hidden = 2 * dim if ff_dim is None else ff_dim
        self.head = JointHead(dim, num_heads, hidden, dim_y, rank, projection_depth, bound_std, covariance)


def _attended(attention: CrossAttention, latents: Tensor, points: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return attention(latents, points)
    return attention.add(latents, attention.read(latents, points, key_padding_mask=mask).out)
