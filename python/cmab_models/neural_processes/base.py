"""The common part of all neural processes: a model reads a context, then predicts the values at targets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution

from cmab_kernels.nn.inputs import check_features
from cmab_kernels.runtime.checks import check_count, check_dense, kind_of, mismatch, refuse_not_finite

from ..precision import in_single, weight_of
from ..pretrained import Pretrained
from .likelihood import joint_log_prob, observed

if TYPE_CHECKING:
    from typing import Self


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


class PaddedBatch(NamedTuple):
    """Functions with sets of different sizes: a `Batch` with masks.

    >>> sizes = ((9, 4), (5, 7))
    >>> some = [Batch(*(torch.randn(1, n, 1) for n in (points, points, asked, asked))) for points, asked in sizes]
    >>> padded = PaddedBatch.pad(some)
    >>> padded.context_x.shape, padded.target_mask.sum(1)
    (torch.Size([2, 9, 1]), tensor([3, 0]))
    >>> model = cmab_models.CNP(1, 1)
    >>> alone = torch.stack([model.loss(batch) for batch in some])
    >>> torch.allclose(model.loss(padded), alone.mean(), atol=1e-5)
    True
    """

    context_x: Tensor
    """(B, N, dim_x)"""
    context_y: Tensor
    """(B, N, dim_y)"""
    target_x: Tensor
    """(B, M, dim_x)"""
    target_y: Tensor
    """(B, M, dim_y)"""
    context_mask: Tensor
    """(B, N) bool, True where there is no point"""
    target_mask: Tensor
    """(B, M) bool, True where there is no target"""

    @classmethod
    def pad(cls, batches: Sequence[Batch]) -> Self:
        """Return all functions of some batches as one batch, padded with zeros to the largest sets."""
        if not batches:
            raise ValueError(mismatch("batches", "none", "at least one"))
        if any(isinstance(batch, PaddedBatch) for batch in batches):
            raise TypeError(mismatch("batches", "a PaddedBatch", "batches without masks"))
        (x, mask), (y, _), (target_x, target_mask), (target_y, _) = (
            _padded([batch[i] for batch in batches]) for i in range(len(Batch._fields))
        )
        return cls(x, y, target_x, target_y, mask, target_mask)


def _padded(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return sets (B_i, N_i, C) as one tensor (sum of B_i, largest N_i, C), and a mask of its padding."""
    most = max(part.shape[1] for part in parts)
    values = torch.cat([F.pad(part, (0, 0, 0, most - part.shape[1])) for part in parts])
    sizes = torch.cat([torch.full((len(part), 1), part.shape[1], device=part.device) for part in parts])
    return values, torch.arange(most, device=values.device) >= sizes


class NeuralProcess(Pretrained):
    """Base class of models that predict the values of a function at targets from points of the function.

    `condition` reads points into a state, all at once or in pieces, and `predict` answers from the state. Before the
    first point, the state is None. The state of `CMANP` and `CNP` has constant size; the state of the other models
    holds all points.

    Shapes: x (B, N, dim_x), y (B, N, dim_y), target_x (B, M, dim_x), all in the model's dtype. A wrong shape raises a
    `ValueError`. A wrong dtype, or an argument that is not a tensor, raises a `TypeError`. On a CPU, a NaN or an
    infinity raises a `ValueError` too, except in masked points. On a GPU values are not checked, because the program
    would have to wait. There, a NaN makes the predictions or likelihoods of its function NaN. A model in bfloat16 or
    float16 returns predictions and likelihoods in float32.

    A NaN in target_y is not an error: this output of the target is missing. The likelihood is that of the other
    outputs.

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
    joint: ClassVar[bool] = False
    """Whether `predict` returns one normal distribution of the values of all targets."""
    block_size: int | None = None
    """The number of targets that are predicted jointly in autoregressive likelihoods and samples; None: all targets at
    once."""

    @abstractmethod
    def condition(self, x: Tensor, y: Tensor, state: Any = None, mask: Tensor | None = None) -> Any:
        """Return the state of the points in `state` and the points x, y, which have the same batch size. A point is
        ignored where `mask` (B, N) bool is True.

        The values of ignored points do not matter; they may be NaN.
        """

    @abstractmethod
    def forget(self, state: Any, x: Tensor, y: Tensor) -> Any:
        """Return the state without the points x, y, which must be part of it."""

    @abstractmethod
    def predict(self, state: Any, target_x: Tensor) -> Distribution:
        """Return the distribution of the values at the targets.

        The distribution is a `Normal` of batch shape (B, M, dim_y), or a `MultivariateNormal` over all M dim_y values,
        ordered by target, or a `Mixture` of normal distributions, or a `Chain` of them.
        """

    def forward(self, context_x: Tensor, context_y: Tensor, target_x: Tensor) -> Distribution:
        """Return `predict` after `condition`."""
        return self.predict(self.condition(context_x, context_y), target_x)

    def log_prob(
        self,
        context_x: Tensor,
        context_y: Tensor,
        target_x: Tensor,
        target_y: Tensor,
        context_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        *,
        block_size: int | None = None,
    ) -> Tensor:
        """Return the log-likelihood (B,) of the targets given the context: summed over output dimensions, mean over
        targets.

        Points are ignored where `context_mask` (B, N) bool is True, and targets where `target_mask` (B, M) is True or
        all outputs are NaN; the other values of these may be anything. Each function then has the likelihood that it
        has alone (`PaddedBatch`). If only some outputs of a target are NaN, the other outputs count.

        Targets are predicted in blocks of `block_size`, or of the model's own block size. Masked targets count towards
        the size of a block. Each block becomes context of the next block, except targets with a missing output. The
        mean over no targets is 0. This 0, and the likelihoods of an empty batch, have a backward pass: all gradients
        are 0.
        """
        context_x, context_y, target_x, target_y, there = self._given(
            context_x, context_y, target_x, target_y, context_mask, target_mask
        )
        targets = target_x.shape[1]
        counted = max(targets, 1) if there is None else there.any(-1).sum(1).clamp(min=1)
        size = self._block_size(block_size, targets)
        if size >= targets and context_mask is None and (there is None or not self.joint):
            return joint_log_prob(self(context_x, context_y, target_x), target_y, there) / counted
        state = self.condition(context_x, context_y, mask=context_mask)
        total = in_single(target_y.new_zeros(target_y.shape[0]))
        for first in range(0, max(targets, 1), size):
            block = slice(first, first + size)
            x, y, some = target_x[:, block], target_y[:, block], None if there is None else there[:, block]
            predicted = self._predicted(state, x, None if some is None else ~some.any(-1))
            total = total + joint_log_prob(predicted, y, some)
            if first + size < targets:
                state = self.condition(x, y, state, None if some is None else ~some.all(-1))
        return total / counted

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
        self._check(target_x, batch=context_x.shape[0], of="target_")
        state, targets, drawn = self.condition(context_x, context_y), target_x.shape[1], []
        for x in target_x.split(self._block_size(block_size, targets), 1):
            drawn.append(self.predict(state, x).sample().view(*x.shape[:2], self.dim_y).to(x.dtype))
            state = self.condition(x, drawn[-1], state)
        return torch.cat(drawn, 1)

    def loss(self, batch: Batch | PaddedBatch) -> Tensor:
        """Return the mean negative log-likelihood of a batch, with all targets at once.

        It is 0, with gradients of 0, if the batch has no functions or no targets. A function without targets counts
        with a likelihood of 0."""
        parts = PaddedBatch(*batch) if len(batch) == len(PaddedBatch._fields) else Batch(*batch)
        self._check(parts.target_x, of="target_", values=False)
        found = self.log_prob(*parts, block_size=max(parts.target_x.shape[1], 1))
        return -(found.mean() if len(found) else found.sum())

    def _predicted(self, state: Any, target_x: Tensor, mask: Tensor | None) -> Distribution:
        """Return the distribution of the targets that `mask` does not ignore. A mask matters only if the distribution
        is `joint`."""
        return self.predict(state, target_x)

    def _given(
        self,
        context_x: Tensor,
        context_y: Tensor,
        target_x: Tensor,
        target_y: Tensor,
        context_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Check the arguments of the public methods. Return the points and targets, with zeros in place of values that
        do not count, and a mask (B, M, dim_y) of the target values that count, or None if all of them count."""
        self._check(context_x, context_y, mask=context_mask, of="context_", values=False)
        self._check(target_x, target_y, mask=target_mask, batch=context_x.shape[0], of="target_", values=False)
        context_x, context_y = without_masked(context_x, context_y, context_mask, of="context_")
        values, there = observed(target_y, target_mask)
        target_x, values = without_masked(target_x, values, target_mask, of="target_")
        return context_x, context_y, target_x, values, there

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
        `values=False`, `without_masked` checks the values instead. It knows which points count, and `CMANP` passes it
        the points in chunks.
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
            _check_mask(mask, x, of)
        if batch not in (None, x.shape[0]):
            raise ValueError(
                mismatch(f"{of}x", f"shape {tuple(x.shape)}", f"batch {batch}, that of the points it goes with")
            )
        if values:
            refuse_not_finite(**given)


def _check_mask(mask: Tensor, x: Tensor, of: str) -> None:
    name = f"{of}mask"
    if not isinstance(mask, Tensor):
        raise TypeError(mismatch(name, kind_of(mask), "a torch.Tensor of bool with True = ignore"))
    check_dense(name, mask)
    if mask.dtype != torch.bool or mask.shape != x.shape[:2] or mask.device != x.device:
        given = f"{mask.dtype} of shape {tuple(mask.shape)} on {mask.device}"
        allowed = f"torch.bool of shape {tuple(x.shape[:2])} on {x.device}, as {of}x has"
        raise ValueError(mismatch(name, given, allowed))


def without_masked(x: Tensor, y: Tensor, mask: Tensor | None, of: str = "") -> tuple[Tensor, Tensor]:
    """Return the points with zeros in place of ignored points, because a NaN times a weight or gradient of 0 would be a
    NaN.

    On a CPU, a NaN or an infinity in the other points raises a `ValueError`.
    """
    if mask is not None:
        ignored = mask.unsqueeze(-1)
        x, y = x.masked_fill(ignored, 0.0), y.masked_fill(ignored, 0.0)
    refuse_not_finite(**{f"{of}x": x, f"{of}y": y})
    return x, y
