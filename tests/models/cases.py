"""Small models of all systems, and inputs for their main methods."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from cmab_models.neural_processes import NeuralProcess
from cmab_models.point_processes import PointProcess
from cmab_models.systems import SYSTEMS
from torch import Tensor

SIZES = {
    "dim": 8,
    "num_heads": 2,
    "sequence_len": 4,
    "num_points": 5,
    "num_marks": 3,
    "dim_in": 3,
    "num_classes": 2,
    "num_landmarks": 2,
}
TIMES = torch.tensor([[1.0, 1.0, 2.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
"""Events include some at the same time, and some at time 0."""
MARKS = torch.tensor([[0, 1, 2], [2, 2, 0]])


def made(system: str, **changes: Any) -> Any:
    """Return a small model in eval mode."""
    given = {}
    for name, each in list(inspect.signature(SYSTEMS[system].__init__).parameters.items())[1:]:
        if name in SIZES or each.default is each.empty:
            given[name] = SIZES.get(name, 1)
    return SYSTEMS[system](**given | changes).eval()


def inputs(system: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the inputs of the system's main method, by name, the same on every call."""
    torch.manual_seed(1)
    kind = SYSTEMS[system]
    if issubclass(kind, NeuralProcess):
        shapes = {"context_x": (2, 6, 1), "context_y": (2, 6, 1), "target_x": (2, 5, 1), "target_y": (2, 5, 1)}
    elif issubclass(kind, PointProcess):
        return {"times": TIMES, "marks": MARKS}
    elif "sequence_len" in inspect.signature(kind.__init__).parameters:
        shapes = {"tokens": (2, 4, 3)}
    else:
        shapes = {"query": (2, 4, 1), "key": (2, 5, 1), "value": (2, 5, 1)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def answer(model: Any, given: dict[str, Any]) -> Tensor:
    """Return likelihoods, or the answers of a system that has none."""
    if isinstance(model, NeuralProcess):
        return model.log_prob(**given)
    if isinstance(model, PointProcess):
        return torch.cat([part.flatten() for part in model.log_prob(**given)[:3]])
    found: Tensor = model(**given)
    return found
