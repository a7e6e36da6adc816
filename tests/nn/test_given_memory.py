"""Inputs of a module may be overwritten afterwards, for example in a buffer for all inputs: its state keeps copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

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
    "ContinualNystromAttention": (
        lambda: ours.ContinualNystromAttention(C, H, num_landmarks=2, **WINDOW),
        [steps, step],
    ),
    "ContinualEncoderLayer": (lambda: ours.ContinualEncoderLayer(C, H, 24, **WINDOW), [steps, step]),
    "RetroactiveEncoderLayer": (lambda: ours.RetroactiveEncoderLayer(C, H, 24, **WINDOW), [steps, step]),
    "ContinualEncoder": (
        lambda: ours.ContinualEncoder(ours.RetroactiveEncoderLayer(C, H, 24, **WINDOW), 2),
        [steps, step],
    ),
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
            for stream in (
                part for part in module.modules() if isinstance(part, ours.AttentionStream | ours.RidgeStream)
            ):
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


@torch.no_grad()
@pytest.mark.parametrize("kind", MODULES)
def test_a_stream_ends_where_it_has_no_values(kind: str) -> None:
    """`to_empty` gives new memory to a module from the meta device, but not values."""
    make, (read, *_) = MODULES[kind]
    module, inputs = make().eval(), torch.randn(2, 5, C)
    read(module, inputs)
    weights = {name: entry.clone() for name, entry in make().state_dict().items()}
    module.to("meta")
    with pytest.raises(RuntimeError, match="got device meta, expected a tensor with values"):
        module.load_state_dict(module.state_dict())
    module.to_empty(device="cpu")
    assert module.state_dict().keys() == weights.keys()
    module.load_state_dict(weights)
    out = read(module, inputs)
    assert out is None or not out.isnan().any()


def _vmapped(read: Reader, module: Any, inputs: Tensor) -> Any:
    return torch.func.vmap(lambda one: read(module, one))(inputs.unsqueeze(0).expand(2, *inputs.shape))


def _with_tangents(read: Reader, module: Any, inputs: Tensor) -> Any:
    return torch.func.jvp(lambda one: read(module, one), (inputs,), (inputs,))


def _faked(read: Reader, module: Any, inputs: Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return read(module, torch.randn(inputs.shape))


@torch.no_grad()
@pytest.mark.parametrize("transformed", [_vmapped, _with_tangents, _faked])
@pytest.mark.parametrize("kind", MODULES)
def test_no_transform_leaves_something_in_a_stream(kind: str, transformed: Callable[..., Any]) -> None:
    make, (read, *_) = MODULES[kind]
    module, inputs = make().eval(), torch.randn(2, 5, C)
    read(module, inputs)
    other = copy.deepcopy(module)
    with pytest.raises((RuntimeError, NotImplementedError)):
        transformed(read, module, inputs)
    assert torch.equal(read(module, inputs), read(other, inputs))


def _pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, _pickled])
@pytest.mark.parametrize("kind", MODULES)
def test_a_copy_goes_on_by_itself(kind: str, copied: Callable[[Any], Any]) -> None:
    make, (read, *_) = MODULES[kind]
    module, (first, second) = make().eval(), torch.randn(2, 2, 5, C)
    read(module, first)
    untouched, other, another = copy.deepcopy(module), copied(module), copied(module)
    expected = read(untouched, second)
    read(other, first)
    assert torch.equal(read(module, second), expected) and torch.equal(read(another, second), expected)
    shared = {each.data_ptr() for each in module.parameters()} == {each.data_ptr() for each in other.parameters()}
    assert shared == (copied is copy.copy)
