"""A cloud of points, rotated, scaled and shifted: from a few pairs of points, where do the others go?"""

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
"""Standard deviation of what is added to the targets of the pairs, as a share of the cloud's radius."""

ALPHA = 1e-10
TEMPERATURES = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
ANGLE, SCALE, SHIFT = math.radians(40), 0.75, (0.5, 0.3)

INTENTION, ATTENTION, LEAST_SQUARES = "Intention", "attention, by distance", "numpy.linalg.lstsq"
METHODS = (INTENTION, ATTENTION, LEAST_SQUARES)


@functools.cache
def source() -> Tensor:
    """(points, 2) float64 of the silhouette of a horse that comes with scikit-image; their mean is 0, and their mean square distance 1."""
    from skimage import data

    rows, columns = torch.from_numpy(~data.horse()).nonzero(as_tuple=True)
    few = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:POINTS]
    points = torch.stack([columns[few], -rows[few]], dim=-1) + torch.rand(POINTS, 2, generator=torch.Generator().manual_seed(1))
    points = points.double() - points.double().mean(0)
    return points / points.square().sum(-1).mean().sqrt()


def target() -> Tensor:
    """Where the points go."""
    turn = torch.tensor([[math.cos(ANGLE), math.sin(ANGLE)], [-math.sin(ANGLE), math.cos(ANGLE)]], dtype=torch.float64)
    return SCALE * source() @ turn + torch.tensor(SHIFT, dtype=torch.float64)


class Comparison(NamedTuple):
    noise: float
    pairs: Tensor
    """(draws, 5) indices of the points whose targets are given."""
    predicted: dict[str, Tensor]
    """method -> (draws, points, 2)"""
    errors: dict[str, float]
    """method -> median over the draws of the root mean square error, as a share of the radius."""


def measure(noise: float) -> Comparison:
    """Every method, over the same draws of pairs."""
    random = torch.Generator().manual_seed(2)
    pairs = torch.stack([torch.randperm(POINTS, generator=random)[:PAIRS] for _ in range(DRAWS)])
    given = target()[pairs] + noise * SCALE * torch.randn(DRAWS, PAIRS, 2, generator=random, dtype=torch.float64) / 2**0.5
    by_temperature = [by_attention(source()[pairs], given, temperature) for temperature in TEMPERATURES]
    predicted = {
        INTENTION: by_intention(source()[pairs], given),
        ATTENTION: min(by_temperature, key=_error),
        LEAST_SQUARES: by_least_squares(source()[pairs], given),
    }
    return Comparison(noise, pairs, predicted, {name: _error(points) for name, points in predicted.items()})


def _error(predicted: Tensor) -> float:
    return float((predicted - target()).square().sum(-1).mean(-1).sqrt().median() / SCALE)


def by_intention(points: Tensor, targets: Tensor) -> Tensor:
    """The linear map of homogeneous coordinates (x, y, 1) that fits the pairs: Kabsch's problem without its constraint."""
    query = _with_column(source(), torch.ones(POINTS)).expand(len(points), 1, -1, -1)
    return intention(query, _with_column(points, torch.ones(points.shape[:2]))[:, None], targets[:, None], ALPHA)[:, 0]


def by_attention(points: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """softmax(-|q - k|^2 / (2 temperature)) over the pairs: |q|^2 is the same for all, |k|^2 is a third coordinate."""
    query = _with_column(source(), torch.ones(POINTS)).expand(len(points), 1, -1, -1)
    key = _with_column(points, points.square().sum(-1) / -2)
    return latent_attention(query, key[:, None], targets[:, None], scale=1 / temperature)[:, 0]


def by_least_squares(points: Tensor, targets: Tensor) -> Tensor:
    import numpy as np

    query = _with_column(source(), torch.ones(POINTS)).numpy()
    pairs = zip(_with_column(points, torch.ones(points.shape[:2])).numpy(), targets.numpy(), strict=True)
    return torch.stack([torch.from_numpy(query @ np.linalg.lstsq(known, wanted, rcond=None)[0]) for known, wanted in pairs])


def _with_column(points: Tensor, column: Tensor) -> Tensor:
    return torch.cat([points, column.unsqueeze(-1).to(points.dtype)], dim=-1)
