"""Signatures of constructors show torch's arguments and then our own, though torch's are written down only once."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import cmab_kernels.nn as ours

REQUIRED = inspect.Parameter.empty
NYSTROM = {"num_landmarks": REQUIRED, "pinv": "iterative", "pinv_iterations": 6}
STREAM = {"sequence_len": REQUIRED, "output": "single"}
ENCODER = {**NYSTROM, "num_landmarks": None, "landmarks": "continual", "sequence_len": REQUIRED}
RIDGE = {"alpha": None, "scale": 1.0}

# class -> torch's class, and the keyword arguments of its own with their defaults
OWN: dict[type[nn.Module], tuple[type[nn.Module], dict[str, Any]]] = {
    ours.MultiheadAttention: (nn.MultiheadAttention, {}),
    ours.MultiheadIntention: (nn.MultiheadAttention, RIDGE),
    ours.MultiheadSigmaIntention: (nn.MultiheadAttention, RIDGE),
    ours.NystromAttention: (nn.MultiheadAttention, {**NYSTROM, "landmarks": "segments"}),
    ours.ContinualAttention: (nn.MultiheadAttention, STREAM),
    ours.ContinualNystromAttention: (nn.MultiheadAttention, {**NYSTROM, **STREAM, "landmarks": "continual"}),
    ours.InformerEncoderLayer: (nn.TransformerEncoderLayer, {**RIDGE, "kind": "intention"}),
    ours.ContinualEncoderLayer: (nn.TransformerEncoderLayer, ENCODER),
    ours.RetroactiveEncoderLayer: (nn.TransformerEncoderLayer, ENCODER),
}
EXAMPLE = {"num_landmarks": 4, "sequence_len": 8}


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_signatures(kind: type[nn.Module]) -> None:
    torchs, own = OWN[kind]
    theirs, shown = inspect.signature(torchs).parameters, inspect.signature(kind).parameters
    assert list(shown)[: len(theirs)] == list(theirs)
    for name, parameter in shown.items():
        if name in theirs:
            assert (parameter.kind, parameter.default) == (theirs[name].kind, theirs[name].default), name
        else:
            assert (parameter.kind, parameter.default) == (inspect.Parameter.KEYWORD_ONLY, own[name]), name
        assert parameter.annotation is not REQUIRED or name in ("device", "dtype"), name
    assert shown.keys() == {*theirs, *own}


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_arguments_arrive(kind: type[nn.Module]) -> None:
    """Arguments may be given by position or by name; an unknown one is a `TypeError` that names it."""
    torchs, own = OWN[kind]
    named = {name: EXAMPLE[name] for name in own if name in EXAMPLE}
    positional = (16, 2, 0.0, False) if torchs is nn.MultiheadAttention else (16, 2, 32, 0.0, "gelu")
    names = dict(zip(inspect.signature(torchs).parameters, positional, strict=False))
    for module in (kind(*positional, **named), kind(**names, **named)):
        expected = torchs(*positional).state_dict()
        extra = {name for name in module.state_dict() if name.endswith("log_alpha")}
        assert module.state_dict().keys() - extra == expected.keys()
        assert all(module.state_dict()[name].shape == entry.shape for name, entry in expected.items())
        assert pickle.loads(pickle.dumps(module)).state_dict().keys() == module.state_dict().keys()
    for wrong in ({"strange": 1}, {"embed_dim" if torchs is nn.MultiheadAttention else "d_model": 16}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            kind(*positional, **named, **wrong)
    with pytest.raises(TypeError, match="positional"):
        kind(16, 2, *([None] * 20), **named)
    for name in (each for each in named if own[each] is REQUIRED):
        with pytest.raises(TypeError, match=name):
            kind(*positional, **{other: given for other, given in named.items() if other != name})


def test_the_mask_is_on_the_device_of_the_inputs() -> None:
    mask, inputs = torch.zeros(1, 3, dtype=torch.bool, device="meta"), torch.zeros(1, 3, 16)
    attention, block = ours.MultiheadAttention(16, 2, batch_first=True), ours.CMAB(16, 4, 2)
    with pytest.raises(ValueError, match="`key_padding_mask` is on meta"):
        attention(inputs, inputs, inputs, mask, need_weights=False)
    with pytest.raises(ValueError, match="`key_padding_mask` is on meta"):
        block(inputs, inputs, key_padding_mask=mask)
