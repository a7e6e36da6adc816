"""One way to make a differentiable operator, shared by all families, and what its callers need to be traced and transformed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_F = TypeVar("_F", bound=Callable[..., Any])
# By names of their own: looking one up in torch takes as long as the call, and a streaming step has 3 us in all.
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_under_transform = torch._C._are_functorch_transforms_active
_is_batched_gradient = torch._C._functorch.is_legacy_batchedtensor


def traced_as_constant(function: _F) -> _F:
    """A compiler that traces the caller calls `function` once, with Python constants, and sees the answer only.

    As `torch.compiler.assume_constant_result`, without importing the compiler for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo's own mark
    return function


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether a call must go through its autograd Function: for a gradient, under a transform, or to refuse forward mode."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    return _under_transform() or forward_ad._current_level >= 0


def is_watched() -> bool:
    """Whether somebody looks on at every call: a compiler, a dispatch mode, a transform or forward-mode differentiation."""
    return _is_compiling() or _dispatch_modes() > 0 or _under_transform() or forward_ad._current_level >= 0


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a call need not be dispatched: nobody watches (no compiler, mode or tensor subclass), and memory holds what the tensors are.

    Dispatch costs 6 us, which is what a streaming step of few keys has to spare. It also resolves lazy negations (`x.conj().imag`), and
    takes apart what `is_grads_batched` hands to a backward.
    """
    if _is_compiling() or _dispatch_modes() > 0:
        return False
    return all(_is_plain(t) for t in tensors if t is not None)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_neg() and not _is_batched_gradient(tensor)


def differentiable(forward: Callable, save: Callable, backward: Callable) -> Callable[..., Any]:
    """An autograd Function of `forward(*args)`, in both of torch's styles.

    `save(ctx, args, output)` keeps what `backward(ctx, *grads)` needs. The ctx-first style costs 8 us a call and the functorch style 24,
    since it binds the signature each time; but only the latter can be transformed (`vmap`, `torch.func`). So each serves where it must.
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
        function = Transformable if _under_transform() else Eager
        return function.apply(*args)

    return call


class Operator:
    """An operator as the public functions call it: the cheapest road that gives the right thing.

    Through its autograd Function where a gradient may be asked for or a transform is on; straight into `body` where nobody watches; else
    through the dispatcher.
    """

    def __init__(self, body: Callable[..., Any], overload: Callable[..., Any], save: Callable, backward: Callable) -> None:
        self._body, self._overload = body, overload
        self._function = differentiable(overload, save, backward)

    def __call__(self, *args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if is_differentiated(*tensors):
            return self._function(*args)
        return (self._body if is_plain(*tensors) else self._overload)(*args)


def gradient_of_formula(
    formula: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor | None], directions: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """To each of `tensors`, None where it is None: the derivative of `formula(*tensors)` along `directions`, itself differentiable.

    For a backward's own backward: rare, and right to any order.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():  # aliases, so that each partial derivative is taken alone
        inputs = [t if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]
        given = [t for t in inputs if t is not None]
        partials = iter(torch.autograd.grad(formula(*inputs), given, directions, create_graph=create_graph, allow_unused=True))
    return tuple(None if t is None else next(partials) for t in inputs)


def fold(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """(B, ...) mapped by vmap along `dim`, or not mapped at all, as (size * B, ...)."""
    if tensor is None:
        return None
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return mapped.flatten(0, 1)


def folding_rule(operator: Callable, tensors: int) -> Callable:
    """The vmap rule of an operator whose first `tensors` arguments are tensors or None, batch first: into the batch with the mapped one."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        folded = [fold(t, d, info.batch_size) for t, d in zip(args[:tensors], in_dims, strict=False)]
        results = operator(*folded, *args[tensors:])
        unneeded = [r.dim() == 1 and r.numel() == 0 for r in results]  # a result that nobody asked for is an empty vector
        unfolded = tuple(r if skip else r.unflatten(0, (info.batch_size, -1)) for r, skip in zip(results, unneeded, strict=True))
        return unfolded, tuple(None if skip else 0 for skip in unneeded)

    return rule
