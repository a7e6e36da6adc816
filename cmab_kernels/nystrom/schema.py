"""The m x m part of Nyström attention as `torch.library` operators: contracts, shapes, operation counts and
derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.operator import Call, Gradients, Operator, derivatives_of
from .contract import LandmarkValues, LandmarkValuesBackward, Pinv, PinvBackward
from .costs import pinv_operations
from .reference import iterative_pinv_reference, landmark_values_reference


def _definition(inputs: LandmarkValues) -> Tensor:
    query, key, values, absent, scale, iterations, _ = inputs
    return landmark_values_reference(query, key, values, absent, scale, iterations)


# ---- operation counts, for contracts of shapes: a multiply-add is two operations


def _pinv_operations(inputs: Any) -> int:
    return inputs.matrix[0] * pinv_operations(inputs.matrix[-1], inputs.iterations)


def _values_operations(inputs: Any) -> int:
    matrices, number, width = inputs.landmark_query
    return matrices * (2 * number**2 * (width + inputs.values[-1]) + pinv_operations(number, inputs.iterations))


def _values_backward_operations(inputs: Any) -> int:
    """Count the kernel matrix and the iterations, which the gradient computes again, and two products for the gradient
    of each product."""
    matrices, number, _width = inputs.landmark_query
    return 3 * _values_operations(inputs) - matrices * 2 * number**2 * inputs.values[-1]


# ---- gradients


def _pinv_backward(call: Call[Pinv], dinverse: Tensor) -> Gradients:
    return {"matrix": _pinv_backward_op(PinvBackward(dinverse, *call.inputs))}


def _pinv_gradient(inputs: PinvBackward) -> tuple[Tensor, ...]:
    """The gradient, computed by autograd through the definition."""
    inverse = iterative_pinv_reference(inputs.matrix, inputs.iterations)
    return torch.autograd.grad(inverse, inputs.matrix, inputs.dinverse, create_graph=True)


def _values_backward(call: Call[LandmarkValues], dout: Tensor) -> Gradients:
    grads = _values_backward_op(LandmarkValuesBackward(dout, *call.inputs))
    return dict(zip(("landmark_query", "landmark_key", "values"), grads, strict=True))


def _values_gradient(inputs: LandmarkValuesBackward) -> tuple[Tensor, ...]:
    dout, query, key, values, absent, scale, iterations, _ = inputs
    out = landmark_values_reference(query, key, values, absent, scale, iterations)
    return torch.autograd.grad(out, (query, key, values), dout, create_graph=True)


iterative_pinv_op = Operator(
    "nystrom",
    "iterative_pinv",
    Pinv,
    ("inverse",),
    shapes=lambda inputs: inputs.matrix.new_empty(inputs.matrix.shape),
    operations=_pinv_operations,
    backward=_pinv_backward,
    reference=lambda inputs: iterative_pinv_reference(inputs.matrix, inputs.iterations),
)
_pinv_backward_op = Operator(
    "nystrom",
    "iterative_pinv_backward",
    PinvBackward,
    ("dmatrix",),
    shapes=lambda inputs: inputs.matrix.new_empty(inputs.matrix.shape),
    # The gradient computes the iterations again, and two products for the gradient of each product.
    operations=lambda inputs: 3 * _pinv_operations(inputs),
    backward=derivatives_of(_pinv_gradient, "dinverse", "matrix"),
)
landmark_values_op = Operator(
    "nystrom",
    "landmark_values",
    LandmarkValues,
    ("out",),
    shapes=lambda inputs: inputs.values.new_empty(inputs.values.shape),
    operations=_values_operations,
    backward=_values_backward,
    reference=_definition,
)
_values_backward_op = Operator(
    "nystrom",
    "landmark_values_backward",
    LandmarkValuesBackward,
    ("dlandmark_query", "dlandmark_key", "dvalues"),
    shapes=lambda inputs: tuple(
        t.new_empty(t.shape) for t in (inputs.landmark_query, inputs.landmark_key, inputs.values)
    ),
    operations=_values_backward_operations,
    backward=derivatives_of(_values_gradient, "dout", "landmark_query", "landmark_key", "values"),
)
