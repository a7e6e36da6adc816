"""The common part of all neural processes: a model reads a context, then predicts the values at targets."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal

from cmab_kernels.nn.inputs import check_features
from cmab_kernels.runtime.checks import check_count, check_dense, kind_of, mismatch, refuse_not_finite

from ..precision import in_single, weight_of
from ..pretrained import Pretrained


class Batch(NamedTuple):
    """Functions as sets of points: a context from which a model learns each function, and targets to predict."""

    context_x: Tensor
    """(B, N, dim_x)"""
    context_y: Tensor
    """(B, N, dim_y)"""
    target_x: Tensor
    """(B, M, dim_x)"""
    target_y: Tensor
    """(B, M, dim_y)"""


class NeuralProcess(Pretrained):
    """Base class of models that predict the values of a function at targets from points of the function.

    `condition` reads points into a state, all at once or in pieces, and `predict` answers from the state. Before the
    first point, the state is None. The state of `CMANP` and `CNP` has constant size; the state of the other models
    holds all points.

    Shapes: x (B, N, dim_x), y (B, N, dim_y), target_x (B, M, dim_x), all in the model's dtype. A wrong shape raises a
    `ValueError`. A wrong dtype, or an argument that is not a tensor, raises a `TypeError`. On a CPU, a NaN or an
    infinity raises a `ValueError` too, except in masked points. This also holds for target values: a target without a
    value has no likelihood. On a GPU values are not checked, because the program would have to wait. There, a NaN makes
    the predictions or likelihoods of its function NaN. A model in bfloat16 or float16 returns predictions and
    likelihoods in float32.

    >>> model = cmab_models.CMANP(dim_x=1, dim_y=2, dim=16, num_latents=8, num_heads=2, depth=2)
    >>> x, y = torch.randn(3, 50, 1), torch.randn(3, 50, 2)
    >>> target_x, target_y = torch.randn(3, 7, 1), torch.randn(3, 7, 2)
    >>> model.log_prob(x, y, target_x, target_y).shape, model.sample(x, y, target_x, block_size=1).shape
    (torch.Size([3]), torch.Size([3, 7, 2]))
    """

    dim_x: int
    dim_y: int
    state_type: ClassVar[type[tuple[Any, ...]]]
    """The type of the state that `condition` returns."""
    block_size: int | None = None
    """The number of targets that are predicted jointly in autoregressive likelihoods and samples; None: all targets at
    once."""

    @abstractmethod
    def condition(self, x: Tensor, y: Tensor, state: Any = None, mask: Tensor | None = None) -> Any:
        """Return the state of the points x, y together with those of `state`, of the same batch. A point is ignored
        where `mask` (B, N) bool is True.

        The values of ignored points do not matter; they may be NaN.
        """

    @abstractmethod
    def forget(self, state: Any, x: Tensor, y: Tensor) -> Any:
        """Return the state without the points x, y, which must be part of it."""

    @abstractmethod
    def predict(self, state: Any, target_x: Tensor) -> Distribution:
        """Return the distribution of the values at the targets.

        The distribution is a `Normal` of batch shape (B, M, dim_y), or a `MultivariateNormal` over all M dim_y values,
        ordered by target.
        """

    def forward(self, context_x: Tensor, context_y: Tensor, target_x: Tensor) -> Distribution:
        """Return `predict` after `condition`."""
        return self.predict(self.condition(context_x, context_y), target_x)

    def log_prob(
        self, context_x: Tensor, context_y: Tensor, target_x: Tensor, target_y: Tensor, *, block_size: int | None = None
    ) -> Tensor:
        """Return the log-likelihood (B,) of the targets given the context: summed over output dimensions, mean over
        targets.

        With a `block_size`, or the model's own block size, this number of targets is predicted at a time, and each
        block becomes context of the next block. The mean over no targets is 0. This 0, and the likelihoods of an empty
        batch, have a backward pass: all gradients are 0.
        """
        self._check(context_x, context_y, of="context_")
        self._check(target_x, target_y, batch=len(context_x), of="target_")
        targets = target_x.shape[1]
        size = self._block_size(block_size, targets)
        if size >= targets:
            return joint_log_prob(self(context_x, context_y, target_x), target_y) / max(targets, 1)
        state, total = self.condition(context_x, context_y), in_single(target_y.new_zeros(target_y.shape[0]))
        for first in range(0, targets, size):
            x, y = target_x[:, first : first + size], target_y[:, first : first + size]
            total = total + joint_log_prob(self.predict(state, x), y)
            if first + size < targets:
                state = self.condition(x, y, state)
        return total / targets

    def prefix_log_prob(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log-likelihood (B, N - 1) of every point but the first, each given the points before it.

        The mean of the result is a loss at every length of the context. `CMANP` and `IncTNP` compute it in one pass
        over the points. With fewer than two points there is nothing to predict; the empty result (B, 0) still has a
        backward pass.
        """
        self._check(x, y)
        if x.shape[1] < 2:
            # Some models need at least one point, so they get a point of zeros.
            known_x, known_y = (F.pad(part, (0, 0, 0, 1))[:, :1] for part in (x, y))
            return self.log_prob(known_x, known_y, x[:, :0], y[:, :0]).unsqueeze(1)[:, :0]
        state, found = None, []
        for i in range(1, x.shape[1]):
            state = self.condition(x[:, i - 1 : i], y[:, i - 1 : i], state)
            found.append(joint_log_prob(self.predict(state, x[:, i : i + 1]), y[:, i : i + 1]))
        return torch.stack(found, 1)

    @torch.no_grad()
    def sample(
        self, context_x: Tensor, context_y: Tensor, target_x: Tensor, *, block_size: int | None = None
    ) -> Tensor:
        """Return one draw (B, M, dim_y) of the values at the targets. Each block of targets is drawn given the blocks
        before it."""
        self._check(context_x, context_y, of="context_")
        self._check(target_x, batch=len(context_x), of="target_")
        state, targets, drawn = self.condition(context_x, context_y), target_x.shape[1], []
        for x in target_x.split(self._block_size(block_size, targets), 1):
            drawn.append(self.predict(state, x).sample().view(*x.shape[:2], self.dim_y).to(x.dtype))
            state = self.condition(x, drawn[-1], state)
        return torch.cat(drawn, 1)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean negative log-likelihood of a batch, with all targets at once.

        It is 0, with gradients of 0, if the batch has no functions or no targets."""
        batch = Batch(*batch)
        self._check(batch.target_x, of="target_")
        found = self.log_prob(*batch, block_size=max(batch.target_x.shape[1], 1))
        return -(found.mean() if len(found) else found.sum())

    def _block_size(self, asked: int | None, targets: int) -> int:
        return check_count("block_size", self.block_size or max(targets, 1) if asked is None else asked)

    def _known(self, state: Any) -> Any:
        """Return the state; raise `TypeError` if `condition` cannot have returned it."""
        if not isinstance(state, self.state_type):
            raise TypeError(
                mismatch("state", kind_of(state), f"what `condition` returns, a {self.state_type.__name__}")
            )
        return state

    def _check(
        self,
        x: Tensor,
        *values_of_x: Tensor,
        mask: Tensor | None = None,
        batch: int | None = None,
        of: str = "",
        values: bool = True,
    ) -> None:
        """Raise unless x is (B, N, dim_x), y, if given, (B, N, dim_y), and mask (B, N) bool, and values are finite.

        `batch` is the B of a state or a context, and `of` names the object to which x and y belong. With
        `values=False`,
        The values are checked by `without_masked` instead: it knows which points count, and in `CMANP` it gets them in
            chunks.
        """
        given = {f"{of}x": x} | {f"{of}y": y for y in values_of_x}
        weight = weight_of(self)
        check_features(f"{of}x", x, "(batch, points, dim_x)", (3,), self.dim_x, weight)
        for y in values_of_x:
            check_features(f"{of}y", y, "(batch, points, dim_y)", (3,), self.dim_y, weight)
            if y.shape[:2] != x.shape[:2]:
                allowed = f"{(*x.shape[:2], self.dim_y)}, as {of}x has shape {tuple(x.shape)}"
                raise ValueError(mismatch(f"{of}y", f"shape {tuple(y.shape)}", allowed))
        if mask is not None:
            _check_mask(mask, x)
        if batch not in (None, len(x)):
            raise ValueError(
                mismatch(f"{of}x", f"shape {tuple(x.shape)}", f"batch {batch}, that of the points it goes with")
            )
        if values:
            refuse_not_finite(**given)


def _check_mask(mask: Tensor, x: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(mismatch("mask", kind_of(mask), "a torch.Tensor of bool with True = ignore"))
    check_dense("mask", mask)
    if mask.dtype != torch.bool or mask.shape != x.shape[:2] or mask.device != x.device:
        given = f"{mask.dtype} of shape {tuple(mask.shape)} on {mask.device}"
        raise ValueError(mismatch("mask", given, f"torch.bool of shape {tuple(x.shape[:2])} on {x.device}, as x has"))


def without_masked(x: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the points with zeros in place of ignored points, because a NaN times a weight or gradient of 0 would be a
    NaN.

    On a CPU, a NaN or an infinity in the other points raises a `ValueError`.
    """
    if mask is not None:
        ignored = mask.unsqueeze(-1)
        x, y = x.masked_fill(ignored, 0.0), y.masked_fill(ignored, 0.0)
    refuse_not_finite(x=x, y=y)
    return x, y


def joint_log_prob(predicted: Distribution, y: Tensor) -> Tensor:
    """Return the log-density (B,) of all values y (B, M, dim_y); 0 if there are no values."""
    if not isinstance(predicted, MultivariateNormal):
        return predicted.log_prob(y).flatten(1).sum(1)
    values = y.flatten(1)
    if not y.numel():  # torch's log_prob raises an error without values; sums over no values keep the graph
        return (values - predicted.loc).sum(1) + predicted.scale_tril.sum((1, 2))
    return predicted.log_prob(values)
