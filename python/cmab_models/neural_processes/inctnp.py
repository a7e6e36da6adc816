"""Incremental Transformer Neural Processes: a causal mask over the context, with a cache of its keys and values."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution

from cmab_kernels.runtime.checks import mismatch
from cmab_kernels.runtime.tracing import has_values

from .base import NeuralProcess, without_masked
from .parts import NormalHead, perceptron, point_embedding


class Cache(NamedTuple):
    """The keys and values of all points of a context, in each layer, and which points count."""

    keys: Tensor
    """(K, B, H, N, D)"""
    values: Tensor
    """(K, B, H, N, D)"""
    ignored: Tensor
    """(B, N) bool"""


class CachedLayer(nn.Module):
    """A pre-norm Transformer layer whose rows attend to given keys and values."""

    def __init__(self, dim: int, num_heads: int, ff_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.feed_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)
        self.feed_forward = perceptron(dim, ff_dim, dim, 2)

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values (B, H, N, D) of rows x (B, N, dim)."""
        key, value = self.key_value(self.norm(x)).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return key, value

    def forward(self, x: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        """Return x (B, T, dim) after attention over the `allowed` keys (B, 1, T, N) bool, and a feed-forward layer."""
        query = self.query(self.norm(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value, allowed)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.feed_forward(self.feed_norm(x))
        return result


class IncTNP(NeuralProcess):
    """A Transformer Neural Process that takes new points without reading the old ones again: each point attends to the
    points before it.

    The state is a cache of keys and values, which grows with the context. The order of the points matters, and no point
    can be forgotten. One pass gives a prediction after every point of a sequence (`prefix_log_prob`).

    Args:
        dim_x, dim_y, dim, num_heads, ff_dim, embedding_depth, bound_std: as in `CMANP`.
        depth: layers of the Transformer.

    >>> model = cmab_models.IncTNP(dim_x=1, dim_y=1, dim=16, num_heads=2, depth=2)
    >>> x, y, target_x = torch.randn(3, 50, 1), torch.randn(3, 50, 1), torch.randn(3, 7, 1)
    >>> state = model.condition(x[:, 30:], y[:, 30:], model.condition(x[:, :30], y[:, :30]))
    >>> torch.allclose(model.predict(state, target_x).mean, model(x, y, target_x).mean, atol=1e-4)
    True
    """

    state_type = Cache

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
        self.layers = nn.ModuleList(CachedLayer(dim, num_heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = NormalHead(dim, hidden, dim_y, bound_std)

    def condition(self, x: Tensor, y: Tensor, state: Cache | None = None, mask: Tensor | None = None) -> Cache:
        self._check(x, y, mask=mask, batch=None if state is None else self._known(state).ignored.shape[0], values=False)
        ignored = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask.clone()
        before = 0 if state is None else state.ignored.shape[1]
        if state is not None:
            ignored = torch.cat([state.ignored, ignored], 1)
        position = torch.arange(ignored.shape[1], device=x.device)
        causal = position <= position[before:, None]
        # An ignored point attends to itself, so that no row of attention is empty.
        itself = position == position[before:, None]
        allowed = (causal & ~ignored[:, None, :] | itself).unsqueeze(1)
        features, keys, values = self.embedding(torch.cat(without_masked(x, y, mask), -1)), [], []
        for k, layer in enumerate(self._layers):
            key, value = layer.keys_and_values(features)
            if state is not None:
                key, value = torch.cat([state.keys[k], key], 2), torch.cat([state.values[k], value], 2)
            features = layer(features, key, value, allowed)
            keys.append(key)
            values.append(value)
        return Cache(torch.stack(keys), torch.stack(values), ignored)

    def forget(self, state: Cache, x: Tensor, y: Tensor) -> Cache:
        """Raise `RuntimeError`, because later points have attended to the earlier ones."""
        raise RuntimeError(
            "state: points of an IncTNP cannot be forgotten, because later points attended to them; "
            "call condition with the points that are left"
        )

    def predict(self, state: Cache, target_x: Tensor) -> Distribution:
        self._check(target_x, batch=self._known(state).ignored.shape[0], of="target_")
        if has_values(state.ignored) and state.ignored.all(1).any():
            raise ValueError(mismatch("state", "no points", "at least one"))
        return self._answered(state, target_x, ~state.ignored[:, None, None, :])

    def prefix_log_prob(self, x: Tensor, y: Tensor) -> Tensor:
        self._check(x, y)
        state, count = self.condition(x[:, :-1], y[:, :-1]), max(x.shape[1] - 1, 0)
        earlier = torch.ones(count, count, dtype=torch.bool, device=x.device).tril()
        return self._answered(state, x[:, 1:], earlier).log_prob(y[:, 1:]).sum(-1)

    def _answered(self, state: Cache, target_x: Tensor, allowed: Tensor) -> Distribution:
        """Return the prediction for targets that attend to the `allowed` points."""
        features = self.embedding(torch.cat([target_x, target_x.new_zeros(*target_x.shape[:2], self.dim_y)], -1))
        for layer, key, value in zip(self._layers, state.keys, state.values, strict=True):
            features = layer(features, key, value, allowed)
        result: Distribution = self.head(self.norm(features))
        return result

    @property
    def _layers(self) -> list[CachedLayer]:
        return cast("list[CachedLayer]", list(self.layers))
