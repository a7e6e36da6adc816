"""Signatures of constructors show torch's arguments and then our own, although torch's are written only once."""

from __future__ import annotations

import functools
import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cmab_kernels.nn as ours
from cmab_kernels import ContinualAttentionState

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
    ours.NystromAttention: (nn.MultiheadAttention, {**NYSTROM, "conv_kernel_size": None, "landmarks": "segments"}),
    ours.ContinualAttention: (nn.MultiheadAttention, STREAM),
    ours.ContinualNystromAttention: (
        nn.MultiheadAttention,
        {**NYSTROM, **STREAM, "conv_kernel_size": None, "landmarks": "continual"},
    ),
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
    with pytest.raises(ValueError, match=r"^key_padding_mask: got device meta"):
        attention(inputs, inputs, inputs, mask, need_weights=False)
    with pytest.raises(ValueError, match=r"^key_padding_mask: got device meta"):
        block(inputs, inputs, key_padding_mask=mask)


HEADS = {nn.MultiheadAttention: {"num_heads": 2}, nn.TransformerEncoderLayer: {"nhead": 2}}
SIZES: dict[type[nn.Module], dict[str, Any]] = {
    ours.CMAB: {"dim": 8, "num_latents": 4, "num_heads": 2, "ff_dim": 4, "window": 3},
    ours.CMABStack: {"dim": 8, "num_latents": 4, "num_heads": 2, "depth": 2, "ff_dim": 4},
    ours.CrossAttention: {"dim": 8, "num_heads": 2},
    ours.SelfAttention: {"dim": 8, "num_heads": 2},
    ours.FeedForward: {"dim": 8, "ff_dim": 4},
    ours.LatentLayer: {"dim": 8, "num_heads": 2, "ff_dim": 4},
    ours.MultiheadAttention: {"embed_dim": 8, "num_heads": 2, "kdim": 4, "vdim": 4},
    ours.MultiheadIntention: {"embed_dim": 8, "num_heads": 2},
    ours.NystromAttention: {"embed_dim": 8, "num_heads": 2, "num_landmarks": 4},
    ours.ContinualAttention: {"embed_dim": 8, "num_heads": 2, "sequence_len": 4},
    ours.ContinualNystromAttention: {"embed_dim": 8, "num_heads": 2, "sequence_len": 8, "num_landmarks": 4},
    ours.CircularPositionalEncoding: {"embed_dim": 8, "sequence_len": 4},
    ours.AttentionStream: {"heads": 2, "latents": 4, "width": 4},
    ours.RidgeStream: {"heads": 2, "width": 4, "value_width": 4},
    ours.WindowStream: {"window": 3, "heads": 2, "latents": 4, "width": 4},
}


@pytest.mark.parametrize("kind", SIZES, ids=lambda kind: kind.__name__)
def test_sizes(kind: type[nn.Module]) -> None:
    """A size may be a NumPy integer; any other type raises an error with the name of the argument before it is used."""
    sizes = SIZES[kind]
    assert str(kind(**{name: np.int64(size) for name, size in sizes.items()})) == str(kind(**sizes))
    for name in sizes:
        for wrong in (-1, 2.0, True, "4", torch.tensor(4)):
            with pytest.raises(ValueError, match=rf"^{name}: got {re.escape(repr(wrong))}, expected an int >= [01]"):
                kind(**{**sizes, name: wrong})
        with pytest.raises(ValueError, match=rf"^{name}: got {10**30}, expected an int from [01] to 2\*\*63 - 1"):
            kind(**{**sizes, name: 10**30})
    if "num_heads" in sizes:
        with pytest.raises(ValueError, match=r"^num_heads: got 3, expected a divisor of (embed_)?dim = 8"):
            kind(**{**sizes, "num_heads": 3})


ALL: dict[type[nn.Module], dict[str, Any]] = {
    **{
        kind: {"embed_dim" if torchs is nn.MultiheadAttention else "d_model": 8, **HEADS[torchs]}
        for kind, (torchs, _) in OWN.items()
    },
    **SIZES,
    ours.TransformerEncoderLayer: {"d_model": 8, "nhead": 2},
    ours.TransformerDecoderLayer: {"d_model": 8, "nhead": 2},
    ours.ContinualEncoder: {"layer": ours.ContinualEncoderLayer(8, 2, sequence_len=4), "num_layers": 1},
    ours.ContinualStream: {
        "kind": ContinualAttentionState,
        "heads": 2,
        "width": 4,
        "rows": (4,),
        "counts": {"window": 4},
    },
    ours.RecentStream: {"window": 4, "width": 8},
}
for _kind, (_, _own) in OWN.items():
    ALL[_kind] = {**{name: EXAMPLE[name] for name in _own if name in EXAMPLE}, **ALL[_kind]}
"""Every public module, and arguments that make it."""


def test_every_public_module_is_here() -> None:
    public = {getattr(ours, name) for name in ours.__all__}
    public = {each for each in public if isinstance(each, type) and issubclass(each, nn.Module)}
    assert public == set(ALL)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_an_argument_that_is_an_array_is_named(kind: type[nn.Module]) -> None:
    """Python cannot convert an array to a truth value, and its own error names no argument."""
    kind(**ALL[kind])
    for name in inspect.signature(kind).parameters:
        for wrong in (np.ones(2), np.array(["a", "b"]), torch.ones(2), torch.tensor([True, False])):
            with pytest.raises((TypeError, ValueError), match=rf"^{name}: got an? (ndarray|Tensor), expected"):
                kind(**{**ALL[kind], name: wrong})


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_a_size_a_device_and_a_dtype_are_checked_by_name(kind: type[nn.Module]) -> None:
    wrong: dict[str, tuple[Any, ...]] = {"int": (2**63, -1, 2.0, True, "4", None), "int | None": (2**63, -1, 2.0)}
    for name, parameter in inspect.signature(kind).parameters.items():
        annotation = getattr(parameter.annotation, "__name__", parameter.annotation)
        of_name = {"device": (True, 2**63, "no such device", 1.5), "dtype": ("float32", 1, True)}.get(name, ())
        for each in (*wrong.get(annotation, ()), *of_name):
            with pytest.raises((TypeError, ValueError), match=rf"^{name}: got .*, expected"):
                kind(**{**ALL[kind], name: each})


@pytest.mark.parametrize(
    "wrong", [{"alpha": "learned"}, {"alpha": -1.0}, {"scale": None}, {"scale": torch.tensor(1.0)}, {"scale": 10**400}]
)
def test_numbers_of_intention(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}: got"):
        ours.MultiheadIntention(8, 2, **wrong)


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_a_misspelt_or_missing_option_is_named(kind: type[nn.Module]) -> None:
    """The error names the class that was called, not a parent class."""
    needed = {name: given for name, given in EXAMPLE.items() if name in OWN[kind][1]}
    with pytest.raises(
        TypeError,
        match=rf"^batch_frist: got an unknown option of {kind.__name__}, expected one of .*; did you mean "
        rf"batch_first\?",
    ):
        kind(16, 2, **needed, batch_frist=True)
    for name, default in OWN[kind][1].items():
        if default is REQUIRED:
            with pytest.raises(TypeError, match=rf"^{name}: got nothing, expected a value, because {kind.__name__}"):
                kind(16, 2, **{other: given for other, given in needed.items() if other != name})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            functools.partial(ours.MultiheadAttention, need_weights=False),
            "^need_weights: got an unknown option of MultiheadAttention, expected one of .* argument of",
        ),
        (
            functools.partial(ours.NystromAttention, num_landmark=4),
            "^num_landmark: got an unknown option of NystromAttention, expected one of .*; did you mean num_landm",
        ),
        (ours.NystromAttention, "^num_landmarks: got nothing, expected a value, because NystromAttention"),
        (ours.ContinualAttention, "^sequence_len: got nothing, expected a value, because ContinualAttention"),
    ],
)
def test_options_of_replace_modules_are_named(made: Any, message: str) -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, 0.0)
    attention = model.self_attn
    with pytest.raises(TypeError, match=message):
        ours.replace_modules(model, {nn.MultiheadAttention: made}, verbose=False)
    assert model.self_attn is attention
    layer = nn.Sequential(model)
    with pytest.raises(TypeError, match=r"^dropout: got an option of TransformerEncoderLayer, expected no option"):
        options = functools.partial(ours.TransformerEncoderLayer, dropout=0.0)
        ours.replace_modules(layer, {nn.TransformerEncoderLayer: options}, verbose=False)
