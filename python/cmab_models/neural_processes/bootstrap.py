"""Bootstrapping Neural Processes: the uncertainty about the function comes from resampled contexts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Normal

from .family import FromPair, ValueDecoder, attentive_pair, encoded_pair, noise, pooled_pair
from .likelihood import Mixture, joint_log_prob
from .points import KeepsPoints, Points


class Bootstrap(FromPair, KeepsPoints):
    """Base class of models that predict a `Mixture` over bootstrapped contexts.

    A context is resampled with replacement, and the points are predicted from it. The residuals of these predictions,
    resampled and centred, are added to them: this is a bootstrapped context. Its features are added to those of the
    context itself in the first layer of the decoder. The loss is the sum of two negative likelihoods: with the features
    of the context alone, and with those of `num_train_samples` bootstrapped contexts. Which points are drawn depends on
    their order.
    """

    num_samples: int
    num_train_samples: int

    def predict(self, state: Points, target_x: Tensor) -> Mixture:
        self._check(target_x, batch=self._known(state).ignored.shape[0], of="target_")
        return self._both(state, target_x, self.num_samples, fresh=False)[1]

    def _objective(self, state: Points, full: Callable[[], Points], x: Tensor, y: Tensor, there: Tensor) -> Tensor:
        base, mixture = self._both(state, x, self.num_train_samples, fresh=self.training)
        return joint_log_prob(base, y, there) + joint_log_prob(mixture, y, there)

    def _both(self, state: Points, target_x: Tensor, samples: int, fresh: bool) -> tuple[Normal, Mixture]:
        """Return the predictions from the context alone, and from bootstrapped contexts."""
        order = state.ignored.to(torch.uint8).argsort(stable=True, dim=1)  # points that are ignored come last
        x, y = (part.take_along_dim(order.unsqueeze(-1), 1) for part in (state.x, state.y))
        points = Points(x, y, state.ignored.take_along_dim(order, 1))
        features = encoded_pair(self.encoders, points, target_x)
        bootstrapped = _repeated(points, samples)
        with torch.no_grad():
            values = self._resampled(points, bootstrapped, samples, fresh)
        shape = samples, *target_x.shape[:2], -1
        asked = target_x.expand(shape)
        more = encoded_pair(self.encoders, bootstrapped._replace(y=values), asked.flatten(0, 1)).view(
            *shape[:3], features.shape[-1]
        )
        mixture = Mixture(self.decoder(features.expand(shape), asked, more))
        return self.decoder(features, target_x), mixture

    def _resampled(self, points: Points, repeated: Points, samples: int, fresh: bool) -> Tensor:
        """Return the values (S B, N, dim_y) of bootstrapped contexts."""
        sets, count = points.ignored.shape
        uniform = noise(
            "rand", count, samples, sets if fresh else 1, 2, like=points.x.new_empty(0).float(), fresh=fresh
        ).expand(-1, -1, sets, -1)
        known = (~points.ignored).sum(1)
        which = (uniform.permute(3, 1, 2, 0) * known.unsqueeze(-1)).long().minimum((known - 1).clamp(min=0)[:, None])
        first, second = which.flatten(1, 2).unsqueeze(-1)
        x, y = (part.take_along_dim(first, 1) for part in (repeated.x, repeated.y))
        drawn = Points(x, y, repeated.ignored)
        fitted = self.decoder(encoded_pair(self.encoders, drawn, repeated.x), repeated.x)
        residual = ((repeated.y - fitted.mean) / fitted.scale).take_along_dim(second, 1)
        ignored = repeated.ignored.unsqueeze(-1)
        centre = residual.masked_fill(ignored, 0.0).sum(1, keepdim=True) / (~ignored).sum(1, keepdim=True).clamp(min=1)
        return (fitted.mean + fitted.scale * (residual - centre)).masked_fill(ignored, 0.0).to(points.y.dtype)


def _repeated(points: Points, samples: int) -> Points:
    """Return the points of each function `samples` times, (S B, N, ...)."""
    return Points(*(part.repeat(samples, *[1] * (part.dim() - 1)) for part in points))


class BNP(Bootstrap):
    """A bootstrapping neural process: the `CNP` of the published code, which has two means over the context, with
    resampled contexts.

    Source: Bootstrapping Neural Processes (Lee et al., NeurIPS 2020), in the form of the published code (`family`).

    Args:
        dim_x, dim_y: columns of x and y.
        dim: width of all layers.
        encoder_depth, pooled_depth: linear layers before and after the mean over the points, at least 2.
        decoder_depth: linear layers of the decoder, at least 2.
        num_samples: bootstrapped contexts of a prediction.
        num_train_samples: bootstrapped contexts in the loss.

    >>> model = cmab_models.BNP(dim_x=1, dim_y=1)
    >>> model(torch.randn(3, 50, 1), torch.randn(3, 50, 1), torch.randn(3, 7, 1)).mean.shape
    torch.Size([3, 7, 1])
    """

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        dim: int = 128,
        encoder_depth: int = 4,
        pooled_depth: int = 2,
        decoder_depth: int = 3,
        num_samples: int = 50,
        num_train_samples: int = 4,
    ) -> None:
        super().__init__()
        self.dim_x, self.dim_y, self.num_samples, self.num_train_samples = dim_x, dim_y, num_samples, num_train_samples
        self.encoders = pooled_pair(dim_x, dim_y, dim, encoder_depth, pooled_depth)
        self.decoder = ValueDecoder(2 * dim, dim, dim_x, dim_y, decoder_depth, more=2 * dim)


class BANP(Bootstrap):
    """A bootstrapping attentive neural process: a `CANP` with resampled contexts.

    Source: Bootstrapping Neural Processes (Lee et al., NeurIPS 2020), in the form of the published code (`family`).

    Args:
        num_heads: a divisor of dim.
        query_depth: linear layers of the coordinates of queries and keys, at least 2.
        The other arguments are those of `BNP`.

    >>> model = cmab_models.BANP(dim_x=1, dim_y=1, dim=32)
    >>> model(torch.randn(3, 50, 1), torch.randn(3, 50, 1), torch.randn(3, 7, 1)).mean.shape
    torch.Size([3, 7, 1])
    """

    def __init__(
        self,
        dim_x: int,
        dim_y: int,
        dim: int = 128,
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
        self.encoders = attentive_pair(dim_x, dim_y, dim, encoder_depth, query_depth, pooled_depth, num_heads)
        self.decoder = ValueDecoder(2 * dim, dim, dim_x, dim_y, decoder_depth, more=2 * dim)
