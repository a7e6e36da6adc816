"""Whether a call is observed by a compiler, a tracer, a dispatch mode or a transform, and must go through torch's
dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler

_F = TypeVar("_F", bound=Callable[..., Any])
# Functions of torch are bound once here, because looking up a function takes as long as calling it. This matters in a
# streaming step of a few us.
_is_compiling = torch.compiler.is_compiling
is_traced_by_jit: Callable[[], bool] = torch._C._is_tracing
"""Whether `torch.jit.trace` records. An extent is then a tensor."""
_dispatch_modes = torch._C._len_torch_dispatch_stack
_mode_of = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY
"""The dispatch mode of `make_fx` and `torch.func.linearize`."""
_under_transform = torch._C._are_functorch_transforms_active
has_memory: Callable[[Tensor], bool] = torch._C._has_storage
"""Whether a tensor has its own memory. The wrappers of `vmap`, `torch.func` and `is_grads_batched` have no memory: they
represent a tensor that has."""
_is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_Parameter = torch.nn.Parameter


def traced_as_constant(function: _F) -> _F:
    """Decorate a function of Python constants. A compiler that traces its caller calls it once and treats the result as
    a constant.

    The decorator does what `torch.compiler.assume_constant_result` does, without importing the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo's own mark
    return function


def specialised(size: int) -> int:
    """Return a size as a number. A compiler that traces the size as a symbol then compiles for this value."""
    return len(range(size))


def under_transform() -> bool:
    """Whether a transform of `torch.func` (vmap, grad, ...) is on."""
    return _under_transform()


def needs_definition() -> bool:
    """Whether only the definition can be differentiated: in forward mode, and by a compiled transform of `torch.func`.

    Kernels have no forward mode. Dynamo cannot trace a transform through an autograd Function with a variable number of
    arguments."""
    return forward_ad._current_level >= 0 or (_under_transform() and _is_compiling())


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether a call must be differentiable: for a gradient, under a transform, or in forward mode."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return _under_transform() or forward_ad._current_level >= 0


def has_tangent(*tensors: Tensor) -> bool:
    """Whether a tensor carries a tangent of forward mode."""
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor may carry more than its value: a tangent of forward mode, or a wrapper of a transform of
    `torch.func`."""
    return (_under_transform() and _is_wrapped(tensor)) or has_tangent(tensor)


def is_observed() -> bool:
    """Whether all calls are observed: by a compiler, `torch.jit.trace`, a dispatch mode, a transform or forward-mode
    autograd."""
    return (
        _is_compiling()
        or is_traced_by_jit()
        or _dispatch_modes() > 0
        or _under_transform()
        or forward_ad._current_level >= 0
    )


is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.6 lacks it
"""Whether `torch.export` records the call."""


@traced_as_constant
def exports_to_onnx() -> bool:
    """Whether `torch.onnx.export` records the call, or translates what was recorded."""
    exporter = sys.modules.get("torch.onnx")  # torch imports it when it is first used
    return exporter is not None and bool(exporter.is_in_onnx_export())


def records_no_function() -> bool:
    """Whether a recorder that cannot keep an autograd Function is on: `torch.export` drops its
    gradient, and `torch.jit.trace` cannot save it."""
    return is_exporting() if _is_compiling() else is_traced_by_jit()


def is_recorded() -> bool:
    """Whether a call is recorded as a separate program, by `torch.export`, `torch.jit.trace` or `make_fx`. The program
    keeps constants fixed.

    `torch.compile` records too, but checks at every call whether its constants are still valid.
    """
    if _is_compiling():
        return is_exporting()
    return is_traced_by_jit() or (_dispatch_modes() > 0 and _mode_of(_PROXY) is not None)


def is_profiled() -> bool:
    """Whether torch's profiler is on. The profiler does not see calls that bypass the dispatcher. This check only reads
    one variable."""
    return _profiler._is_profiler_enabled


def as_row(name: str) -> AbstractContextManager[Any]:
    """Return a context that makes a row in a profile, for a call that bypasses the dispatcher. It does nothing if no
    profiler is on."""
    return _profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else _NO_ROW


_NO_ROW = nullcontext()


def distinct(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an autograd Function. If a tensor occurs a second time, it is replaced by a view, because
    Dynamo requires distinct tensors."""
    if not _is_compiling():
        return args
    return tuple(
        a.view_as(a) if isinstance(a, Tensor) and any(a is b for b in args[:i]) else a for i, a in enumerate(args)
    )


def may_bypass_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether a call may bypass the dispatcher: no compiler, tracer or mode is active, and each tensor's memory holds
    its values.

    The dispatcher costs 6 us, too much for a streaming step with few keys. The dispatcher is needed for subclasses of
    Tensor and for three other kinds of tensor. It resolves lazy negations (`x.conj().imag`). It unbatches the gradients
    that `is_grads_batched` passes to a backward pass. It unwraps the tensors that a pull-back of `torch.func.vjp` has
    kept after the end of the transform that made them.
    """
    if _is_compiling() or is_traced_by_jit() or _dispatch_modes() > 0:
        return False
    for tensor in tensors:
        if tensor is None:
            continue
        kind = type(tensor)
        # Wrappers without memory are plain Tensors, so this check can skip Parameters. A stack has
        # hundreds of them.
        if (kind is not _Parameter and (kind is not Tensor or not has_memory(tensor))) or tensor.is_neg():
            return False
    return True


def may_call_native(chosen: str, *tensors: Tensor | None) -> bool:
    """Whether one native call may replace a composition of differentiable parts: no gradient is requested, and no
    compiler, tracer or mode observes the call."""
    return chosen == "native" and not is_differentiated(*tensors) and may_bypass_dispatcher(*tensors)


def has_values(tensor: Tensor) -> bool:
    """Whether Python may read the values. Meta and fake tensors have none, and a trace or transform must not depend on
    values."""
    if _is_compiling() or is_traced_by_jit() or _under_transform() or _mode_of(_PROXY) is not None:
        return False
    return not tensor.is_meta and not hasattr(tensor, "fake_mode")  # torch's fake tensors have this attribute


def extent(size: int | Tensor) -> int:
    """Return an extent of a shape as an int. `torch.jit.trace` makes it a tensor; then the trace is valid only for the
    traced shapes."""
    return int(size) if isinstance(size, Tensor) else size
