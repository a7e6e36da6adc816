"""Classifiers of streams, grouped by the attention of their layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cmab_kernels.nn import ContinualEncoderLayer, MultiheadAttention, NystromAttention, replace_modules
from cmab_kernels.runtime.checks import mismatch

from .base import StreamClassifier


class ContinualNystromformer(StreamClassifier):
    """A Nyströmformer for streams: its last layer takes O(m) time per token, for any window.

    `forward` takes whole windows with the same kind of landmarks. In a model of depth 1 with fixed landmarks, every
    step equals `forward` to rounding. With continual landmarks and m a divisor of n, a step equals `forward` every n /
    m tokens; in between, the landmarks lag behind the window by less than one segment. `forward_stream` equals the
    steps at every token, and is differentiable. `StreamClassifier` describes the effect of more layers.

    Source: Continual Low-Rank Scaled Dot-product Attention (Carreto Picon et al.).

    Args:
        dim_in: C, columns of the tokens.
        num_classes: columns of the scores.
        sequence_len: n, tokens of the window.
        num_landmarks: m, the number of landmarks.
        landmarks: "continual": means of segments. In a stream, the last layer uses streaming landmarks, and the other
            layers recompute segment means. "fixed": parameters, which are random until `fit_landmarks` computes them
            from training tokens.
        dim: width of all features.
        num_heads: a divisor of dim.
        depth: the number of layers. All layers but the last read the whole window at every step.
        ff_dim: hidden width of the feed-forward networks; None means 2 dim.

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
        sizes = dim, num_heads, 2 * dim if ff_dim is None else ff_dim
        over_window = partial(NystromAttention, num_landmarks=num_landmarks, landmarks="fixed" if fixed else "segments")
        layers = _layers(depth - 1, sizes, over_window)
        options: dict[str, Any] = {"sequence_len": sequence_len, "num_landmarks": num_landmarks, "landmarks": landmarks}
        layers.append(ContinualEncoderLayer(*sizes, **_LIKE_ALL, **options))
        if fixed:
            for layer in layers:
                layer.self_attn.landmark_queries, layer.self_attn.landmark_keys = _random_landmarks(layer.self_attn)
        super().__init__(layers, dim_in, num_classes, sequence_len, dim)
        self.fixed = fixed

    @torch.no_grad()
    def fit_landmarks(self, tokens: Tensor, layer: int | None = None, *, seed: int = 0) -> None:
        """Set the fixed landmarks of one layer, or of all from first to last, by k-means on training windows (B, n, C).

        Each layer is fitted on the outputs of the layers before it. The paper therefore fits one layer at a time, and
        continues the training after each layer. The landmarks stay the same parameters, so an optimiser that holds them
        can continue. The stream ends.
        """
        self._check_window(tokens)
        if not self.fixed:
            raise ValueError(mismatch("landmarks", "'continual'", "'fixed', as only these are fitted"))
        if layer is not None and not 0 <= layer < len(self.layers):
            raise ValueError(
                mismatch("layer", layer, f"an int from 0 to {len(self.layers) - 1}, the layers of the model")
            )
        self.clean_state()
        features = self.positions(self.embedding(tokens))
        for index, each in enumerate(self.layers):
            if layer in (None, index):
                _fit(each, features, seed)
            features = each(features)


class ContinualTransformer(StreamClassifier):
    """A `ContinualNystromformer` with exact attention instead: its last layer takes O(n) time per token.

    Source: Continual Transformers: Redundancy-Free Attention for Online Inference (Hedegaard et al., 2023). The
    arguments are those of `ContinualNystromformer`. With `depth` 1, every step equals `forward` of the window to
    rounding.

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
        sizes = dim, num_heads, 2 * dim if ff_dim is None else ff_dim
        layers = _layers(depth - 1, sizes, MultiheadAttention)
        layers.append(ContinualEncoderLayer(*sizes, **_LIKE_ALL, sequence_len=sequence_len))
        super().__init__(layers, dim_in, num_classes, sequence_len, dim)


class Nystromformer(StreamClassifier):
    """A Nyströmformer without continual layers: every layer reads the whole window for each token, with the means of
    its segments as landmarks.

    Source: Nyströmformer (Xiong et al., AAAI 2021). The arguments are those of `ContinualNystromformer`, and its
    weights can be loaded. Every step equals `forward` of the window to rounding.

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
        sizes = dim, num_heads, 2 * dim if ff_dim is None else ff_dim
        layers = _layers(depth, sizes, partial(NystromAttention, num_landmarks=num_landmarks))
        super().__init__(layers, dim_in, num_classes, sequence_len, dim)


_LIKE_ALL: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
"""The arguments that all layers share."""


def _layers(number: int, sizes: tuple[int, int, int], attention: Any) -> list[Any]:
    """Return torch's encoder layers of these sizes (dim, heads, hidden width) over a window, with their attention
    replaced."""
    layers = nn.ModuleList(nn.TransformerEncoderLayer(*sizes, **_LIKE_ALL) for _ in range(number))
    replace_modules(layers, {nn.MultiheadAttention: attention}, verbose=False)
    return list(layers)


def _random_landmarks(attention: NystromAttention) -> tuple[nn.Parameter, nn.Parameter]:
    """Return landmark queries and keys (H, m, D) from N(0, 1)."""
    shape = attention.num_heads, attention.num_landmarks, attention.head_dim
    return nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape))


def _fit(layer: Any, features: Tensor, seed: int) -> None:
    """Set the landmarks of a layer by k-means on its inputs, and keep the parameters that hold them."""
    attention = layer.self_attn
    held = attention.landmark_queries, attention.landmark_keys
    attention.fit_landmarks(layer.norm1(features), seed=seed)
    for parameter, fitted in zip(held, (attention.landmark_queries, attention.landmark_keys), strict=True):
        parameter.copy_(fitted)
    attention.landmark_queries, attention.landmark_keys = held
