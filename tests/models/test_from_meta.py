"""Every public module of both packages has its values when it comes from the meta device,
and its constants after every cast."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cmab_models.systems import SYSTEMS
from torch import Tensor

from cmab_kernels import nn

from .cases import answer, inputs, made

TOKENS, LATENTS, SETS = (6, 2, 12), (4, 12), (2, 7, 12)  # each is drawn again from the same seed
ENCODER: dict[str, Any] = {"dim_feedforward": 24, "dropout": 0.0}
WINDOW = {"sequence_len": 6}

# name -> how to make the module, and the shapes that its forward takes; None where the module is the holder of a stream
MODULES: dict[str, tuple[Callable[[], Any], tuple[tuple[int, ...], ...] | None]] = {
    "CMAB": (lambda: nn.CMAB(12, 5, 3), (SETS, LATENTS)),
    "CMABStack": (lambda: nn.CMABStack(12, 5, 3, 2), (SETS, LATENTS)),
    "CircularPositionalEncoding": (lambda: nn.CircularPositionalEncoding(12, 6), (TOKENS,)),
    "CircularPositionalEncoding, sines": (lambda: nn.CircularPositionalEncoding(12, 6, learned=False), (TOKENS,)),
    "ContinualAttention": (lambda: nn.ContinualAttention(12, 3, **WINDOW), (TOKENS,)),
    "ContinualEncoder": (
        lambda: nn.ContinualEncoder(nn.ContinualEncoderLayer(12, 3, **ENCODER, **WINDOW), 2),
        ((11, 2, 12),),
    ),
    "ContinualEncoderLayer": (lambda: nn.ContinualEncoderLayer(12, 3, **ENCODER, **WINDOW), (TOKENS,)),
    "ContinualNystromAttention": (lambda: nn.ContinualNystromAttention(12, 3, num_landmarks=3, **WINDOW), (TOKENS,)),
    "RetroactiveEncoderLayer": (lambda: nn.RetroactiveEncoderLayer(12, 3, **ENCODER, **WINDOW), (TOKENS,)),
    "CrossAttention": (lambda: nn.CrossAttention(12, 3), (LATENTS, SETS)),
    "SelfAttention": (lambda: nn.SelfAttention(12, 3), (SETS,)),
    "FeedForward": (lambda: nn.FeedForward(12, 24), (SETS,)),
    "LatentLayer": (lambda: nn.LatentLayer(12, 3, 24), (LATENTS, SETS)),
    "InformerEncoderLayer": (lambda: nn.InformerEncoderLayer(12, 3, **ENCODER), (TOKENS,)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(12, 3, **ENCODER), (TOKENS,)),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(12, 3, **ENCODER), (TOKENS, TOKENS)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(12, 3), (TOKENS,) * 3),
    "MultiheadIntention": (lambda: nn.MultiheadIntention(12, 3), (TOKENS,) * 3),
    "MultiheadSigmaIntention": (lambda: nn.MultiheadSigmaIntention(12, 3), (TOKENS,) * 3),
    "NystromAttention": (lambda: nn.NystromAttention(12, 3, num_landmarks=3), (TOKENS,) * 3),
    "AttentionStream": (lambda: nn.AttentionStream(3, 5, 4), None),
    "RidgeStream": (lambda: nn.RidgeStream(3, 4, 4), None),
    "WindowStream": (lambda: nn.WindowStream(2, 3, 5, 4), None),
    "RecentStream": (lambda: nn.RecentStream(6, 12), None),
    "ContinualStream": (lambda: nn.ContinualAttention(12, 3, **WINDOW).stream, None),
}
SYSTEM_MAKERS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: made(name) for name in SYSTEMS},
    **{f"{name}, by the day": lambda name=name: made(name, dim=32, period=24.0) for name in ("cmhp", "thp")},
}


def test_all_public_modules_are_here() -> None:
    public = {
        name for name in nn.__all__ if inspect.isclass(kind := getattr(nn, name)) and issubclass(kind, torch.nn.Module)
    }
    assert public == {name.split(",")[0] for name in MODULES}


def result(name: str, module: Any) -> list[Tensor]:
    """Return all outputs of the module for inputs that are the same on every call."""
    if name in SYSTEM_MAKERS:
        return [answer(module, inputs(name.split(",")[0]))]
    torch.manual_seed(1)
    shapes = MODULES[name][1]
    found = [] if shapes is None else module(*(torch.randn(shape) for shape in shapes))
    return [part for part in (found if isinstance(found, (tuple, list)) else [found]) if part is not None]


def by_to_empty(module: Any, weights: dict[str, Any]) -> None:
    module.to_empty(device="cpu")
    for buffer in module.buffers():
        assert not buffer.is_meta
    module.load_state_dict(weights)


def by_assigning(module: Any, weights: dict[str, Any]) -> None:
    module.load_state_dict(weights, assign=True)


def under_a_default_of_meta(module: Any, weights: dict[str, Any]) -> None:
    with torch.device("meta"):
        by_to_empty(module, weights)


@torch.no_grad()
@pytest.mark.parametrize("journey", [by_to_empty, by_assigning, under_a_default_of_meta])
@pytest.mark.parametrize("name", [*MODULES, *SYSTEM_MAKERS])
def test_a_module_from_the_meta_device_is_as_if_made_here(
    name: str, journey: Callable[[Any, dict[str, Any]], None]
) -> None:
    make = SYSTEM_MAKERS[name] if name in SYSTEM_MAKERS else MODULES[name][0]
    if journey is by_assigning and name in MODULES and MODULES[name][1] is None:
        return  # the holder of a stream has no weights of its own
    torch.manual_seed(0)
    right = make().eval()
    with torch.device("meta"):
        ours = make().eval()
    journey(ours, right.state_dict())
    buffers, expected = dict(ours.named_buffers()), dict(right.named_buffers())
    assert buffers.keys() == expected.keys()
    for each, buffer in buffers.items():
        assert (
            buffer.device == expected[each].device
            and buffer.dtype == expected[each].dtype
            and torch.equal(buffer, expected[each])
        ), each
    for mine, other in zip(result(name, ours), result(name, right), strict=True):
        assert torch.equal(mine, other)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*MODULES, *SYSTEM_MAKERS])
def test_a_cast_and_back_leaves_the_constants(name: str, dtype: torch.dtype) -> None:
    make = SYSTEM_MAKERS[name] if name in SYSTEM_MAKERS else MODULES[name][0]
    module, right = make(), dict(make().named_buffers())
    for buffer in module.to(dtype).buffers():
        assert buffer.isfinite().all()
    for each, buffer in module.float().named_buffers():
        assert buffer.dtype == right[each].dtype and torch.equal(buffer, right[each]), each
