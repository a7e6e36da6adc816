"""What a module was given may be overwritten afterwards, as one buffer for all inputs is: its state keeps copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmab_kernels.nn as ours

C, H = 16, 2
WINDOW: dict[str, Any] = {"sequence_len": 3, "batch_first": True}
Reader = Callable[[Any, Tensor], Any]


def steps(module: Any, tokens: Tensor) -> Any:
    return module.forward_steps(tokens)


def step(module: Any, tokens: Tensor) -> Any:
    return module.forward_step(tokens[:, 0])


def update(module: Any, inputs: Tensor) -> Any:
    return module.update(inputs, torch.ones(2, C)).latents


def predict(module: Any, inputs: Tensor) -> Any:
    module.update(inputs)
    return module.predict(torch.ones(2, 1, C))


MODULES: dict[str, tuple[Callable[[], nn.Module], list[Reader]]] = {
    "CMAB": (lambda: ours.CMAB(C, 4, H), [update]),
    "CMABStack": (lambda: ours.CMABStack(C, 4, H, 2), [update]),
    "MultiheadIntention": (lambda: ours.MultiheadIntention(C, H, batch_first=True), [predict]),
    "ContinualAttention": (lambda: ours.ContinualAttention(C, H, **WINDOW), [steps, step]),
    "ContinualNystromAttention": (lambda: ours.ContinualNystromAttention(C, H, num_landmarks=2, **WINDOW), [steps, step]),
    "ContinualEncoderLayer": (lambda: ours.ContinualEncoderLayer(C, H, 24, **WINDOW), [steps, step]),
    "RetroactiveEncoderLayer": (lambda: ours.RetroactiveEncoderLayer(C, H, 24, **WINDOW), [steps, step]),
    "ContinualEncoder": (lambda: ours.ContinualEncoder(ours.RetroactiveEncoderLayer(C, H, 24, **WINDOW), 2), [steps, step]),
}


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 3, 5])
@pytest.mark.parametrize("kind", MODULES)
def test_a_buffer_may_be_filled_again(kind: str, tokens: int) -> None:
    make, readers = MODULES[kind]
    for read in readers:
        torch.manual_seed(0)
        module, inputs = make().eval(), torch.randn(6, 2, tokens, C)
        found = []
        for own_memory in (False, True):
            for stream in (part for part in module.modules() if isinstance(part, ours.AttentionStream | ours.RidgeStream)):
                stream.state = None
            if hasattr(module, "clean_state"):
                module.clean_state()
            buffer, outs = torch.empty(2, tokens, C), []
            for given in inputs:
                out = read(module, given.clone() if own_memory else buffer.copy_(given))
                buffer.fill_(torch.nan)
                outs.append(torch.zeros(0) if out is None else out.clone())
            found.append(outs)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and not found[0][-1].isnan().any()
