"""Constant Memory Attentive Neural Processes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from cmab_kernels import AttentionState
from cmab_kernels.nn import CMABStack

from ..prefixes import prefix_states
from . import official
from .base import NeuralProcess, without_masked
from .likelihood import joint_log_prob
from .parts import Decoder, Joint, JointHead, NormalHead, point_embedding

if TYPE_CHECKING:
    from typing import Self

CHUNK = 2048
"""The number of points that are embedded at a time if no backward pass follows. At the papers' size, 2,048 take 5 MiB
and 8,192 take 20 MiB."""


class CMANP(NeuralProcess):
    """A neural process whose context is an `AttentionState`. It has constant size, and an update takes time O(new
    points).

    Points are embedded and read by a `cmab_kernels.nn.CMABStack`; layer i of the decoder attends to the latents of
    block i. States of parts of a context can be merged (`cmab_kernels.merge_states`), and points can be forgotten.
    Source: Memory Efficient Neural Processes via Constant Memory Attention Block (Feng et al., ICML 2024), section 4.
    The defaults are the paper's.

    Args:
        dim_x, dim_y: columns of x and y.
        dim: width of all features.
        num_latents: L_I, the number of latents that the decoder attends to.
        num_heads: a divisor of dim.
        depth: K, the number of blocks of the encoder and of layers of the decoder.
        ff_dim: hidden width of feed-forward layers and of the head; None means 2 dim.
        embedding_depth: linear layers of the two embeddings, at least 2.
        bound_std: whether standard deviations are at least 0.05.
        num_block_latents: L_B, the number of latents of each block that attend to the points; None means num_latents.
        residual: the tensor to which a layer adds its result. "normed": its normed input, as in the authors' code;
            "input": its input. Small models learn functions better with "normed" (`RESULTS.md`), and a bandit better
            with "input" (`python/examples/forgetful_bandit.py`).

    The state of a context has out (K, B, num_heads, L_B, dim / num_heads), and lse of the same shape without the last
    axis.

    >>> model = cmab_models.CMANP(dim_x=1, dim_y=1, dim=16, num_latents=8, num_heads=2, depth=2).eval()
    >>> x, y, target_x = torch.randn(3, 50, 1), torch.randn(3, 50, 1), torch.randn(3, 7, 1)
    >>> with torch.no_grad():
    ...     state = model.condition(x[:, :30], y[:, :30])
    ...     state = model.condition(x[:, 30:], y[:, 30:], state)
    ...     predicted, at_once = model.predict(state, target_x), model(x, y, target_x)
    >>> predicted.mean.shape, torch.allclose(predicted.mean, at_once.mean, atol=1e-5)
    (torch.Size([3, 7, 1]), True)
    """

    before: ClassVar = {"residual": "input"}
    state_type = AttentionState

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
        num_block_latents: int | None = None,
        residual: str = "normed",
    ) -> None:
        super().__init__()
        ff_dim = 2 * dim if ff_dim is None else ff_dim
        self.dim_x, self.dim_y = dim_x, dim_y
        self.latents = nn.Parameter(torch.randn(num_latents, dim))
        self.embedding = point_embedding(dim_x + dim_y, dim, embedding_depth)
        self.blocks = CMABStack(dim, num_block_latents or num_latents, num_heads, depth, ff_dim, residual=residual)
        self.decoder = Decoder(dim_x, dim, num_heads, ff_dim, depth, embedding_depth, residual)
        self.head: nn.Module = NormalHead(dim, ff_dim, dim_y, bound_std)

    @classmethod
    def from_official(cls, state_dict: Mapping[str, Tensor], *, num_heads: int, bound_std: bool = False) -> Self:
        """Return a model with the weights that the authors' code saves, in their dtype. All sizes but `num_heads`
        follow from the weights.

        A `ValueError` names entries that are missing, unexpected or of a wrong shape. The tests compare the results
        with outputs of the authors' code.
        """
        return official.load(cls, state_dict, num_heads=num_heads, bound_std=bound_std)

    def condition(
        self, x: Tensor, y: Tensor, state: AttentionState | None = None, mask: Tensor | None = None
    ) -> AttentionState:
        """Return the state of the points x, y together with those of `state`. A point is ignored where `mask` (B, N)
        bool is True.

        Under `torch.no_grad()` points are embedded a chunk at a time, so memory does not depend on their number.
        """
        self._check(x, y, mask=mask, values=False)
        if torch.is_grad_enabled() or x.shape[1] <= CHUNK:
            return self.blocks.read(self._embedded(*without_masked(x, y, mask)), state, key_padding_mask=mask)
        xs, ys = x.split(CHUNK, 1), y.split(CHUNK, 1)
        masks = [None] * len(xs) if mask is None else mask.split(CHUNK, 1)
        for some_x, some_y, ignored in zip(xs, ys, masks, strict=True):
            embedded = self._embedded(*without_masked(some_x, some_y, ignored))
            state = self.blocks.read(embedded, state, key_padding_mask=ignored)
        assert state is not None  # a split returns at least one chunk
        return state

    def forget(self, state: AttentionState, x: Tensor, y: Tensor) -> AttentionState:
        """Return the state without the points x, y, which must be part of it, in time O(these points).

        If this loses more than half of the digits, there is a `RuntimeWarning`: call `condition` on the remaining
        points instead.
        """
        self._known(state)
        self._check(x, y)
        left = self.blocks.unread(self._embedded(x, y), state)
        if not left.reliable.all():
            lost = int((~left.reliable).sum())
            warnings.warn(
                f"state: {lost} of its {left.reliable.numel()} rows lost half of their digits; call condition with "
                "the points that are left",
                RuntimeWarning,
                stacklevel=2,
            )
        return left.state

    def predict(self, state: AttentionState, target_x: Tensor) -> Distribution:
        result: Distribution = self.head(self._features(state, target_x))
        return result

    def forward(self, context_x: Tensor, context_y: Tensor, target_x: Tensor) -> Distribution:
        self._check(context_x, context_y, of="context_")
        self._check(target_x, batch=context_x.shape[0], of="target_")
        if not torch.is_grad_enabled() and context_x.shape[1] > CHUNK:  # in constant memory
            return self.predict(self.condition(context_x, context_y), target_x)
        latents = self.blocks(self._embedded(context_x, context_y), self.latents, all_blocks=True)
        result: Distribution = self.head(self.decoder(target_x, latents))
        return result

    def prefix_log_prob(self, x: Tensor, y: Tensor) -> Tensor:
        self._check(x, y)
        states = prefix_states(self.blocks, self._embedded(x[:, :-1], y[:, :-1]))
        target_x, target_y = (points[:, 1:].flatten(0, 1).unsqueeze(1) for points in (x, y))
        predicted = self.head(self.decoder(target_x, self.blocks.retrieve(self.latents, states, all_blocks=True)))
        return joint_log_prob(predicted, target_y).view(x[:, 1:].shape[:2])

    def _embedded(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.embedding(torch.cat([x, y], -1))
        return result

    def _features(self, state: AttentionState, target_x: Tensor) -> Tensor:
        """Return the features (B, M, dim) of the targets."""
        self._check(target_x, batch=self._known(state).lse.shape[1], of="target_")
        result: Tensor = self.decoder(target_x, self.blocks.retrieve(self.latents, state, all_blocks=True))
        return result


class CMANPAND(Joint, CMANP):
    """A CMANP with a joint distribution over blocks of targets, each block given the blocks before it.

    AND means "autoregressive not diagonal". Memory is constant in the context and linear in the targets. In training,
    all targets are one block (`loss`), as in the authors' code; likelihoods and samples use blocks of `block_size`. If
    a block is smaller than every block in training, its deviations are too small: a single target gets about half of
    the correct deviation. Source: the paper of `CMANP`, section 4.3.

    Args:
        block_size: b_Q, the number of targets that are predicted jointly.
        rank: columns of the factor's projection, for each output dimension.
        projection_depth: linear layers of that projection.
        covariance: "cholesky": the projection gives a factor of the covariance; "low-rank": it gives a covariance of
            this rank, and another perceptron the diagonal that is added. The published code has both.
        The other arguments are those of `CMANP`.

    >>> model = cmab_models.CMANPAND(1, 1, dim=16, num_latents=8, num_heads=2, depth=2).eval()
    >>> x, y, target_x, target_y = torch.randn(4, 3, 12, 1)
    >>> model(x, y, target_x).covariance_matrix.shape, model.log_prob(x, y, target_x, target_y).shape
    (torch.Size([3, 12, 12]), torch.Size([3]))
    """

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
        num_block_latents: int | None = None,
        block_size: int = 5,
        rank: int = 20,
        projection_depth: int = 4,
        residual: str = "normed",
        covariance: str = "cholesky",
    ) -> None:
        sizes = dim, num_latents, num_heads, depth, ff_dim, embedding_depth
        super().__init__(dim_x, dim_y, *sizes, bound_std, num_block_latents, residual)
        self.block_size = block_size
        hidden = 2 * dim if ff_dim is None else ff_dim
        self.head = JointHead(dim, num_heads, hidden, dim_y, rank, projection_depth, bound_std, covariance)
