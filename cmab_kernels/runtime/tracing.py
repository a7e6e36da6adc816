"""Whether a call is observed by a compiler, a tracer, a dispatch mode or a transform, and must go through torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler

_F = TypeVar("_F", bound=Callable[..., Any])
# Bound once here: looking a function up in torch takes as long as calling it, which a streaming step of a few us would notice.
_is_compiling = torch.compiler.is_compiling
_is_tracing = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack
_mode_of = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY
"""The mode of `make_fx` and `torch.func.linearize`."""
_under_transform = torch._C._are_functorch_transforms_active
has_memory: Callable[[Tensor], bool] = torch._C._has_storage
"""Whether a tensor is itself in memory: what `vmap`, `torch.func` and `is_grads_batched` make of a tensor stands for one that is."""
_is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def traced_as_constant(function: _F) -> _F:
    """Decorate a function of Python constants: a compiler that traces its caller calls it once and treats the result as a constant.

    It does what `torch.compiler.assume_constant_result` does, without importing the compiler for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo's own mark
    return function


def specialised(size: int) -> int:
    """A size as a number: a compiler that traces it as a symbol compiles for this value."""
    return len(range(size))


def under_transform() -> bool:
    """Whether a transform of `torch.func` (vmap, grad, ...) is on."""
    return _under_transform()


def needs_definition() -> bool:
    """Whether only a definition can be differentiated: in forward mode, which kernels have none of, and by a transform of `torch.func` that
    is compiled, since Dynamo traces none through an autograd Function that takes any number of arguments."""
    return forward_ad._current_level >= 0 or (_under_transform() and _is_compiling())


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether a call must be differentiable: for a gradient, under a transform, or in forward mode."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return _under_transform() or forward_ad._current_level >= 0


def is_transformed(tensor: Tensor) -> bool:
    """Whether it may stand for more than its value: for a tangent of forward mode, or for what a transform of `torch.func` made of it."""
    if _under_transform() and _is_wrapped(tensor):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def is_watched() -> bool:
    """Whether all calls are observed: by a compiler, `torch.jit.trace`, a dispatch mode, a transform or forward-mode autograd."""
    return _is_compiling() or _is_tracing() or _dispatch_modes() > 0 or _under_transform() or forward_ad._current_level >= 0


_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.6 does not tell


def is_recorded() -> bool:
    """Whether a call is recorded as a program of its own, by `torch.export`, `torch.jit.trace` or `make_fx`, with what it holds fixed.

    `torch.compile` records too, but looks at every call whether its constants still hold.
    """
    if _is_compiling():
        return _is_exporting()
    return _is_tracing() or (_dispatch_modes() > 0 and _mode_of(_PROXY) is not None)


def is_profiled() -> bool:
    """Whether torch's profiler is on: it sees no call that bypasses the dispatcher. To ask takes one look at a name."""
    return _profiler._is_profiler_enabled


def as_row(name: str) -> AbstractContextManager[Any]:
    """A context that is a row of a profile, for a call that no dispatcher sees; where no profiler is on, nothing."""
    return _profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else _NO_ROW


_NO_ROW = nullcontext()


def distinct(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an autograd Function, where a tensor that is given twice is another the second time, as Dynamo requires."""
    if not _is_compiling():
        return args
    return tuple(a.view_as(a) if isinstance(a, Tensor) and any(a is b for b in args[:i]) else a for i, a in enumerate(args))


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a call may bypass the dispatcher: no compiler, tracer or mode is active, and each tensor's memory holds its values.

    The dispatcher costs 6 us, too much for a streaming step of few keys. It is needed for subclasses of Tensor, to resolve lazy negations
    (`x.conj().imag`), to unbatch the gradients that `is_grads_batched` passes to a backward, and to unwrap the tensors that a pull-back of
    `torch.func.vjp` has kept: the transform that made them has ended.
    """
    if _is_compiling() or _is_tracing() or _dispatch_modes() > 0:
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN_TYPES or tensor.is_neg() or not has_memory(tensor)):
            return False
    return True


def is_direct(chosen: str, *tensors: Tensor | None) -> bool:
    """Whether one native call may do what is otherwise composed of differentiable parts: no gradient is asked for, and nobody watches."""
    return chosen == "native" and not is_differentiated(*tensors) and is_plain(*tensors)


def has_values(tensor: Tensor) -> bool:
    """Whether Python may read the values: meta and fake tensors have none, and a trace or transform must not depend on them."""
    if _is_compiling() or _is_tracing() or _under_transform() or _mode_of(_PROXY) is not None:
        return False
    return not tensor.is_meta and not hasattr(tensor, "fake_mode")  # torch's fake tensors have this attribute


def extent(size: int | Tensor) -> int:
    """An extent of a shape as an int. `torch.jit.trace` makes it a tensor; the trace then holds for the traced shapes only."""
    return int(size) if isinstance(size, Tensor) else size
