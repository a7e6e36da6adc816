"""The parts of the neural process family, in the architecture of the published code, and its loss.

Source of the architecture: https://github.com/tung-nd/TNP-pytorch, which follows https://github.com/juho-lee/bnp, and
which https://github.com/BorealisAI/latent-bottlenecked-anp uses for the published tables. The tests compare the results
with outputs of that code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from cmab_kernels import latent_attention
from cmab_kernels.nn.inputs import join_heads, split_heads
from cmab_kernels.runtime.tracing import traced_as_constant

from ..precision import in_single
from .base import Batch, NeuralProcess, PaddedBatch
from .likelihood import joint_log_prob
from .parts import perceptron
from .points import Points


class Attention(nn.Module):
    """Post-norm attention without biases: h + relu(output(h)) with h = query + attention, and a norm after each sum.

    Scores are divided by the root of `dim`, not of the width of a head.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, dim**-0.5
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.output = nn.Linear(dim, dim)
        self.norm, self.output_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Return features (B, M, dim) of queries that attend to the points (B, N, dim) where `mask` (B, N) is False."""
        projected = self.query(query), self.key(key), self.value(value)
        heads = (split_heads(each, self.num_heads) for each in projected)
        attended = latent_attention(*heads, key_padding_mask=mask, scale=self.scale)
        hidden = self.norm(projected[0] + join_heads(attended))
        result: Tensor = self.output_norm(hidden + self.output(hidden).relu())
        return result


class PointEncoder(nn.Module):
    """Features (B, N, dim) of points: `depth` linear layers. With heads, self-attention replaces two of them."""

    def __init__(self, inputs: int, dim: int, depth: int, num_heads: int | None = None, *, relu: bool = True) -> None:
        super().__init__()
        self.attention = None if num_heads is None else Attention(dim, num_heads)
        self.relu = relu
        self.layers = perceptron(inputs, dim, dim, depth if num_heads is None else max(depth - 2, 2), "encoder_depth")

    def forward(self, points: Tensor, mask: Tensor) -> Tensor:
        features: Tensor = self.layers(points)
        if self.attention is None:
            return features
        features = features.relu() if self.relu else features
        result: Tensor = self.attention(features, features, features, mask)
        return result


class PooledEncoder(nn.Module):
    """One vector (B, outputs) of all points: the mean of their features, and a perceptron of it."""

    def __init__(
        self, inputs: int, dim: int, outputs: int, depth: int, pooled_depth: int, num_heads: int | None = None
    ) -> None:
        super().__init__()
        self.points = PointEncoder(inputs, dim, depth, num_heads)
        self.pooled = perceptron(dim, dim, outputs, pooled_depth, "pooled_depth")

    def forward(self, points: Tensor, mask: Tensor) -> Tensor:
        features = in_single(self.points(points, mask)).masked_fill(mask.unsqueeze(-1), 0.0)
        mean = features.sum(1) / (~mask).sum(1, keepdim=True).clamp(min=1)
        result: Tensor = self.pooled(mean.to(points.dtype))
        return result


class AttentiveEncoder(nn.Module):
    """Features (B, M, dim) of targets: attention from coordinates to coordinates, over features of the points."""

    def __init__(self, dim_x: int, dim_y: int, dim: int, depth: int, query_depth: int, num_heads: int) -> None:
        super().__init__()
        self.points = PointEncoder(dim_x + dim_y, dim, depth, num_heads, relu=False)
        self.coordinates = perceptron(dim_x, dim, dim, query_depth, "query_depth")
        self.attention = Attention(dim, num_heads)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, target_x: Tensor) -> Tensor:
        value = self.points(torch.cat([x, y], -1), mask)
        result: Tensor = self.attention(self.coordinates(target_x), self.coordinates(x), value, mask)
        return result


class ValueDecoder(nn.Module):
    """Means and standard deviations of at least 0.1 from features (..., M, inputs) and coordinates of targets.

    With `more`, the first layer adds other features of this width, such as those of a bootstrapped context.
    """

    def __init__(self, inputs: int, dim: int, dim_x: int, dim_y: int, depth: int, more: int | None = None) -> None:
        super().__init__()
        self.layers = perceptron(inputs + dim_x, dim, 2 * dim_y, depth, "decoder_depth")
        self.more = None if more is None else nn.Linear(more, dim, bias=False)

    def forward(self, features: Tensor, target_x: Tensor, more: Tensor | None = None) -> Normal:
        first, *rest = self.layers
        hidden = first(torch.cat([features, target_x], -1))
        if more is not None and self.more is not None:
            hidden = hidden + self.more(more)
        for layer in rest:
            hidden = layer(hidden)
        mean, raw = in_single(hidden).chunk(2, -1)
        return Normal(mean, 0.1 + 0.9 * F.softplus(raw), validate_args=False)


def as_latent(parameters: Tensor) -> Normal:
    """Return the distribution (B, dim_latent) of a latent variable, with deviations from 0.1 to 1."""
    mean, raw = in_single(parameters).chunk(2, -1)
    return Normal(mean, 0.1 + 0.9 * raw.sigmoid(), validate_args=False)


def noise(kind: str, *shape: int, like: Tensor, fresh: bool) -> Tensor:
    """Return random numbers, of `torch.rand` or `torch.randn` by name: new ones from torch's global generator, or
    always the same."""
    if fresh:
        drawn: Tensor = getattr(torch, kind)(*shape, dtype=torch.float32, device="cpu")
        return drawn.to(like)
    return _same_numbers(kind, shape).to(like)


@traced_as_constant
def _same_numbers(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Return the numbers of a fixed seed.

    They are NumPy's, because a program of `torch.export` keeps a call of torch's generator, whose state changes with
    every call, and keeps an array as a constant.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    draw: Any = generator.random if kind == "rand" else generator.standard_normal
    return torch.from_numpy(draw(shape, dtype=np.float32))


class Everywhere(NeuralProcess):
    """Base class of models that are trained to predict all points of a function, including its context, as in the
    published code.

    `loss` draws the random numbers of a training step from torch's global generator. All other methods, and `loss` in
    evaluation mode, use the same random numbers in every call.
    """

    def loss(self, batch: Batch | PaddedBatch) -> Tensor:
        """Return the negative objective of the published code, per point of context and targets, as a mean over
        functions.

        A function without targets counts as 0. Masks and missing outputs are those of `log_prob`.
        """
        parts = PaddedBatch(*batch) if len(batch) == len(PaddedBatch._fields) else Batch(*batch)
        x, y, target_x, target_y, there = self._given(*parts)
        mask = parts.context_mask if isinstance(parts, PaddedBatch) else x.new_zeros(x.shape[:2], dtype=torch.bool)
        if there is None:
            there = torch.ones_like(target_y, dtype=torch.bool)
        known = (~mask).unsqueeze(-1).expand_as(y)
        everything = torch.cat([x, target_x], 1), torch.cat([y, target_y], 1), torch.cat([known, there], 1)
        state = self.condition(x, y, mask=mask)

        def full() -> Any:
            # Points without a value for an output cannot be read.
            return self.condition(target_x, target_y, state, ~there.all(-1))

        found = self._objective(state, full, *everything) / everything[2].any(-1).sum(1).clamp(min=1)
        found = found.masked_fill(~there.flatten(1).any(1), 0.0)
        return -(found.mean() if len(found) else found.sum())

    def _objective(self, state: Any, full: Callable[[], Any], x: Tensor, y: Tensor, there: Tensor) -> Tensor:
        """Return the objective (B,), summed over all values y at x that are `there`, from the state of the context.
        `full()` is the state of all points."""
        return joint_log_prob(self.predict(state, x), y, there)


def pooled_pair(dim_x: int, dim_y: int, dim: int, depth: int, pooled_depth: int) -> nn.ModuleList:
    """Return the two pooled encoders of the published CNP."""
    return nn.ModuleList(PooledEncoder(dim_x + dim_y, dim, dim, depth, pooled_depth) for _ in range(2))


def attentive_pair(
    dim_x: int, dim_y: int, dim: int, depth: int, query_depth: int, pooled_depth: int, num_heads: int
) -> nn.ModuleList:
    """Return the encoders of the published CANP: one of each target, and one of all points."""
    attentive = AttentiveEncoder(dim_x, dim_y, dim, depth, query_depth, num_heads)
    return nn.ModuleList([attentive, PooledEncoder(dim_x + dim_y, dim, dim, depth, pooled_depth, num_heads)])


def encoded_pair(encoders: nn.ModuleList, points: Points, target_x: Tensor) -> Tensor:
    """Return the features (B, M, 2 dim) of targets from a pair of encoders."""
    together = torch.cat([points.x, points.y], -1)
    found = []
    for encoder in encoders:
        if isinstance(encoder, AttentiveEncoder):
            found.append(encoder(*points, target_x))
        else:
            found.append(encoder(together, points.ignored).unsqueeze(1).expand(-1, target_x.shape[1], -1))
    return torch.cat(found, -1)


class FromPair(Everywhere):
    """Base class of models whose targets have features from a pair of encoders of the points."""

    encoders: nn.ModuleList
    decoder: ValueDecoder

    def predict(self, state: Points, target_x: Tensor) -> Distribution:
        self._check(target_x, batch=self._known(state).ignored.shape[0], of="target_")
        result: Distribution = self.decoder(encoded_pair(self.encoders, state, target_x), target_x)
        return result
