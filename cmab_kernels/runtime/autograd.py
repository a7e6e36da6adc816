"""Two ways to make a function of tensors differentiable: an autograd Function, or a formula that autograd
differentiates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import as_they_are
from .tracing import distinct, under_transform


def differentiable(forward: Callable, save: Callable, backward: Callable) -> Callable[..., Any]:
    """Return a function that computes `forward(*args)` and has the gradient `backward(ctx, *grads)`.

    `save(ctx, args, output)` stores what `backward` needs. There are two autograd Functions. The Function whose
    `forward` takes `ctx` costs 8 us per call; the Function with `setup_context` costs 24 us. The second is used only
    under a transform (`vmap`, `torch.func`), which requires it.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = forward(*args)
            save(ctx, args, output)
            return output

    class Transformable(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return forward(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            save(ctx, inputs, output)

    Eager.backward = Transformable.backward = staticmethod(backward)  # type: ignore[method-assign]  # one for both

    def call(*args: Any) -> Any:
        if not under_transform():
            return Eager.apply(*distinct(args))
        if (
            torch.compiler.is_compiling()
        ):  # Dynamo cannot trace an autograd Function with a variable number of arguments here
            torch._dynamo.graph_break()
        return Transformable.apply(*args)

    return call


def gradient_of_formula(
    formula: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor | None], directions: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the vector-Jacobian products of `formula(*tensors)` with `directions`, one per tensor; None where a tensor
    is None.

    The products are differentiable. They give the second and higher derivatives of kernels by autograd, correct to any
    order. Autocast does not change the formula, as it does not change the kernel.
    """
    with as_they_are(directions[0].device):
        return _products(formula, tensors, directions)


def _products(
    formula: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor | None], directions: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    if under_transform():
        return _pulled_back(formula, tensors, directions)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():  # these are views, because a tensor that is passed twice has two partial derivatives
        inputs = [t if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]
        given = [t for t in inputs if t is not None]
        partials = iter(
            torch.autograd.grad(formula(*inputs), given, directions, create_graph=create_graph, allow_unused=True)
        )
    return tuple(None if t is None else next(partials) for t in inputs)


def _pulled_back(
    formula: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor | None], directions: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Do the same as `gradient_of_formula`, under a transform of `torch.func`, where `requires_grad_` is not
    allowed."""

    def of_given(*given: Tensor) -> tuple[Tensor, ...]:
        parts = iter(given)
        return tuple(formula(*(None if t is None else next(parts) for t in tensors)))

    pull_back = torch.func.vjp(of_given, *(t for t in tensors if t is not None))[1]
    partials = iter(pull_back(tuple(directions)))
    return tuple(None if t is None else next(partials) for t in tensors)
