"""How every operator is called: what makes it differentiable, and the choice between its definition, its kernel and the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .backends import kernel
from .checks import as_they_are
from .tracing import distinct, is_differentiated, is_plain, is_profiled, under_transform


def differentiable(forward: Callable, save: Callable, backward: Callable) -> Callable[..., Any]:
    """Return a function that computes `forward(*args)` and has the gradient `backward(ctx, *grads)`.

    `save(ctx, args, output)` stores what `backward` needs. There are two autograd Functions. The one whose `forward`
    takes `ctx` costs 8 us per call; the one with `setup_context` costs 24 us. The latter is used only under a transform
    (`vmap`, `torch.func`), which requires it.
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
        function = Transformable if under_transform() else Eager
        return function.apply(*distinct(args))

    return call


def _no_check(*inputs: Any) -> None:
    """The default `check` of an `Operator`: accept all values."""


class Operator:
    """An operator of a set. The last argument of a call is the name of the implementation that `backends.choose` chose.

    "reference" runs the definition in PyTorch, which autograd differentiates and tracers record. Any other
    implementation runs its kernel: through the autograd Function if an input requires a gradient or a transform is on,
    directly if `is_plain`, and otherwise through torch's dispatcher.
    """

    def __init__(
        self,
        library: torch.library.Library,
        operator_set: str,
        name: str,
        tensors: int,
        save: Callable[..., None],
        backward: Callable[..., Any],
        *,
        reference: Callable[..., Any] | None = None,
        check: Callable[..., None] = _no_check,
        function: str | None = None,
    ) -> None:
        """Give a body to `cmab::name`, which `library` has defined. Its first `tensors` arguments are tensors or None.

        `reference` is the definition. It is None for a backward operator, because autograd differentiates the
        definition without one. `check` raises for values that are not allowed. It runs in every call, also inside a
        compiled graph. `function` is the name of the function in the modules of the implementations; by default it is
        the name of the operator.
        """
        self._set, self._name, self._tensors = operator_set, function or name, tensors
        self._reference, self._check = reference, check
        self._overload = getattr(torch.ops.cmab, name).default
        self._differentiable = differentiable(self._overload, save, backward)
        library.impl(name, self._run, "CompositeExplicitAutograd")

    def __call__(self, *args: Any) -> Any:
        if args[-1] == "reference":
            return self._by_definition(*args[:-1])
        tensors = args[: self._tensors]
        if is_differentiated(*tensors):
            return self._differentiable(*args)
        return (self._run if is_plain(*tensors) and not is_profiled() else self._overload)(*args)  # profiles show dispatched calls only

    def _run(self, *args: Any) -> Any:
        inputs = args[:-1]
        self._check(*inputs)
        return kernel(self._set, args[-1], self._name)(*inputs)

    def _by_definition(self, *inputs: Any) -> Any:
        assert self._reference is not None
        self._check(*inputs)
        with as_they_are(inputs[0].device):
            return self._reference(*inputs)


def gradient_of_formula(
    formula: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor | None], directions: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the vector-Jacobian products of `formula(*tensors)` with `directions`, one per tensor; None where a tensor
    is None.

    The products are differentiable. They give the second and higher derivatives of kernels by autograd, correct to any
    order.
    """
    if under_transform():
        return _pulled_back(formula, tensors, directions)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():  # aliases: a tensor passed twice gets two partial derivatives
        inputs = [t if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]
        given = [t for t in inputs if t is not None]
        partials = iter(torch.autograd.grad(formula(*inputs), given, directions, create_graph=create_graph, allow_unused=True))
    return tuple(None if t is None else next(partials) for t in inputs)


def _pulled_back(
    formula: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor | None], directions: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Do what `gradient_of_formula` does under a transform of `torch.func`, where `requires_grad_` is not allowed."""

    def of_given(*given: Tensor) -> tuple[Tensor, ...]:
        parts = iter(given)
        return tuple(formula(*(None if t is None else next(parts) for t in tensors)))

    pull_back = torch.func.vjp(of_given, *(t for t in tensors if t is not None))[1]
    partials = iter(pull_back(tuple(directions)))
    return tuple(None if t is None else next(partials) for t in tensors)


def fold(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Fold the mapped dimension `dim` of vmap into the batch: a tensor (B, ...) becomes (size * B, ...). None for `dim`
    means not mapped: the tensor is expanded."""
    if tensor is None:
        return None
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return mapped.flatten(0, 1)


def of_any_size(rule: Callable) -> Callable:
    """Extend a vmap rule to a mapped dimension of size 0. The results get their shapes from a call of the rule on one
    element without values."""

    def whole(info: Any, in_dims: Any, *args: Any) -> Any:
        if info.batch_size > 0:
            return rule(info, in_dims, *args)
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        element = (_without_values(arg, dim) for arg, dim in zip(args, in_dims, strict=True))
        results, dims = rule(info._replace(batch_size=1), in_dims, *element)
        if isinstance(results, Tensor):
            return _nothing_of(results, dims, device), dims
        return tuple(_nothing_of(result, dim, device) for result, dim in zip(results, dims, strict=True)), dims

    return whole


def _without_values(arg: Any, dim: int | None) -> Any:
    """Return a tensor as a meta tensor with one element in the mapped dimension, and any other argument unchanged."""
    if not isinstance(arg, Tensor):
        return arg
    shape = list(arg.shape)
    if dim is not None:
        shape[dim] = 1
    return arg.new_empty(shape, device="meta")


def _nothing_of(result: Tensor, dim: int | None, device: torch.device) -> Tensor:
    """Return an empty result on the device, given the result for one element. Dimension 0 gets size 0 if the result is
    mapped."""
    return result.new_empty(result.shape if dim is None else (0, *result.shape[1:]), device=device)


def folding_rule(operator: Callable, tensors: int) -> Callable:
    """Return the vmap rule of an operator whose first `tensors` arguments are (B, ...) tensors or None. It folds the
    mapped dimension into B."""

    @of_any_size
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        folded = [fold(t, d, info.batch_size) for t, d in zip(args[:tensors], in_dims, strict=False)]
        results = operator(*folded, *args[tensors:])
        unneeded = [r.dim() == 1 and r.numel() == 0 for r in results]  # a result that was not requested is an empty vector
        unfolded = tuple(r if skip else r.unflatten(0, (info.batch_size, -1)) for r, skip in zip(results, unneeded, strict=True))
        return unfolded, tuple(None if skip else 0 for skip in unneeded)

    return rule


def looping_rule(operator: Callable, tensors: int) -> Callable:
    """Return the vmap rule of an operator whose tensors cannot all be folded into a batch. It calls the operator once
    per mapped element."""

    @of_any_size
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        mapped = list(zip(args[:tensors], in_dims, strict=False))
        calls = [[t if d is None else t.select(d, i) for t, d in mapped] for i in range(info.batch_size)]
        outputs = [torch.stack(parts) for parts in zip(*(operator(*call, *args[tensors:]) for call in calls), strict=True)]
        return tuple(outputs), (0,) * len(outputs)

    return rule
