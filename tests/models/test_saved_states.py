"""`torch.load` reads states of contexts, events and streams by default, that is, without executing anything."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cmab_models import (
    CMANP,
    CMHP,
    CNP,
    LBANP,
    THP,
    ContinualNystromformer,
    ContinualTransformer,
    IncTNP,
    Nystromformer,
)
from torch import nn
from torch.utils._pytree import tree_leaves

NARROW = {"dim": 8, "num_heads": 2}


def of_points(model: Any) -> Any:
    return model.condition(torch.randn(1, 9, 1), torch.randn(1, 9, 1))


def of_events(model: Any) -> Any:
    return model.observe(None, torch.tensor([0.5]), torch.tensor([1]))


def of_tokens(model: Any) -> Any:
    for token in torch.randn(7, 2, 8):
        model.eval().forward_step(token)
    return model.get_state()


STATES: dict[Callable[[Any], Any], list[Callable[[], nn.Module]]] = {
    of_points: [
        lambda: CMANP(1, 1, num_latents=4, depth=1, **NARROW),
        lambda: CNP(1, 1, dim=8),
        lambda: LBANP(1, 1, num_latents=4, depth=1, **NARROW),
        lambda: IncTNP(1, 1, depth=1, **NARROW),
    ],
    of_events: [lambda: CMHP(3, num_latents=4, **NARROW), lambda: THP(3, **NARROW)],
    of_tokens: [
        lambda: ContinualNystromformer(8, 3, 6, 2, depth=2, **NARROW),
        lambda: ContinualTransformer(8, 3, 6, depth=2, **NARROW),
        lambda: Nystromformer(8, 3, 6, 2, depth=2, **NARROW),
    ],
}


@torch.no_grad()
@pytest.mark.parametrize(("state_of", "made"), [(state_of, made) for state_of, each in STATES.items() for made in each])
def test_torch_loads_what_it_saved(state_of: Callable[[Any], Any], made: Callable[[], nn.Module]) -> None:
    state, file = state_of(made()), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded) is type(state)
    for ours, theirs in zip(tree_leaves(loaded), tree_leaves(state), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
