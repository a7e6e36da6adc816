"""Classifiers of streams, by the attention of their layers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from cmab_kernels.nn import ContinualAttention, ContinualNystromAttention, MultiheadAttention, NystromAttention

from .base import Layer, StreamClassifier


class ContinualNystromformer(StreamClassifier):
    """A Nyströmformer for streams: a token takes O(m) time in its last layer, whatever the window.

    `forward` takes whole windows with the same kind of landmarks. A step of a model of depth 1 equals it to rounding at every token with
    fixed landmarks; with continual ones it does so every n / m tokens, where m divides n, and in between the landmarks lag behind the
    window by less than one segment. `forward_stream` equals the steps at every token, and is differentiable. `StreamClassifier` says what
    more layers change.

    Source: Continual Low-Rank Scaled Dot-product Attention (Carreto Picon et al.).

    Args:
        dim_in: C, columns of the tokens.
        num_classes: columns of the scores.
        sequence_len: n, tokens of the window.
        num_landmarks: m.
        landmarks: "continual": means of segments of the window, those of the last layer's stream as it goes on. "fixed": parameters, which
            `fit_landmarks` makes from training tokens, random before.
        dim: width of all features.
        num_heads: a divisor of dim.
        depth: layers; all but the last read the whole window at every step.
        ff_dim: hidden width of the perceptrons; None means 2 dim.

    >>> model = cmab_models.ContinualNystromformer(dim_in=6, num_classes=3, sequence_len=16, num_landmarks=4).eval()
    >>> tokens = torch.randn(2, 16, 6)
    >>> with torch.no_grad():
    ...     scores = model(tokens)
    ...     for token in tokens.unbind(1):
    ...         streamed = model.forward_step(token)
    >>> streamed.shape, torch.allclose(streamed, scores, atol=1e-4)
    (torch.Size([2, 3]), True)
    """

    def __init__(
        self,
        dim_in: int,
        num_classes: int,
        sequence_len: int,
        num_landmarks: int = 4,
        landmarks: str = "continual",
        dim: int = 32,
        num_heads: int = 4,
        depth: int = 1,
        ff_dim: int | None = None,
    ) -> None:
        fixed = landmarks == "fixed"
        options: dict[str, Any] = {"num_landmarks": num_landmarks, "batch_first": True}
        attentions: list[NystromAttention] = [
            NystromAttention(dim, num_heads, landmarks="fixed" if fixed else "segments", **options) for _ in range(depth - 1)
        ]
        if depth:
            attentions.append(ContinualNystromAttention(dim, num_heads, landmarks=landmarks, sequence_len=sequence_len, **options))
        if fixed:
            for attention in attentions:
                attention.landmark_queries, attention.landmark_keys = _random_landmarks(attention)
        super().__init__(attentions, dim_in, num_classes, sequence_len, dim, ff_dim)
        self.fixed = fixed

    @torch.no_grad()
    def fit_landmarks(self, tokens: Tensor, layer: int | None = None, *, seed: int = 0) -> None:
        """Set the fixed landmarks of one layer, or of all from first to last, by k-means on training windows (B, n, C).

        Each layer is fitted on the outputs of those before it, so the paper fits one layer at a time and trains on after each. The
        landmarks stay the same parameters, so an optimiser that has them goes on. The stream ends.
        """
        self._check(tokens, (self.sequence_len, self.dim_in))
        if not self.fixed:
            raise ValueError("landmarks are 'continual'; only fixed landmarks are fitted")
        if layer is not None and not 0 <= layer < len(self.layers):
            raise ValueError(f"layer is {layer}; the model has layers 0 to {len(self.layers) - 1}")
        self.clean_state()
        features = self.positions(self.embedding(tokens))
        for index, each in enumerate(cast("list[Layer]", list(self.layers))):
            if layer in (None, index):
                _fit(each, features, seed)
            features = each(features)


class ContinualTransformer(StreamClassifier):
    """The same with exact attention: a token takes O(n) time in the last layer.

    Source: Continual Transformers: Redundancy-Free Attention for Online Inference (Hedegaard et al., 2023). The arguments are those of
    `ContinualNystromformer`. With `depth` 1 every step equals `forward` of the window to rounding.

    >>> model = cmab_models.ContinualTransformer(dim_in=6, num_classes=3, sequence_len=16)
    >>> model(torch.randn(2, 16, 6)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        dim_in: int,
        num_classes: int,
        sequence_len: int,
        dim: int = 32,
        num_heads: int = 4,
        depth: int = 1,
        ff_dim: int | None = None,
    ) -> None:
        attentions: list[nn.Module] = [MultiheadAttention(dim, num_heads, batch_first=True) for _ in range(depth - 1)]
        if depth:
            attentions.append(ContinualAttention(dim, num_heads, batch_first=True, sequence_len=sequence_len))
        super().__init__(attentions, dim_in, num_classes, sequence_len, dim, ff_dim)


class Nystromformer(StreamClassifier):
    """The same without a stream: every layer reads the whole window anew for each token, with the means of its segments as landmarks.

    Source: Nyströmformer (Xiong et al., AAAI 2021). The arguments are those of `ContinualNystromformer`, whose weights fit. Every step
    equals `forward` of the window to rounding.

    >>> model = cmab_models.Nystromformer(dim_in=6, num_classes=3, sequence_len=16)
    >>> model(torch.randn(2, 16, 6)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        dim_in: int,
        num_classes: int,
        sequence_len: int,
        num_landmarks: int = 4,
        dim: int = 32,
        num_heads: int = 4,
        depth: int = 1,
        ff_dim: int | None = None,
    ) -> None:
        attentions = [NystromAttention(dim, num_heads, num_landmarks=num_landmarks, batch_first=True) for _ in range(depth)]
        super().__init__(attentions, dim_in, num_classes, sequence_len, dim, ff_dim)


def _random_landmarks(attention: NystromAttention) -> tuple[nn.Parameter, nn.Parameter]:
    """Return landmark queries and keys (H, m, D) from N(0, 1)."""
    shape = attention.num_heads, attention.num_landmarks, attention.head_dim
    return nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape))


def _fit(layer: Layer, features: Tensor, seed: int) -> None:
    """Set the landmarks of a layer by k-means on its inputs, and keep the parameters that hold them."""
    attention: Any = layer.attention
    held = attention.landmark_queries, attention.landmark_keys
    attention.fit_landmarks(layer.norm(features), seed=seed)
    for parameter, fitted in zip(held, (attention.landmark_queries, attention.landmark_keys), strict=True):
        parameter.copy_(fitted)
    attention.landmark_queries, attention.landmark_keys = held
