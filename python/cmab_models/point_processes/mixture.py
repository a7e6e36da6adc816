"""The distribution of the time to the next event."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import Categorical, LogNormal, MixtureSameFamily

from cmab_kernels.runtime.checks import mismatch, not_a_tensor
from cmab_kernels.runtime.tracing import has_values

from ..precision import in_single

SHORTEST = 1e-10
"""The shortest time between events. Published data has events at equal times, where the density would be infinite."""
_LEAST, _MOST = 1e-300, 1 - 2.0**-53
"""Probabilities and densities below the first number count as this number; probabilities above the second count as
1."""
_HALVINGS = 64
"""Bisections of an interval of logarithms; float64 cannot resolve more."""


class LogNormalMixture(MixtureSameFamily):
    """A mixture of K log-normal distributions, with the survival function and the intensity that a point process needs.

    Its mean is sum_k w_k exp(mu_k + s_k^2 / 2), in closed form. Source: Intensity-Free Learning of Temporal Point
    Processes (Shchur et al., ICLR 2020), section 3.

    Args:
        logits: (..., K), the logarithms of the weights, up to a constant.
        loc, scale: (..., K), mean and standard deviation of the logarithm of each component.

    Parameters in bfloat16 or float16 become float32. A gap of 0, between events at equal times, counts as `SHORTEST`,
    1e-10.
    """

    def __init__(self, logits: Tensor, loc: Tensor, scale: Tensor) -> None:
        logits, loc, scale = in_single(logits), in_single(loc), in_single(scale)
        super().__init__(
            Categorical(logits=logits, validate_args=False),
            LogNormal(loc, scale, validate_args=False),
            validate_args=False,
        )

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> LogNormalMixture:
        """Return the same distribution with another batch shape, to which its own can be broadcast."""
        components = cast("LogNormal", self.component_distribution)
        parts = self.mixture_distribution.logits, components.loc, components.scale
        return LogNormalMixture(*(part.expand(*batch_shape, part.shape[-1]) for part in parts))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of a gap `value`, in at least float32."""
        result: Tensor = super().log_prob(_longer_than_none("value", value))
        return result

    def log_survival(self, gap: Tensor) -> Tensor:
        """Return the log-probability that the next event has not come after a `gap`. It is accurate also for very small
        probabilities."""
        weights, components = self.mixture_distribution, cast("LogNormal", self.component_distribution)
        standardised = (_longer_than_none("gap", gap).log().unsqueeze(-1) - components.loc) / components.scale
        return torch.logsumexp(weights.logits + torch.special.log_ndtr(-standardised), -1).clamp(max=0)

    def icdf(self, value: Tensor) -> Tensor:
        """Return the quantile of a probability `value` from 0 to 1: the next event comes before this gap with that
        probability. A gap that the dtype cannot hold is infinite, or 0.

        The quantile has no closed form. A bisection finds its logarithm in float64, between the quantiles of the
        components. Derivatives are those of the implicit function, up to the third.
        """
        if not isinstance(value, Tensor):
            raise TypeError(not_a_tensor("value", value))
        if has_values(value) and not ((value >= 0) & (value <= 1)).all():
            raise ValueError(
                mismatch("value", f"from {float(value.min())} to {float(value.max())}", "probabilities from 0 to 1")
            )
        components = cast("LogNormal", self.component_distribution)
        value = value.double().expand(torch.broadcast_shapes(value.shape, self.batch_shape))
        inside = value.clamp(_LEAST, _MOST)
        of_components = (
            components.loc.double() + components.scale.double() * torch.special.ndtri(inside).unsqueeze(-1)
        ).detach()
        low, high = of_components.amin(-1), of_components.amax(-1)
        for _ in range(_HALVINGS):
            middle = low + (high - low) / 2
            below = self._probability(middle).detach() < inside
            low, high = middle.where(below, low), high.where(below, middle)
        log_gap = high
        for _ in range(2):  # two Newton steps give the right derivatives up to the third; the value stays
            error = self._probability(log_gap) - inside
            log_gap = log_gap - (error - error.detach()) / self._density(log_gap).clamp(min=_LEAST)
        gap = log_gap.exp()
        return gap.where(value > 0, 0.0).where(value < 1, math.inf).to(components.loc.dtype)

    @property
    def median(self) -> Tensor:
        """The gap before which the next event comes with probability 1/2. Unlike the mean, it is always finite."""
        return self.icdf(torch.full((), 0.5, device=self.mixture_distribution.logits.device))

    @property
    def mean(self) -> Tensor:
        """The mean of the gap; infinite if the dtype cannot hold it."""
        return self._moment(1).exp().to(self.mixture_distribution.logits.dtype)

    @property
    def variance(self) -> Tensor:
        """The variance of the gap; infinite if the dtype cannot hold it."""
        mean, square = self._moment(1), self._moment(2)
        variance = square.exp() * -torch.expm1((2 * mean - square).clamp(max=0))
        return variance.where(square.exp().isfinite(), math.inf).to(self.mixture_distribution.logits.dtype)

    def _moment(self, power: int) -> Tensor:
        """Return the logarithm of the mean of a power of the gap, in float64."""
        components = cast("LogNormal", self.component_distribution)
        loc, scale = components.loc.double(), components.scale.double()
        # A weight that the dtype rounds to 0 may belong to a component of infinite mean.
        logs = power * loc + (power * scale) ** 2 / 2
        return torch.logsumexp(self.mixture_distribution.logits.double() + logs, -1)

    def limited_mean(self, limit: Tensor) -> Tensor:
        """Return the mean of the smaller of the gap and a `limit` > 0. Unlike the mean, it is always finite, and a
        component of small weight with a heavy tail changes it little."""
        if not isinstance(limit, Tensor):
            raise TypeError(not_a_tensor("limit", limit))
        if has_values(limit) and not ((limit > 0) & limit.isfinite()).all():
            raise ValueError(
                mismatch("limit", f"from {float(limit.min())} to {float(limit.max())}", "finite numbers > 0")
            )
        components = cast("LogNormal", self.component_distribution)
        loc, scale = components.loc.double(), components.scale.double()
        limit = limit.double().unsqueeze(-1)
        place = (limit.log() - loc) / scale
        below = (loc + scale**2 / 2 + torch.special.log_ndtr(place - scale)).exp()
        mean = below + (limit.log() + torch.special.log_ndtr(-place)).exp()  # ndtr is 0 below -8
        return (self._weights() * mean).sum(-1).to(components.loc.dtype)

    def _weights(self) -> Tensor:
        """Return the weights in float64. In float32 they do not add up to 1 well enough for quantiles near 1."""
        return self.mixture_distribution.logits.double().softmax(-1)

    def _standardised(self, log_gap: Tensor) -> Tensor:
        components = cast("LogNormal", self.component_distribution)
        return (log_gap.unsqueeze(-1) - components.loc.double()) / components.scale.double()

    def _probability(self, log_gap: Tensor) -> Tensor:
        """Return the probability, in float64, that the next event comes before a gap with this logarithm."""
        below = torch.special.erfc(self._standardised(log_gap) / -math.sqrt(2)) / 2  # torch's ndtr is 0 below -8
        return (self._weights() * below).sum(-1)

    def _density(self, log_gap: Tensor) -> Tensor:
        """Return the density of the logarithm of the gap, in float64."""
        scale = cast("LogNormal", self.component_distribution).scale.double()
        normal = (-(self._standardised(log_gap) ** 2) / 2).exp() / (scale * math.sqrt(2 * math.pi))
        return (self._weights() * normal).sum(-1)

    def draw(self, generator: torch.Generator | None = None) -> Tensor:
        """Return one gap (...) float64 of each distribution. Unlike `sample`, it takes a generator."""
        components = cast("LogNormal", self.component_distribution)
        weights = self.mixture_distribution.probs
        chosen = torch.multinomial(weights.reshape(-1, weights.shape[-1]), 1, generator=generator).view(
            *weights.shape[:-1], 1
        )
        loc, scale = (part.double().gather(-1, chosen).squeeze(-1) for part in (components.loc, components.scale))
        normal = torch.randn(loc.shape, dtype=loc.dtype, device=loc.device, generator=generator)
        return (loc + scale * normal).exp()

    def intensity(self, gap: Tensor) -> Tensor:
        """Return the intensity f / S after a `gap` without events: the rate of the next event, given that it has not
        come yet."""
        weights, components = self.mixture_distribution, cast("LogNormal", self.component_distribution)
        parts = weights.logits, components.loc, components.scale
        # At large gaps both logarithms are large and nearly equal.
        wide = LogNormalMixture(*(part.double() for part in parts))
        return (wide.log_prob(gap.double()) - wide.log_survival(gap.double())).exp().to(components.loc.dtype)


def _longer_than_none(name: str, gap: Tensor) -> Tensor:
    """Return gaps in at least float32, which can represent `SHORTEST`, with `SHORTEST` in place of 0."""
    if not isinstance(gap, Tensor):
        raise TypeError(not_a_tensor(name, gap))
    gap = in_single(gap)
    return gap.masked_fill(gap == 0, SHORTEST)
