"""What all neural processes have in common: a context is read, and asked for the values at targets."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal

from cmab_kernels.nn.inputs import check_features
from cmab_kernels.runtime.checks import check_count, check_dense, kind_of, refuse_not_finite, wrong

from ..precision import in_single, weight_of
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

    Shapes: x (B, N, dim_x), y (B, N, dim_y), target_x (B, M, dim_x), all in the model's dtype. A wrong shape is a `ValueError`, a wrong
    dtype or anything but a tensor a `TypeError`. On a CPU a NaN or an infinity is a `ValueError` too, but for points that are masked: a
    target whose value is missing has no likelihood. On a GPU values are not read, since the program would wait; there a NaN makes the
    predictions or likelihoods of its function NaN. Those of a model in bfloat16 or float16 are float32.

    >>> model = cmab_models.CMANP(dim_x=1, dim_y=2, dim=16, num_latents=8, num_heads=2, depth=2)
    >>> x, y, target_x, target_y = torch.randn(3, 50, 1), torch.randn(3, 50, 2), torch.randn(3, 7, 1), torch.randn(3, 7, 2)
    >>> model.log_prob(x, y, target_x, target_y).shape, model.sample(x, y, target_x, block_size=1).shape
    (torch.Size([3]), torch.Size([3, 7, 2]))
    """

    dim_x: int
    dim_y: int
    state_type: ClassVar[type[tuple[Any, ...]]]
    """What `condition` returns."""
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
        The mean over no targets is 0. That and the likelihoods of a batch of 0 have a backward pass: all gradients are 0.
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

        Its mean is a loss at every length of the context; `CMANP` and `IncTNP` compute it in one pass over the points. Of less than two
        points there is nothing to predict, and the result (B, 0) has a backward pass all the same.
        """
        self._check(x, y)
        if x.shape[1] < 2:
            known_x, known_y = (F.pad(part, (0, 0, 0, 1))[:, :1] for part in (x, y))  # of none some models predict nothing: one of zeros
            return self.log_prob(known_x, known_y, x[:, :0], y[:, :0]).unsqueeze(1)[:, :0]
        state, found = None, []
        for i in range(1, x.shape[1]):
            state = self.condition(x[:, i - 1 : i], y[:, i - 1 : i], state)
            found.append(joint_log_prob(self.predict(state, x[:, i : i + 1]), y[:, i : i + 1]))
        return torch.stack(found, 1)

    @torch.no_grad()
    def sample(self, context_x: Tensor, context_y: Tensor, target_x: Tensor, *, block_size: int | None = None) -> Tensor:
        """Return one draw (B, M, dim_y) of the values at the targets, blocks of them given the blocks before."""
        self._check(context_x, context_y, of="context_")
        self._check(target_x, batch=len(context_x), of="target_")
        state, targets, drawn = self.condition(context_x, context_y), target_x.shape[1], []
        for x in target_x.split(self._block_size(block_size, targets), 1):
            drawn.append(self.predict(state, x).sample().view(*x.shape[:2], self.dim_y).to(x.dtype))
            state = self.condition(x, drawn[-1], state)
        return torch.cat(drawn, 1)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean negative log-likelihood of a batch, all targets at once; 0, with gradients of 0, if it is of no functions or no
        targets."""
        batch = Batch(*batch)
        self._check(batch.target_x, of="target_")
        found = self.log_prob(*batch, block_size=max(batch.target_x.shape[1], 1))
        return -(found.mean() if len(found) else found.sum())

    def _block_size(self, asked: int | None, targets: int) -> int:
        return check_count("block_size", self.block_size or max(targets, 1) if asked is None else asked)

    def _known(self, state: Any) -> Any:
        """Return a state; raise `TypeError` for what `condition` does not return."""
        if not isinstance(state, self.state_type):
            raise TypeError(wrong("state", f"is {kind_of(state)}", f"what `condition` returns is needed, of {self.state_type.__name__}"))
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
        """Raise unless x is (B, N, dim_x), y, if there is one, (B, N, dim_y) and mask (B, N) bool, and values are finite.

        `batch` is B of a state or a context, and `of` says what x and y belong to. `values=False` leaves these to `without_masked`, which
        knows the points that count, and in `CMANP` gets them in chunks.
        """
        given = {f"{of}x": x} | {f"{of}y": y for y in values_of_x}
        weight = weight_of(self)
        check_features(f"{of}x", x, "(batch, points, dim_x)", (3,), self.dim_x, weight)
        for y in values_of_x:
            check_features(f"{of}y", y, "(batch, points, dim_y)", (3,), self.dim_y, weight)
            if y.shape[:2] != x.shape[:2]:
                allowed = f"{(*x.shape[:2], self.dim_y)} is needed, as {of}x has shape {tuple(x.shape)}"
                raise ValueError(wrong(f"{of}y", f"has shape {tuple(y.shape)}", allowed))
        if mask is not None:
            _check_mask(mask, x)
        if batch not in (None, len(x)):
            raise ValueError(wrong(f"{of}x", f"has shape {tuple(x.shape)}", f"what it goes with has batch {batch}"))
        if values:
            refuse_not_finite(**given)


def _check_mask(mask: Tensor, x: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(wrong("mask", f"is {kind_of(mask)}", "a torch.Tensor of bool is needed, True = ignore"))
    check_dense("mask", mask)
    if mask.dtype != torch.bool or mask.shape != x.shape[:2] or mask.device != x.device:
        given = f"is {mask.dtype} of shape {tuple(mask.shape)} on {mask.device}"
        raise ValueError(wrong("mask", given, f"torch.bool of {tuple(x.shape[:2])} on {x.device}, as x, is needed"))


def without_masked(x: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return points with zeros for those that are ignored: a NaN times a weight of 0, or a gradient of 0, would be a NaN.

    On a CPU a NaN or an infinity in the others is a `ValueError`.
    """
    if mask is not None:
        ignored = mask.unsqueeze(-1)
        x, y = x.masked_fill(ignored, 0.0), y.masked_fill(ignored, 0.0)
    refuse_not_finite(x=x, y=y)
    return x, y


def joint_log_prob(predicted: Distribution, y: Tensor) -> Tensor:
    """Return the log-density (B,) of all values y (B, M, dim_y), 0 where there are none."""
    if not isinstance(predicted, MultivariateNormal):
        return predicted.log_prob(y).flatten(1).sum(1)
    values = y.flatten(1)
    if not y.numel():  # of which torch's raises: sums over nothing, with the graph of what was computed
        return (values - predicted.loc).sum(1) + predicted.scale_tril.sum((1, 2))
    return predicted.log_prob(values)
