"""The forward method of every module raises an error for a non-tensor or another layout, with the name of the argument
and the likely cause."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cmab_kernels.nn as ours

WINDOW: dict[str, Any] = {"sequence_len": 6, "batch_first": True}
LAYER: dict[str, Any] = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
ATTENTION = ("query", "key", "value")
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "CMAB": (lambda: ours.CMAB(16, 4, 2), ("inputs", "latents")),
    "CMABStack": (lambda: ours.CMABStack(16, 4, 2, 2), ("inputs", "latents")),
    "CrossAttention": (lambda: ours.CrossAttention(16, 2), ("latents", "context")),
    "SelfAttention": (lambda: ours.SelfAttention(16, 2), ("latents",)),
    "FeedForward": (lambda: ours.FeedForward(16, 32), ("latents",)),
    "LatentLayer": (lambda: ours.LatentLayer(16, 2, 32), ("latents", "context")),
    "MultiheadAttention": (lambda: ours.MultiheadAttention(16, 2, batch_first=True), ATTENTION),
    "MultiheadIntention": (lambda: ours.MultiheadIntention(16, 2, batch_first=True), ATTENTION),
    "MultiheadSigmaIntention": (lambda: ours.MultiheadSigmaIntention(16, 2, batch_first=True), ATTENTION),
    "NystromAttention": (lambda: ours.NystromAttention(16, 2, batch_first=True, num_landmarks=2), ATTENTION),
    "ContinualAttention": (lambda: ours.ContinualAttention(16, 2, **WINDOW), ATTENTION),
    "ContinualNystromAttention": (lambda: ours.ContinualNystromAttention(16, 2, num_landmarks=2, **WINDOW), ATTENTION),
    "ContinualEncoderLayer": (lambda: ours.ContinualEncoderLayer(16, 2, 32, **WINDOW), ("src",)),
    "RetroactiveEncoderLayer": (lambda: ours.RetroactiveEncoderLayer(16, 2, 32, **WINDOW), ("src",)),
    "ContinualEncoder": (lambda: ours.ContinualEncoder(ours.ContinualEncoderLayer(16, 2, 32, **WINDOW), 1), ("src",)),
    "CircularPositionalEncoding": (lambda: ours.CircularPositionalEncoding(16, 8, batch_first=True), ("tokens",)),
    "InformerEncoderLayer": (lambda: ours.InformerEncoderLayer(16, 2, **LAYER), ("src",)),
    "TransformerEncoderLayer": (lambda: ours.TransformerEncoderLayer(16, 2, **LAYER), ("src",)),
    "TransformerDecoderLayer": (lambda: ours.TransformerDecoderLayer(16, 2, **LAYER), ("tgt", "memory")),
}
GIVEN: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "an array": (
        lambda features: features.numpy(),
        "got a ndarray, expected a torch.Tensor; torch.from_numpy makes one",
    ),
    "a list": (lambda features: features.tolist(), "got a list, expected a torch.Tensor; torch.tensor makes one"),
    "nothing": (lambda features: None, "got None, expected a torch.Tensor"),
    "integers": (lambda features: features.long(), "got torch.int64"),
    "sparse": (Tensor.to_sparse, "got torch.sparse_coo, expected a dense tensor"),
    "split heads": (lambda features: features.unflatten(-1, (2, 8)), ".*flatten.-2. joins these"),
    "columns first": (lambda features: features.mT, ".*it seems to be transposed"),
    "too wide": (lambda features: torch.cat([features, features], -1), "got shape .* with 16 columns"),
}


@pytest.mark.parametrize("what", GIVEN)
@pytest.mark.parametrize("kind", MODULES)
def test_forward_names_what_is_wrong(kind: str, what: str) -> None:
    make, names = MODULES[kind]
    module, (change, message) = make(), GIVEN[what]
    options = {"need_weights": False} if "need_weights" in inspect.signature(module.forward).parameters else {}
    for i, name in enumerate(names):
        if what == "nothing" and i > 0 and kind.startswith("Continual"):
            continue  # None means the query there
        given: list[Any] = [torch.randn(2, 6, 16) for _ in names]
        given[i] = change(given[i])
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: {message}"):
            module(*given, **options)
        if what == "sparse" and options:
            with pytest.raises(TypeError, match=rf"^{name}: {message}"):
                module(*given, need_weights=True)
            with pytest.raises(TypeError, match=rf"^{name}: {message}"):
                module.eval()(*given, need_weights=True)


@pytest.mark.parametrize("wrong", [np.ones(2), torch.tensor([True, False])], ids=["an array", "a tensor"])
@pytest.mark.parametrize("kind", MODULES)
def test_a_flag_that_is_an_array_is_named(kind: str, wrong: Any) -> None:
    make, names = MODULES[kind]
    methods = ("forward", "forward_step", "forward_steps", "retrieve")
    for method in (method for method in methods if hasattr(make(), method)):
        module = make().eval()
        parameters = inspect.signature(getattr(module, method)).parameters
        given: list[Any] = [torch.randn(2, 16) if method == "forward_step" else torch.randn(2, 6, 16) for _ in names]
        if method == "retrieve":
            given = [given[0], module.init_state(2)]  # type: ignore[operator]  # torch's modules may have any attribute
        for flag in (name for name, parameter in parameters.items() if isinstance(parameter.default, bool)):
            with (
                torch.no_grad(),
                pytest.raises(TypeError, match=rf"^{flag}: got an? (ndarray|Tensor), expected True or False"),
            ):
                getattr(module, method)(*given, **{flag: wrong})


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_float64_in_a_module_of_float32(kind: str, autocast: bool) -> None:
    """Autocast does not convert float64, so it does not prevent the error. The same holds for float32 features in a
    float64 module."""
    make, names = MODULES[kind]
    module = make()
    options = {"need_weights": False} if "need_weights" in inspect.signature(module.forward).parameters else {}
    given = [torch.randn(2, 6, 16) for _ in names]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with pytest.raises(TypeError, match=rf"^{names[0]}: got torch.float64"):
            module(*(each.double() for each in given), **options)
        for training in (True, False) if autocast else ():
            module.double().train(training)
            with pytest.raises(
                TypeError,
                match=rf"^{names[0]}: got torch.float32, expected torch.float64 as the module has; cast them alike",
            ):
                module(*given)
            module.float()
            with pytest.raises(
                TypeError,
                match=rf"^{names[0]}: got torch.float64, expected torch.float32 as the module has; cast them alike",
            ):
                module(*(each.double() for each in given))
