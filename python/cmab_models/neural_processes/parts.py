"""The parts that the models share: embeddings, decoders and heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal

from cmab_kernels.nn import CrossAttention, FeedForward
from cmab_kernels.runtime.checks import as_they_are, mismatch

from ..encoder import EncoderLayer
from ..precision import in_single


def perceptron(inputs: int, hidden: int, outputs: int, depth: int, called: str = "depth") -> nn.Sequential:
    """Return `depth` linear layers with ReLU between them; `ValueError` for fewer than 2, with the name of the model's
    argument."""
    if depth < 2:
        raise ValueError(mismatch(called, depth, "an int >= 2, the linear layers of a perceptron"))
    layers: list[nn.Module] = [nn.Linear(inputs, hidden), nn.ReLU()]
    for _ in range(depth - 2):
        layers += [nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


def point_embedding(inputs: int, dim: int, depth: int, called: str = "embedding_depth") -> nn.Sequential:
    """Return a perceptron of width `dim` whose features differ between points already before training.

    With torch's initialisation a layer keeps a sixth of the variance of its inputs and adds a constant. After four such
    layers and a LayerNorm, 2% of the result differs between the points of a square. Then attention depends on little
    more than the mean of the points, and needs thousands of steps to learn to tell points apart. Layers between two
    other layers are therefore initialised to keep the variance (He et al., ICCV 2015). Then 19% of the result differs
    between the points.
    """
    layers = perceptron(inputs, dim, dim, depth, called)
    for layer in list(layers)[2:-1]:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return layers


class DecoderLayer(nn.Module):
    """Cross-attention of targets (B, M, dim) over latents (B, L, dim), then a feed-forward layer."""

    def __init__(self, dim: int, num_heads: int, ff_dim: int, residual: str) -> None:
        super().__init__()
        self.cross_attention = CrossAttention(dim, num_heads, residual)
        self.cross_feed_forward = FeedForward(dim, ff_dim, residual)

    def forward(self, targets: Tensor, latents: Tensor, mask: Tensor | None = None) -> Tensor:
        result: Tensor = self.cross_feed_forward(self.cross_attention(targets, latents, mask))
        return result


class Decoder(nn.Module):
    """Passes targets through one layer per entry of the latents (K, B, L, dim), and a last norm."""

    def __init__(
        self, dim_x: int, dim: int, num_heads: int, ff_dim: int, depth: int, embedding_depth: int, residual: str
    ) -> None:
        super().__init__()
        self.embedding = point_embedding(dim_x, dim, embedding_depth)
        self.layers = nn.ModuleList(DecoderLayer(dim, num_heads, ff_dim, residual) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, target_x: Tensor, latents: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return features (B, M, dim) of the targets (B, M, dim_x). Latents where `mask` (B, L) is True are ignored."""
        features = self.embedding(target_x)
        for layer, each in zip(self.layers, latents, strict=True):
            features = layer(features, each, mask)
        result: Tensor = self.norm(features)
        return result


def encoded(encoder: nn.TransformerEncoder, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the encoder's output for tokens (B, N, dim), without those where `mask` (B, N) is True.

    torch's attention may raise an error without tokens. The encoder then reads one token of zeros, so its weights have
    gradients, of 0.
    """
    if tokens.numel():
        return encoder(tokens, src_key_padding_mask=mask)
    return tokens + encoder(tokens.new_zeros(1, 1, tokens.shape[-1])).flatten()


class NormalHead(nn.Module):
    """Means and standard deviations from features (B, M, dim).

    The deviation is exp(r), or 0.05 + 0.95 softplus(r) with `bound_std`, which keeps likelihoods of exact values
    finite.
    """

    def __init__(self, dim: int, hidden: int, dim_y: int, bound_std: bool) -> None:
        super().__init__()
        self.layers = perceptron(dim, hidden, 2 * dim_y, 2)
        self.bound_std = bound_std

    def forward(self, features: Tensor) -> Normal:
        mean, raw = in_single(self.layers(features)).chunk(2, -1)
        return Normal(mean, 0.05 + 0.95 * F.softplus(raw) if self.bound_std else raw.exp(), validate_args=False)


class Joint:
    """Mixin of models whose head is a `JointHead`: targets that are ignored do not change the others."""

    joint = True
    head: nn.Module
    _features: Callable[[Any, Tensor], Tensor]

    def _predicted(self, state: Any, target_x: Tensor, mask: Tensor | None) -> MultivariateNormal:
        result: MultivariateNormal = self.head(self._features(state, target_x), mask)
        return result


COVARIANCES = ("cholesky", "low-rank")
"""The forms of the covariance of a joint distribution."""


class JointHead(nn.Module):
    """The joint distribution of all values of a set of targets, from features (B, M, dim).

    P (M dim_y, rank) is projected from features that have attended to each other. With "cholesky", the factor of the
    covariance is tril(P P'), and `bound_std` replaces the factor's diagonal d by 0.05 + 0.95 tanh(d). With "low-rank",
    the covariance is P P' plus a diagonal exp(r), and `bound_std` adds 0.05 squared to the diagonal.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden: int,
        dim_y: int,
        rank: int,
        depth: int,
        bound_std: bool,
        covariance: str = "cholesky",
    ) -> None:
        super().__init__()
        if covariance not in COVARIANCES:
            raise ValueError(mismatch("covariance", repr(covariance), f"one of {', '.join(map(repr, COVARIANCES))}"))
        self.mean = perceptron(dim, hidden, dim_y, 2)
        self.encoder = nn.TransformerEncoder(EncoderLayer(dim, num_heads, hidden), 2, enable_nested_tensor=False)
        self.projection = perceptron(dim, hidden, rank * dim_y, depth, "projection_depth")
        self.rank, self.bound_std = rank, bound_std
        self.diagonal = perceptron(dim, hidden, dim_y, depth, "projection_depth") if covariance == "low-rank" else None

    def forward(self, features: Tensor, mask: Tensor | None = None) -> MultivariateNormal:
        """Return the distribution. Targets where `mask` (B, M) is True are not read, and get deviation 1 and no
        covariance."""
        mean = in_single(self.mean(features)).flatten(1)
        # torch's attention over no keys is NaN, so a set without targets is read as it is.
        hidden = None if mask is None else mask & ~mask.all(1, keepdim=True)
        rows = in_single(self.projection(encoded(self.encoder, features, hidden))).view(*mean.shape, self.rank)
        ignored = None if mask is None else mask.repeat_interleave(mean.shape[1] // max(mask.shape[1], 1), 1)
        if ignored is not None:
            rows = rows.masked_fill(ignored.unsqueeze(-1), 0.0)
        with as_they_are(rows.device):  # torch has no triangular solve in half types
            product = rows @ rows.mT
        if self.diagonal is not None:
            raw = in_single(self.diagonal(features)).flatten(1)
            return MultivariateNormal(mean, scale_tril=self._factor(product, raw, ignored), validate_args=False)
        factor = product.tril()
        diagonal = before = factor.diagonal(dim1=-2, dim2=-1)
        if self.bound_std:
            diagonal = 0.05 + 0.95 * diagonal.tanh()
        if ignored is not None:
            diagonal = diagonal.masked_fill(ignored, 1.0)
        if diagonal is not before:
            factor = factor - torch.diag_embed(before) + torch.diag_embed(diagonal)
        return MultivariateNormal(mean, scale_tril=factor, validate_args=False)

    def _factor(self, product: Tensor, raw: Tensor, ignored: Tensor | None) -> Tensor:
        """Return the factor of the covariance that is the product P P' plus a diagonal of exp(raw); NaN if rounding has
        made the covariance indefinite."""
        diagonal = raw.exp() + 0.05**2 if self.bound_std else raw.exp()
        if ignored is not None:
            diagonal = diagonal.masked_fill(ignored, 1.0)
        factor, info = torch.linalg.cholesky_ex(product + torch.diag_embed(diagonal))
        return factor.masked_fill((info != 0)[:, None, None], torch.nan)
