"""The autoregressive Transformer Neural Process: each target is predicted from the context and the targets before it.

The tests compare its results with outputs of the published code, https://github.com/tung-nd/TNP-pytorch.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from cmab_kernels.nn.multihead import torchs_attention
from cmab_kernels.runtime.tracing import has_values

from .family import noise
from .likelihood import Mixture
from .parts import NormalHead, perceptron, point_embedding
from .points import KeepsPoints, Points
from .tnp import refuse_no_points

PAST_NOISE = 0.05
"""The deviation of the noise that training adds to earlier targets if deviations are bounded, as in the published
code."""


class Chain(Mixture):
    """Values of targets in their order: those of a target are normal, given the values of the targets before it.

    `log_prob` (B, M) holds the terms of the chain, whose sum over the targets is the joint log-density, in one pass.
    `sample` draws target after target. `mean`, `variance` and `stddev` (B, M, dim_y) are those of each target alone:
    exact for a single target, else estimated from `num_samples` functions, which are the same in every call.

    >>> model = cmab_models.TNPA(dim_x=1, dim_y=2, dim=16, num_heads=2, depth=2)
    >>> chain = model(torch.randn(3, 50, 1), torch.randn(3, 50, 2), torch.randn(3, 7, 1))
    >>> chain.log_prob(torch.randn(3, 7, 2)).shape, chain.sample().shape, chain.stddev.shape
    (torch.Size([3, 7]), torch.Size([3, 7, 2]), torch.Size([3, 7, 2]))
    """

    def __init__(self, model: TNPA, state: Points, target_x: Tensor) -> None:
        """Make what `model` predicts for `target_x` from `state`. The model is read when a method is called, for
        `mean`, `variance` and `stddev` at the first use of one of them."""
        self._model, self._state, self._target_x = model, state, target_x
        Distribution.__init__(self, target_x.shape[:2], torch.Size([model.dim_y]), validate_args=False)

    @cached_property
    def functions(self) -> Normal:  # type: ignore[override]  # Mixture has it as an attribute
        """The distribution (S, B, M, dim_y) of each target, given the earlier values of S drawn functions."""
        samples = self._model.num_samples if self._target_x.shape[1] > 1 else 1
        draws = noise("randn", samples, *self._shape, like=self._target_x, fresh=False)
        return self._model._drawn(self._state, self._target_x, draws)[1]

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 - torch's own default
        shape = torch.Size(sample_shape)
        draws = noise("randn", math.prod(shape), *self._shape, like=self._target_x, fresh=True)
        with torch.no_grad():
            return self._model._drawn(self._state, self._target_x, draws)[0].view(*shape, *self._shape)

    def log_prob(self, value: Tensor, there: Tensor | None = None) -> Tensor:
        """Return the log-density (B, M) of each target given those before it; of the outputs where `there` is True, if
        given. A target is not read by later ones if one of its outputs is missing. Samples (..., B, M, dim_y) have
        (..., B, M)."""
        if value.dim() > 3:
            each = torch.stack([self.log_prob(sample, there) for sample in value.flatten(0, -4)])
            return each.unflatten(0, value.shape[:-3])
        unread = None if there is None else ~there.all(-1)
        each = self._model._given_earlier(self._state, self._target_x, value, unread).log_prob(value)
        return (each if there is None else each.masked_fill(~there, 0.0)).sum(-1)

    @property
    def _shape(self) -> torch.Size:
        return self.batch_shape + self.event_shape


class Read(NamedTuple):
    """Rows that later rows attend to: the inputs (B, N, dim) of each layer, and which rows are ignored (B, N), if any
    is."""

    inputs: list[Tensor]
    ignored: Tensor | None


class ReadingLayer(nn.Module):
    """A post-norm Transformer layer whose rows (B, T, dim) attend to given rows (B, N, dim)."""

    def __init__(self, dim: int, num_heads: int, ff_dim: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.feed_forward = perceptron(dim, ff_dim, dim, 2)
        self.norm, self.feed_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, rows: Tensor, read: Tensor, ignored: Tensor | None = None, later: Tensor | None = None) -> Tensor:
        """Return the rows after attention over `read`, except rows that are `ignored` (B, N), or `later` (T, N)."""
        if not rows.numel():  # torch's attention may raise without rows; a row of zeros and an empty sum keep the graph
            nothing = rows.new_zeros(1, 1, rows.shape[-1])
            return rows + read[:, :0].sum(1, keepdim=True) + self.forward(nothing, nothing).flatten()
        masks = {"key_padding_mask": ignored, "attn_mask": later}
        attended = torchs_attention.call(self.attention, rows, read, read, **masks, need_weights=False)[0]
        rows = self.norm(rows + attended)
        result: Tensor = self.feed_norm(rows + self.feed_forward(rows))
        return result


class TNPA(KeepsPoints):
    """A Transformer Neural Process whose prediction of a target also depends on the values of the targets before it.

    Points of the context attend to each other. In training and in likelihoods, targets are there twice, in one pass:
    with their values, to be read by later targets, and without, to be predicted. The distribution is a `Chain`, so
    likelihoods are joint, and depend on the order of the targets. A sample takes a step for each target, which reads
    the rows of the steps before it. Time is quadratic in the context and in the targets, and the context must not be
    empty. Source: Transformer Neural Processes (Nguyen and Grover, ICML 2022), the autoregressive form.

    As in the published code, training with `bound_std` adds noise of deviation 0.05, from torch's global generator, to
    the values that later targets read.

    Args:
        num_samples: functions from which the deviation of each target alone is estimated.
        The other arguments are those of `TNPD`.

    >>> model = cmab_models.TNPA(dim_x=1, dim_y=1, dim=16, num_heads=2, depth=2)
    >>> x, y, target_x = torch.randn(3, 50, 1), torch.randn(3, 50, 1), torch.randn(3, 7, 1)
    >>> model.log_prob(x, y, target_x, torch.randn(3, 7, 1)).shape, model.sample(x, y, target_x).shape
    (torch.Size([3]), torch.Size([3, 7, 1]))
    """

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
        num_samples: int = 50,
    ) -> None:
        super().__init__()
        hidden = 2 * dim if ff_dim is None else ff_dim
        self.dim_x, self.dim_y, self.dim, self.num_samples = dim_x, dim_y, dim, num_samples
        self.embedding = point_embedding(dim_x + dim_y, dim, embedding_depth)
        self.layers = nn.ModuleList(ReadingLayer(dim, num_heads, hidden) for _ in range(depth))
        self.head = NormalHead(dim, hidden, dim_y, bound_std)

    def predict(self, state: Points, target_x: Tensor) -> Chain:
        self._check(target_x, batch=self._known(state).ignored.shape[0], of="target_")
        refuse_no_points(state)
        return Chain(self, state, target_x)

    def _given_earlier(self, state: Points, target_x: Tensor, values: Tensor, unread: Tensor | None) -> Normal:
        """Return the distribution (B, M, dim_y) of each target, given the values of the targets before it that are not
        `unread` (B, M)."""
        values = values.to(target_x.dtype)
        if self.training and self.head.bound_std:
            values = values + PAST_NOISE * torch.randn_like(values)
        place = torch.arange(target_x.shape[1], device=target_x.device)
        # A target with its value attends to itself too. The copy without it must not, or it would see its own value.
        later = torch.cat([place > place[:, None], place >= place[:, None]])
        features, _ = self._stepped(self._context(state), torch.cat([target_x, values], -1), target_x, unread, later)
        result: Normal = self.head(features)
        return result

    def _drawn(self, state: Points, target_x: Tensor, draws: Tensor) -> tuple[Tensor, Normal]:
        """Return values (S, B, M, dim_y) of functions from standard normal `draws` of this shape, and the distribution
        of each value given the earlier ones of its function."""
        samples, batch, targets = draws.shape[:3]
        context, x, draws = self._context(state), target_x.repeat(samples, 1, 1), draws.flatten(0, 1)
        ignored = None if context.ignored is None else context.ignored.repeat(samples, 1)
        read = Read([each.repeat(samples, 1, 1) for each in context.inputs], ignored)
        point, found = torch.cat([x, draws], -1)[:, :0], []
        for i in range(max(targets, 1)):
            asked = x[:, i : i + 1]
            features, read = self._stepped(read, point, asked)
            given: Normal = self.head(features)
            value = given.mean + given.stddev * draws[:, i : i + 1]
            point = torch.cat([asked, value.to(x.dtype)], -1)
            found.append((value, given.mean, given.stddev))
        value, mean, stddev = (torch.cat(each, 1).unflatten(0, (samples, batch)) for each in zip(*found, strict=True))
        return value, Normal(mean, stddev, validate_args=False)

    def _context(self, state: Points) -> Read:
        shape = state.ignored.shape[0], 0, self.dim
        nothing = Read([state.x.new_zeros(shape) for _ in self.layers], None)
        ignored = None if has_values(state.ignored) and not state.ignored.any() else state.ignored
        return self._stepped(nothing, torch.cat([state.x, state.y], -1), state.x[:, :0], ignored)[1]

    def _stepped(
        self, read: Read, points: Tensor, asked: Tensor, unread: Tensor | None = None, later: Tensor | None = None
    ) -> tuple[Tensor, Read]:
        """Return features (B, Q, dim) of the targets `asked` (B, Q, dim_x), and `read` with the rows of more points
        (B, P, dim_x + dim_y).

        Points and targets attend to all that is read, and to these points, except those that are `unread` (B, P), or
        `later` (P + Q, P) than themselves.
        """
        batch, count, known = *points.shape[:2], read.inputs[0].shape[1]
        unvalued = torch.cat([asked, asked.new_zeros(*asked.shape[:2], self.dim_y)], -1)
        rows, inputs = self.embedding(torch.cat([points, unvalued], 1)), []
        ignored = None
        if read.ignored is not None or unread is not None:
            both = (read.ignored, known), (unread, count)
            nothing = torch.zeros(batch, known + count, dtype=torch.bool, device=rows.device)
            ignored = torch.cat([nothing[:, :size] if mask is None else mask for mask, size in both], 1)
        if later is not None:
            later = torch.cat([later.new_zeros(later.shape[0], known), later], 1)
        for layer, earlier in zip(self.layers, read.inputs, strict=True):
            inputs.append(torch.cat([earlier, rows[:, :count]], 1))
            rows = layer(rows, inputs[-1], ignored, later)
        return rows[:, count:], Read(inputs, ignored)
