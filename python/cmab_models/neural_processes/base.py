"""What all neural processes have in common: a context is read, and asked for the values at targets."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal

from ..pretrained import Pretrained


class Batch(NamedTuple):
    """Functions as sets of points: a context to learn each from, and targets to predict."""

    context_x: Tensor
    """(B, N, dim_x)"""
    context_y: Tensor
    """(B, N, dim_y)"""
    target_x: Tensor
    """(B, M, dim_x)"""
    target_y: Tensor
    """(B, M, dim_y)"""


class NeuralProcess(Pretrained):
    """Base class of models that predict the values of a function at targets from points of it.

    `condition` reads points into a state, in pieces if they come in pieces, and `predict` answers from the state. The state of a new
    context is None before the first point. What a state is differs: of constant size for `CMANP` and `CNP`, all points for the others.

    Shapes: x (B, N, dim_x), y (B, N, dim_y), target_x (B, M, dim_x), all in the model's dtype; a wrong one is a `ValueError`.

    >>> model = cmab_models.CMANP(dim_x=1, dim_y=2, dim=16, num_latents=8, num_heads=2, depth=2)
    >>> x, y, target_x, target_y = torch.randn(3, 50, 1), torch.randn(3, 50, 2), torch.randn(3, 7, 1), torch.randn(3, 7, 2)
    >>> model.log_prob(x, y, target_x, target_y).shape, model.sample(x, y, target_x, block_size=1).shape
    (torch.Size([3]), torch.Size([3, 7, 2]))
    """

    dim_x: int
    dim_y: int
    block_size: int | None = None
    """How many targets are predicted jointly where likelihoods and samples are autoregressive; None: all at once."""

    @abstractmethod
    def condition(self, x: Tensor, y: Tensor, state: Any = None, mask: Tensor | None = None) -> Any:
        """Return the state of the points x, y and those of `state`, of the same batch; points where `mask` (B, N) bool is True are ignored.

        What these hold does not matter; it may be NaN.
        """

    @abstractmethod
    def forget(self, state: Any, x: Tensor, y: Tensor) -> Any:
        """Return the state without the points x, y, which are part of it."""

    @abstractmethod
    def predict(self, state: Any, target_x: Tensor) -> Distribution:
        """Return the distribution of the values at the targets.

        A `Normal` of batch shape (B, M, dim_y), or a `MultivariateNormal` over all M dim_y values, targets first.
        """

    def forward(self, context_x: Tensor, context_y: Tensor, target_x: Tensor) -> Distribution:
        """Return `predict` after `condition`."""
        return self.predict(self.condition(context_x, context_y), target_x)

    def log_prob(
        self, context_x: Tensor, context_y: Tensor, target_x: Tensor, target_y: Tensor, *, block_size: int | None = None
    ) -> Tensor:
        """Return the log-likelihood (B,) of the targets given the context: summed over output dimensions, mean over targets.

        With a `block_size`, or the model's own, targets are predicted that many at a time, and each block becomes context of the next.
        """
        self._check(context_x, context_y)
        self._check(target_x, target_y, batch=len(context_x))
        targets = target_x.shape[1]
        size = self._block_size(block_size, targets)
        if size >= targets:
            return joint_log_prob(self(context_x, context_y, target_x), target_y) / targets
        state, total = self.condition(context_x, context_y), target_y.new_zeros(target_y.shape[0])
        for first in range(0, targets, size):
            x, y = target_x[:, first : first + size], target_y[:, first : first + size]
            total = total + joint_log_prob(self.predict(state, x), y)
            if first + size < targets:
                state = self.condition(x, y, state)
        return total / targets

    def prefix_log_prob(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log-likelihood (B, N - 1) of every point but the first, each given the points before it.

        Its mean is a loss at every length of the context; `CMANP` and `IncTNP` compute it in one pass over the points.
        """
        self._check(x, y)
        state, found = None, []
        for i in range(1, x.shape[1]):
            state = self.condition(x[:, i - 1 : i], y[:, i - 1 : i], state)
            found.append(joint_log_prob(self.predict(state, x[:, i : i + 1]), y[:, i : i + 1]))
        return torch.stack(found, 1) if found else y.new_zeros(y.shape[0], 0)

    @torch.no_grad()
    def sample(self, context_x: Tensor, context_y: Tensor, target_x: Tensor, *, block_size: int | None = None) -> Tensor:
        """Return one draw (B, M, dim_y) of the values at the targets, blocks of them given the blocks before."""
        self._check(context_x, context_y)
        self._check(target_x, batch=len(context_x))
        state, targets, drawn = self.condition(context_x, context_y), target_x.shape[1], []
        for x in target_x.split(self._block_size(block_size, targets), 1):
            drawn.append(self.predict(state, x).sample().view(*x.shape[:2], self.dim_y))
            state = self.condition(x, drawn[-1], state)
        return torch.cat(drawn, 1)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean negative log-likelihood of a batch, all targets at once."""
        return -self.log_prob(*batch, block_size=batch.target_x.shape[1]).mean()

    def _block_size(self, asked: int | None, targets: int) -> int:
        size = self.block_size or max(targets, 1) if asked is None else asked
        if size < 1:
            raise ValueError(f"block_size is {size}; at least one target is predicted at a time")
        return size

    def _check(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None, batch: int | None = None) -> None:
        """Raise unless x is (B, N, dim_x), and y and mask, if given, (B, N, dim_y) and (B, N) bool; `batch`: B of a state or a context."""
        if x.dim() != 3 or x.shape[-1] != self.dim_x:
            raise ValueError(f"x has shape {tuple(x.shape)}; (batch, points, dim_x = {self.dim_x}) is needed")
        if y is not None and y.shape != (*x.shape[:2], self.dim_y):
            raise ValueError(f"y has shape {tuple(y.shape)}; {(*x.shape[:2], self.dim_y)}, as x has, is needed")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
            raise ValueError(f"mask is {mask.dtype} of shape {tuple(mask.shape)}; torch.bool of {tuple(x.shape[:2])}, as x has, is needed")
        if batch not in (None, len(x)):
            raise ValueError(f"x has shape {tuple(x.shape)}; what it goes with has batch {batch}")


def without_masked(x: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return points with zeros for those that are ignored: a NaN times a weight of 0, or a gradient of 0, would be a NaN."""
    if mask is None:
        return x, y
    ignored = mask.unsqueeze(-1)
    return x.masked_fill(ignored, 0.0), y.masked_fill(ignored, 0.0)


def joint_log_prob(predicted: Distribution, y: Tensor) -> Tensor:
    """Return the log-density (B,) of all values y (B, M, dim_y), 0 where there are none, of which torch's may raise."""
    if not y.numel():
        return y.new_zeros(len(y))
    if isinstance(predicted, MultivariateNormal):
        return predicted.log_prob(y.flatten(1))
    return predicted.log_prob(y).flatten(1).sum(1)
