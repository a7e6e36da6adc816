"""Neural processes with a latent variable: each value of it is one function."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from .cnp import KeepsTotal, Total
from .family import AttentiveEncoder, Everywhere, PooledEncoder, ValueDecoder, as_latent, noise
from .likelihood import Mixture
from .points import KeepsPoints, Points


class Latent(Everywhere):
    """Base class of models of a latent variable z that follows from the points.

    A prediction is a `Mixture` of `num_samples` functions, one for each value of z drawn given the context. The loss is
    an importance-weighted bound of the likelihood of all points: log mean_k p(y | z_k) p(z_k | context) / q(z_k | all
    points) for `num_train_samples` values of z. With one sample, it is the evidence lower bound (ELBO) with an exact
    divergence.
    """

    decoder: ValueDecoder
    num_samples: int
    num_train_samples: int

    def predict(self, state: Any, target_x: Tensor) -> Mixture:
        latent = self._latent(self._known(state))
        self._check(target_x, batch=latent.loc.shape[0], of="target_")
        draws = noise("randn", self.num_samples, 1, latent.loc.shape[1], like=latent.loc, fresh=False)
        return Mixture(self._functions(state, target_x, latent.loc + latent.scale * draws))

    def _objective(self, state: Any, full: Callable[[], Any], x: Tensor, y: Tensor, there: Tensor) -> Tensor:
        prior, posterior, count = self._latent(state), self._latent(full()), self.num_train_samples
        # In evaluation all functions have the same numbers, so the loss of a function does not depend on its batch.
        shape = count, x.shape[0] if self.training else 1, prior.loc.shape[1]
        z = posterior.loc + posterior.scale * noise("randn", *shape, like=prior.loc, fresh=self.training)
        each = self._functions(state, x, z).log_prob(y).masked_fill(~there, 0.0).sum((2, 3))
        if count == 1:
            return each[0] - kl_divergence(posterior, prior).sum(-1)
        weighted = each + (prior.log_prob(z) - posterior.log_prob(z)).sum(-1)
        return weighted.logsumexp(0) - math.log(count)

    def _functions(self, state: Any, target_x: Tensor, z: Tensor) -> Normal:
        """Return the predictions (S, B, M, dim_y) for values z (S, B, dim_latent) of the latent variable."""
        shape = *z.shape[:2], target_x.shape[1], -1
        features = self._representation(state, target_x).expand(shape)
        latents = z.to(target_x.dtype).unsqueeze(2).expand(shape)
        result: Normal = self.decoder(torch.cat([features, latents], -1), target_x.expand(shape))
        return result

    @abstractmethod
    def _latent(self, state: Any) -> Normal:
        """Return the distribution (B, dim_latent) of the latent variable given the points."""

    @abstractmethod
    def _representation(self, state: Any, target_x: Tensor) -> Tensor:
        """Return features of the targets (B, M, dim), or (B, 1, dim), that do not depend on the latent variable."""


class NP(Latent, KeepsTotal):
    """A neural process with a latent variable, and two means over the context: one for the latent variable, one for
    all predictions.

    Source: Neural Processes (Garnelo et al., 2018), in the form of the published code (`family`).

    Args:
        dim_x, dim_y: columns of x and y.
        dim: width of all layers.
        dim_latent: width of the latent variable.
        encoder_depth, pooled_depth: linear layers before and after the mean over the points, at least 2.
        decoder_depth: linear layers of the decoder, at least 2.
        num_samples: functions of a prediction.
        num_train_samples: values of the latent variable in the loss; 1 means the ELBO.

    The state of a context has constant size.

    >>> model = cmab_models.NP(dim_x=1, dim_y=1)
    >>> model(torch.randn(3, 50, 1), torch.randn(3, 50, 1), torch.randn(3, 7, 1)).mean.shape
    torch.Size([3, 7, 1])
    """

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        dim: int = 128,
        dim_latent: int = 128,
        encoder_depth: int = 4,
        pooled_depth: int = 2,
        decoder_depth: int = 3,
        num_samples: int = 50,
        num_train_samples: int = 4,
    ) -> None:
        super().__init__()
        self.dim_x, self.dim_y, self.num_samples, self.num_train_samples = dim_x, dim_y, num_samples, num_train_samples
        points = dim_x + dim_y
        self.encoder = PooledEncoder(points, dim, dim, encoder_depth, pooled_depth)
        self.latent_encoder = PooledEncoder(points, dim, 2 * dim_latent, encoder_depth, pooled_depth)
        self.decoder = ValueDecoder(dim + dim_latent, dim, dim_x, dim_y, decoder_depth)

    def _embedded(self, points: Tensor) -> Tensor:
        return torch.cat([part.points.layers(points) for part in (self.encoder, self.latent_encoder)], -1)

    def _latent(self, state: Total) -> Normal:
        return as_latent(self.latent_encoder.pooled(self._means(state)[1]))

    def _representation(self, state: Total, target_x: Tensor) -> Tensor:
        result: Tensor = self.encoder.pooled(self._means(state)[0]).unsqueeze(1)
        return result


class ANP(Latent, KeepsPoints):
    """A neural process with a latent variable, whose targets attend to the points.

    Source: Attentive Neural Processes (Kim et al., ICLR 2019), in the form of the published code (`family`).

    Args:
        num_heads: a divisor of dim.
        query_depth: linear layers of the coordinates of queries and keys, at least 2.
        The other arguments are those of `NP`.

    >>> model = cmab_models.ANP(dim_x=1, dim_y=1, dim=32, dim_latent=16)
    >>> model(torch.randn(3, 50, 1), torch.randn(3, 50, 1), torch.randn(3, 7, 1)).mean.shape
    torch.Size([3, 7, 1])
    """

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        dim: int = 128,
        dim_latent: int = 128,
        num_heads: int = 8,
        encoder_depth: int = 4,
        query_depth: int = 2,
        pooled_depth: int = 2,
        decoder_depth: int = 3,
        num_samples: int = 50,
        num_train_samples: int = 4,
    ) -> None:
        super().__init__()
        self.dim_x, self.dim_y, self.num_samples, self.num_train_samples = dim_x, dim_y, num_samples, num_train_samples
        sizes = 2 * dim_latent, encoder_depth, pooled_depth, num_heads
        self.encoder = AttentiveEncoder(dim_x, dim_y, dim, encoder_depth, query_depth, num_heads)
        self.latent_encoder = PooledEncoder(dim_x + dim_y, dim, *sizes)
        self.decoder = ValueDecoder(dim + dim_latent, dim, dim_x, dim_y, decoder_depth)

    def _latent(self, state: Points) -> Normal:
        return as_latent(self.latent_encoder(torch.cat([state.x, state.y], -1), state.ignored))

    def _representation(self, state: Points, target_x: Tensor) -> Tensor:
        result: Tensor = self.encoder(*state, target_x)
        return result
