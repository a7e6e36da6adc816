"""Likelihoods of targets with missing values, and the mixtures that some models predict."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, Normal

from cmab_kernels.runtime.checks import is_read
from cmab_kernels.runtime.tracing import has_values


class Mixture(Distribution):
    """A mixture of functions with equal weights: given the function, all values are independent and normal.

    `log_prob` (B, M) is the density of all outputs of one target, for each target alone, as the published code of
    neural processes with a latent variable or a bootstrap evaluates it. `sample` draws one function, the same for all
    targets. `mean`, `variance` and `stddev` (B, M, dim_y) are those of the mixture.

    >>> functions = torch.distributions.Normal(torch.randn(50, 3, 7, 2), torch.ones(50, 3, 7, 2))
    >>> mixture = cmab_models.neural_processes.Mixture(functions)
    >>> mixture.mean.shape, mixture.sample().shape, mixture.log_prob(torch.zeros(3, 7, 2)).shape
    (torch.Size([3, 7, 2]), torch.Size([3, 7, 2]), torch.Size([3, 7]))
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, functions: Normal) -> None:
        """Make the mixture of `functions`, of batch shape (S, B, M, dim_y)."""
        self.functions = functions
        shape = functions.batch_shape[1:]
        super().__init__(shape[:-1], shape[-1:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.functions.mean.mean(0)

    @property
    def variance(self) -> Tensor:
        return self.functions.variance.mean(0) + self.functions.mean.var(0, correction=0)

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 - torch's own default
        with torch.no_grad():
            drawn = self.functions.sample(sample_shape)
            at = len(torch.Size(sample_shape))
            shape = [*drawn.shape[:at], 1, drawn.shape[at + 1], 1, 1]
            which = torch.randint(drawn.shape[at], shape, device=drawn.device)
            return drawn.take_along_dim(which, at).squeeze(at)

    def log_prob(self, value: Tensor, there: Tensor | None = None) -> Tensor:
        """Return the log-density (B, M) of the outputs of each target, or (..., B, M) for samples (..., B, M, dim_y).
        With `there`, only the outputs where it is True count."""
        value = value.expand(torch.broadcast_shapes(value.shape, self.batch_shape + self.event_shape))
        each = self.functions.log_prob(value.unsqueeze(-4))
        total = (each if there is None else each.masked_fill(~there, 0.0)).sum(-1)
        return total.logsumexp(-3) - math.log(total.shape[-3])


def observed(y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return values (B, M, dim_y) with 0 in place of those that do not count, and which values count.

    A value does not count if it is NaN, or if `mask` (B, M) ignores its target. If all values are known to count, y is
    returned with None. On a GPU they are not read, because the host would wait.
    """
    missing = y.isnan()
    if mask is not None:
        missing = missing | mask.unsqueeze(-1)
    elif is_read(y) and not missing.any():
        return y, None
    return y.masked_fill(missing, 0.0), ~missing


def joint_log_prob(predicted: Distribution, y: Tensor, there: Tensor | None = None) -> Tensor:
    """Return the log-density (B,) of all values y (B, M, dim_y), or of those where `there` is True; 0 if there are no
    values."""
    if isinstance(predicted, Mixture):
        return predicted.log_prob(y, there).sum(1)
    if not isinstance(predicted, MultivariateNormal):
        each = predicted.log_prob(y)
        return (each if there is None else each.masked_fill(~there, 0.0)).flatten(1).sum(1)
    values = y.flatten(1)
    if not y.numel():  # torch's log_prob raises an error without values; sums over no values keep the graph
        return (values - predicted.loc).sum(1) + predicted.scale_tril.sum((1, 2))
    return predicted.log_prob(values) if there is None else _marginal(predicted, values, there)


def _marginal(predicted: MultivariateNormal, values: Tensor, there: Tensor) -> Tensor:
    """Return the log-density (B,) of the values (B, M dim_y) where `there` (B, M, dim_y) is True.

    Targets without any value must be independent of the others and have the deviation 1. `JointHead` predicts ignored
    targets in this way. If a target has only some of its values, the missing values are integrated out: they get the
    deviation 1 and no covariance. A QR decomposition then gives the factor of the remaining covariance.
    """
    missing = ~there.flatten(1)
    partial = (there != there.any(-1, keepdim=True)).flatten(1)
    loc, factor = predicted.loc, predicted.scale_tril
    values = torch.where(missing, loc, values)
    if not has_values(values) or (values.is_cuda and torch.cuda.is_current_stream_capturing()):
        values = values.masked_fill(partial, torch.nan)  # a trace cannot depend on whether a value is missing
    elif partial.any():
        kept = factor.masked_fill(missing.unsqueeze(-1), 0.0)
        stacked = torch.cat([kept, torch.diag_embed(missing.to(kept.dtype))], -1)
        upper = torch.linalg.qr(stacked.mT).R
        signs = upper.diagonal(dim1=-2, dim2=-1).sign()
        factor = (upper * signs.unsqueeze(-1)).mT
    found = MultivariateNormal(loc, scale_tril=factor, validate_args=False).log_prob(values)
    return found + 0.5 * math.log(2 * math.pi) * missing.sum(1).to(found.dtype)
