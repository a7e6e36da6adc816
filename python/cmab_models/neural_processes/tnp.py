"""Transformer Neural Processes: all points of the context and all targets go through one Transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from cmab_kernels.runtime.checks import mismatch
from cmab_kernels.runtime.tracing import has_values

from ..encoder import EncoderLayer
from .parts import Joint, JointHead, NormalHead, encoded, point_embedding
from .points import KeepsPoints, Points


def refuse_no_points(state: Points) -> None:
    """Raise a `ValueError` if all points of a function are ignored."""
    if has_values(state.ignored) and state.ignored.all(1).any():
        raise ValueError(mismatch("state", "no points", "at least one"))


class TNPD(KeepsPoints):
    """A neural process that is a Transformer over points and targets. A target attends to the context, but not to the
    other targets.

    Time is quadratic in the context. Each prediction reads the context again, and the context must not be empty.
    Source: Transformer Neural Processes (Nguyen and Grover, ICML 2022), the diagonal form.

    Args:
        dim_x, dim_y, dim, num_heads, ff_dim, embedding_depth, bound_std: as in `CMANP`.
        depth: layers of the Transformer.

    >>> model = cmab_models.TNPD(dim_x=1, dim_y=1, dim=16, num_heads=2, depth=2)
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
    ) -> None:
        super().__init__()
        hidden = 2 * dim if ff_dim is None else ff_dim
        self.dim_x, self.dim_y = dim_x, dim_y
        self.embedding = point_embedding(dim_x + dim_y, dim, embedding_depth)
        self.encoder = nn.TransformerEncoder(EncoderLayer(dim, num_heads, hidden), depth, enable_nested_tensor=False)
        self.head: nn.Module = NormalHead(dim, hidden, dim_y, bound_std)

    def predict(self, state: Points, target_x: Tensor) -> Distribution:
        result: Distribution = self.head(self._features(state, target_x))
        return result

    def _features(self, state: Points, target_x: Tensor) -> Tensor:
        """Return the features (B, M, dim) of the targets."""
        self._check(target_x, batch=self._known(state).ignored.shape[0], of="target_")
        refuse_no_points(state)
        points, targets = state.x.shape[1], target_x.shape[1]
        asked = torch.cat([target_x, target_x.new_zeros(*target_x.shape[:2], self.dim_y)], -1)
        tokens = self.embedding(torch.cat([torch.cat([state.x, state.y], -1), asked], 1))
        hidden = torch.cat([state.ignored, state.ignored.new_ones(asked.shape[0], targets)], 1)
        return encoded(self.encoder, tokens, hidden)[:, points:]


class TNPND(Joint, TNPD):
    """A `TNPD` with a joint distribution over all targets (ND: not diagonal), from the head of `CMANPAND`.

    Args:
        rank: columns of the factor's projection, for each output dimension.
        projection_depth: linear layers of that projection.
        covariance: as in `CMANPAND`. The published code uses "low-rank" for bandits, and else "cholesky".
        The other arguments are those of `TNPD`.

    >>> model = cmab_models.TNPND(dim_x=1, dim_y=1, dim=16, num_heads=2, depth=2)
    >>> model(torch.randn(3, 50, 1), torch.randn(3, 50, 1), torch.randn(3, 7, 1)).covariance_matrix.shape
    torch.Size([3, 7, 7])
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
        rank: int = 20,
        projection_depth: int = 4,
        covariance: str = "cholesky",
    ) -> None:
        super().__init__(dim_x, dim_y, dim, num_heads, depth, ff_dim, embedding_depth, bound_std)
        hidden = 2 * dim if ff_dim is None else ff_dim
        self.head = JointHead(dim, num_heads, hidden, dim_y, rank, projection_depth, bound_std, covariance)
