"""The wheel bandit (Riquelme et al., ICLR 2018): five arms, and contexts in the unit disk.

Within the radius delta the first arm pays 1.2 and the others 1.0. Outside this radius, the arm of the context's
quadrant pays 50, and the other arms pay the same as inside. Standard deviations are 0.05, and 0.01 for the reward of
50. An agent sees only the reward of the arm that it chose. The other rewards are replaced by numbers from N(0, 1), as
in the code behind the published tables.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ARMS = 5
MEANS = (1.2, 1.0, 1.0, 1.0, 1.0)
STD, LARGE, LARGE_STD = 0.05, 50.0, 0.01


class Wheel(NamedTuple):
    """Contexts, the reward of each arm in each context, and the arm with the highest mean."""

    x: Tensor
    """(B, N, 2)"""
    rewards: Tensor
    """(B, N, 5)"""
    best: Tensor
    """(B, N)"""


def draw(delta: Tensor, points: int, generator: torch.Generator) -> Wheel:
    """Return contexts and rewards of wheels with radii delta, (B,) or (B, N)."""
    shape = (len(delta), points)
    radius = torch.rand(shape, generator=generator).sqrt()
    angle = 2 * math.pi * torch.rand(shape, generator=generator)
    quadrant = (2 * angle / math.pi).long().clamp(max=3)
    beyond = radius >= delta.view(len(delta), -1)
    rewards = torch.tensor(MEANS) + STD * torch.randn(*shape, ARMS, generator=generator)
    large = LARGE + LARGE_STD * torch.randn(shape, generator=generator)
    best = torch.where(beyond, 1 + quadrant, 0)
    paid = rewards.scatter(2, best.unsqueeze(2), torch.where(beyond, large, rewards[..., 0]).unsqueeze(2))
    return Wheel(torch.stack([radius * angle.cos(), radius * angle.sin()], -1), paid, best)


def hidden(rewards: Tensor, seen: Tensor, generator: torch.Generator) -> Tensor:
    """Return the rewards where `seen`, bool of the same shape, and noise elsewhere."""
    return torch.where(seen, rewards, torch.randn(rewards.shape, generator=generator))
