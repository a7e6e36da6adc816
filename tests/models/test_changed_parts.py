"""A changed linear layer or norm of a model is called by all predictions of the model, with gradients and without."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import cmab_models
import pytest
import torch
from cmab_models.neural_processes import NeuralProcess
from cmab_models.point_processes import PointProcess
from cmab_models.streams import StreamClassifier
from cmab_models.systems import SYSTEMS
from torch import Tensor, nn

from ..nn.test_changed_parts import changed
from .cases import answer, inputs, made

Run = Callable[[Any, dict[str, Tensor]], Tensor]


def in_pieces(model: Any, given: dict[str, Tensor]) -> Tensor:
    x, y, target_x, _ = given.values()
    state = model.condition(x[:, 4:], y[:, 4:], model.condition(x[:, :4], y[:, :4]))
    mean: Tensor = model.predict(state, target_x).mean
    return mean


def masked(model: Any, given: dict[str, Tensor]) -> Tensor:
    x, y, target_x, _ = given.values()
    mask = (torch.arange(x.shape[1]) == 2).expand(x.shape[:2])
    mean: Tensor = model.predict(model.condition(x, y, mask=mask), target_x).mean
    return mean


def on_prefixes(model: Any, given: dict[str, Tensor]) -> Tensor:
    found: Tensor = model.prefix_log_prob(given["context_x"], given["context_y"])
    return found


def one_by_one(model: Any, given: dict[str, Tensor]) -> Tensor:
    state = None
    for time, mark in zip(given["times"].T, given["marks"].T, strict=True):
        state = model.observe(state, time, mark)
    predicted = model.next_event(state)
    return torch.cat([predicted.time.mean.unsqueeze(1), predicted.mark.logits], 1)


def between_events(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The intensity does not depend on the mark, but the mark's layer is called nevertheless."""
    found: Tensor = model.intensity(given["times"][0], given["marks"][0], torch.tensor([0.5, 2.5]))
    return found


def token_by_token(model: Any, given: dict[str, Tensor]) -> Tensor:
    model.clean_state()
    found: Tensor = [model.forward_step(token) for token in torch.cat([given["tokens"]] * 2, 1).unbind(1)][-1]
    return found


def runs(model: nn.Module, how: str) -> list[Run]:
    """Return ways to have a model predict: all of them with an adapter in evaluation."""
    if model.training or how != "adapter":
        return [answer]
    if isinstance(model, NeuralProcess):
        return [answer, in_pieces, masked, on_prefixes]
    if isinstance(model, PointProcess):
        return [answer, one_by_one, between_events]
    return [answer, token_by_token] if isinstance(model, StreamClassifier) else [answer]


def deep(system: str) -> Any:
    """Return a model with two of each part that may occur several times. The layers of a classifier differ, and more
    layers take long."""
    known = inspect.signature(SYSTEMS[system].__init__).parameters
    torch.manual_seed(0)
    sizes = ("depth", "embedding_depth", "projection_depth", "num_latents")
    return made(system, **{name: 2 for name in sizes if name in known}).double()


def layers(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, (nn.Linear, nn.LayerNorm))]


def test_every_model_is_here() -> None:
    others = {
        "NeuralProcess",
        "PointProcess",
        "Events",
        "FrameEvents",
        "events_from_frame",
        "event_scores",
        "trivial_event_scores",
    }
    assert {kind.__name__ for kind in SYSTEMS.values()} == set(cmab_models.__all__) - others


WAYS = ("adapter", "hook", "forward")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_changed_layer_is_called(system: str, training: bool, how: str) -> None:
    """torch's fused encoder layer, used without gradients, reads weights and calls no module;
    its attention never calls `out_proj`.

    In training each layer is changed in one way, in evaluation in the other two, and by an adapter always.
    """
    model, given = deep(system).train(training), inputs(system, torch.float64)
    names = layers(model)
    assert len(names) > 1
    every = len(names) < len(WAYS) or (how == "adapter" and not training)
    for at, name in enumerate(names):
        if not every and (WAYS[at % len(WAYS)] == how) != training:
            continue
        adapted = copy.deepcopy(model)
        count, before = changed(adapted, name, how), 0
        weights = [weight.detach() for weight in model.get_submodule(name).parameters()]
        for weight in weights:
            weight.mul_(2)
        for run in runs(model, how):
            with torch.set_grad_enabled(training):
                torch.manual_seed(1)  # in training the classifiers draw a place on the circle of positions
                expected = run(model, given)
                torch.manual_seed(1)
                found = run(adapted, given)
            assert count() > before, (name, run.__name__)
            before = count()
            torch.testing.assert_close(
                found, expected, rtol=1e-9, atol=1e-9, msg=lambda m, at=(name, run.__name__): f"{at}: {m}"
            )
        for weight in weights:
            weight.div_(2)
