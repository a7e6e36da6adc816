"""The distribution of the time to the next event."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributions import Categorical, LogNormal, MixtureSameFamily

from ..precision import in_single

SHORTEST = 1e-10
"""The shortest time between events. Published data has events at equal times, where the density would be infinite."""


class LogNormalMixture(MixtureSameFamily):
    """A mixture of K log-normal distributions, with the survival function and the intensity that a point process needs.

    Its mean is sum_k w_k exp(mu_k + s_k^2 / 2), in closed form. Source: Intensity-Free Learning of Temporal Point Processes (Shchur et
    al., ICLR 2020), section 3.

    Args:
        logits: (..., K), the logarithms of the weights, up to a constant.
        loc, scale: (..., K), mean and standard deviation of the logarithm of each component.

    Parameters in bfloat16 or float16 become float32. A gap of 0, between events at equal times, counts as `SHORTEST`,
    1e-10.
    """

    def __init__(self, logits: Tensor, loc: Tensor, scale: Tensor) -> None:
        logits, loc, scale = in_single(logits), in_single(loc), in_single(scale)
        super().__init__(Categorical(logits=logits, validate_args=False), LogNormal(loc, scale, validate_args=False), validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of a gap `value`, in at least float32."""
        result: Tensor = super().log_prob(_longer_than_none(value))
        return result

    def log_survival(self, gap: Tensor) -> Tensor:
        """Return the log-probability that the next event has not come after a `gap`. It is accurate also for very small
        probabilities."""
        weights, components = self.mixture_distribution, cast("LogNormal", self.component_distribution)
        standardised = (_longer_than_none(gap).log().unsqueeze(-1) - components.loc) / components.scale
        return torch.logsumexp(weights.logits + torch.special.log_ndtr(-standardised), -1)

    def intensity(self, gap: Tensor) -> Tensor:
        """Return the intensity f / S after a `gap` without events: the rate of the next event, given that it has not
        come yet."""
        weights, components = self.mixture_distribution, cast("LogNormal", self.component_distribution)
        parts = weights.logits, components.loc, components.scale
        wide = LogNormalMixture(*(part.double() for part in parts))  # at large gaps both logarithms are large and nearly equal
        return (wide.log_prob(gap.double()) - wide.log_survival(gap.double())).exp().to(components.loc.dtype)


def _longer_than_none(gap: Tensor) -> Tensor:
    """Return gaps in at least float32, which can represent `SHORTEST`, with `SHORTEST` in place of 0."""
    gap = in_single(gap)
    return gap.masked_fill(gap == 0, SHORTEST)
