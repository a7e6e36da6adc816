"""One way to make a differentiable operator, shared by all families, and what its callers need to be traced and transformed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_F = TypeVar("_F", bound=Callable[..., Any])
_under_transform = torch._C._are_functorch_transforms_active


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


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a call need not be dispatched: nobody watches (no compiler, mode or tensor subclass), and memory holds what the tensors are.

    Dispatch costs 6 us, which is what a streaming step of few keys has to spare. It also resolves lazy negations (`x.conj().imag`).
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(t is None or (type(t) in (Tensor, torch.nn.Parameter) and not t.is_neg()) for t in tensors)


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
