"""A cloud of points is rotated, scaled and shifted.

Each method gets the new places of a few points, and predicts the new places of the others.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention import latent_attention
from ...intention import intention

POINTS, PAIRS, DRAWS = 3000, 5, 100
NOISES = (0.0, 0.05)
"""Standard deviations of the noise on the targets of the pairs, as shares of the cloud's radius."""

ALPHA = 1e-10
TEMPERATURES = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
ANGLE, SCALE, SHIFT = math.radians(40), 0.75, (0.5, 0.3)

INTENTION, ATTENTION, LEAST_SQUARES = "Intention", "attention, by distance", "numpy.linalg.lstsq"
METHODS = (INTENTION, ATTENTION, LEAST_SQUARES)


@functools.cache
def source() -> Tensor:
    """Return the points before the map: (points, 2) float64, with mean 0 and mean square distance 1 from the mean.

    They are drawn from scikit-image's silhouette of a horse.
    """
    from skimage import data

    rows, columns = torch.from_numpy(~data.horse()).nonzero(as_tuple=True)
    few = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:POINTS]
    points = torch.stack([columns[few], -rows[few]], dim=-1) + torch.rand(
        POINTS, 2, generator=torch.Generator().manual_seed(1)
    )
    points = points.double() - points.double().mean(0)
    return points / points.square().sum(-1).mean().sqrt()


def target() -> Tensor:
    """Return the points after the map: (points, 2) float64."""
    turn = torch.tensor([[math.cos(ANGLE), math.sin(ANGLE)], [-math.sin(ANGLE), math.cos(ANGLE)]], dtype=torch.float64)
    return SCALE * source() @ turn + torch.tensor(SHIFT, dtype=torch.float64)


class Comparison(NamedTuple):
    """The predictions of the methods from pairs with one standard deviation of noise."""

    noise: float
    """One of `NOISES`."""
    pairs: Tensor
    """Indices (draws, 5) of the points whose targets are given."""
    predicted: dict[str, Tensor]
    """Method -> predicted points, (draws, points, 2)."""
    errors: dict[str, float]
    """Method -> root mean square error as a share of the radius, as the median over the draws."""


def measure(noise: float) -> Comparison:
    """Run every method on the same draws of pairs.

    Attention gets the temperature with the smallest error on the correct answer itself.
    """
    random = torch.Generator().manual_seed(2)
    pairs = torch.stack([torch.randperm(POINTS, generator=random)[:PAIRS] for _ in range(DRAWS)])
    given = (
        target()[pairs] + noise * SCALE * torch.randn(DRAWS, PAIRS, 2, generator=random, dtype=torch.float64) / 2**0.5
    )
    by_temperature = [by_attention(source()[pairs], given, temperature) for temperature in TEMPERATURES]
    predicted = {
        INTENTION: by_intention(source()[pairs], given),
        ATTENTION: min(by_temperature, key=_error),
        LEAST_SQUARES: by_least_squares(source()[pairs], given),
    }
    return Comparison(noise, pairs, predicted, {name: _error(points) for name, points in predicted.items()})


def _error(predicted: Tensor) -> float:
    """Return the root mean square error of (draws, points, 2) as a share of the radius of the mapped cloud.

    The result is the median over the draws.
    """
    return float((predicted - target()).square().sum(-1).mean(-1).sqrt().median() / SCALE)


def by_intention(points: Tensor, targets: Tensor) -> Tensor:
    """Return the predictions (draws, points, 2) of the linear map that fits the pairs.

    The map acts on homogeneous coordinates (x, y, 1). This is Kabsch's problem without the constraint that the map is a
    rotation. `points` and `targets` are the pairs, (draws, 5, 2) each.
    """
    query = _with_column(source(), torch.ones(POINTS)).expand(len(points), 1, -1, -1)
    return intention(query, _with_column(points, torch.ones(points.shape[:2]))[:, None], targets[:, None], ALPHA)[:, 0]


def by_attention(points: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the predictions (draws, points, 2): means of the targets, weighted by attention.

    The weights are softmax(-|q - k|^2 / (2 temperature)). |q|^2 is the same for all keys, so the function leaves it
    out. -|k|^2 / 2 is a third coordinate of the keys.
    """
    query = _with_column(source(), torch.ones(POINTS)).expand(len(points), 1, -1, -1)
    key = _with_column(points, points.square().sum(-1) / -2)
    return latent_attention(query, key[:, None], targets[:, None], scale=1 / temperature)[:, 0]


def by_least_squares(points: Tensor, targets: Tensor) -> Tensor:
    """Return the predictions (draws, points, 2) of the linear map of `by_intention`, fitted by NumPy draw by draw."""
    import numpy as np

    query = _with_column(source(), torch.ones(POINTS)).numpy()
    pairs = zip(_with_column(points, torch.ones(points.shape[:2])).numpy(), targets.numpy(), strict=True)
    return torch.stack(
        [torch.from_numpy(query @ np.linalg.lstsq(known, wanted, rcond=None)[0]) for known, wanted in pairs]
    )


def _with_column(points: Tensor, column: Tensor) -> Tensor:
    return torch.cat([points, column.unsqueeze(-1).to(points.dtype)], dim=-1)
