"""The choice of the implementation that an operator runs.

Each operator set has several implementations of one definition. An implementation that the caller names runs, or raises
an error with the reason why it cannot run. "auto" takes the first implementation in the order of `IMPLEMENTATIONS` that
supports the inputs, or the reference if none does. CUDA comes after Triton if measurements showed that Triton is faster
(`TRITON_IS_FASTER`).
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from . import setting
from .calls import ModuleExplanation, explain_calls
from .checks import check_choice, kind_of, mismatch
from .tracing import needs_definition, traced_as_constant

SETS = (
    "attention",
    "attention.prefix",
    "attention.projected",
    "layers",
    "layers.stack",
    "nystrom",
    "nystrom.continual",
    "intention",
    "intention.solve",
)
"""The operator sets: subpackages whose modules have the same names, for example those of `KINDS`."""

KINDS = ("native", "cuda", "triton")
"""The kinds of implementations, each a module or subpackage of this name in a set. "auto" tries them in this order."""


def _implementations(operator_set: str) -> dict[str, str]:
    folder = Path(__file__).parents[1].joinpath(*operator_set.split("."))
    there = (impl for impl in KINDS if (folder / f"{impl}.py").exists() or (folder / impl).is_dir())
    return {impl: f"cmab_kernels.{operator_set}.{impl}" for impl in there}


IMPLEMENTATIONS = {operator_set: _implementations(operator_set) for operator_set in SETS}
"""Operator set -> implementation -> path of its module, which is imported on first use. Every set also has a
reference."""

TRITON_IS_FASTER: dict[str, Callable[..., bool]] = {
    "intention.solve": lambda gram, rhs: gram.dtype == torch.float32 and gram.shape[-1] <= 64
}
"""Operator set -> whether Triton's kernel was faster than that in CUDA C++ for inputs like these, by the times measured
on an H100 (docs/measured_gpu.md; `tests/intention/test_choice.py` compares them)."""

OPERATORS: dict[str, str] = {
    "latent_attention": "attention",
    "attention_state": "attention",
    "remove_from_state": "attention",
    "projected_attention_state": "attention.projected",
    "attention_layer": "layers",
    "feed_forward_layer": "layers",
    "block_stack": "layers.stack",
    "prefix_attention_states": "attention.prefix",
    "nystrom_attention": "nystrom",
    "iterative_pinv": "nystrom",
    "continual_nystrom_step": "nystrom.continual",
    "continual_attention_step": "nystrom.continual",
    "intention": "intention",
    "sigma_intention": "intention",
    "ridge_state": "intention",
    "ridge_step": "intention",
    "prefix_ridge_states": "intention",
    "remove_ridge": "intention",
    "solve_ridge": "intention.solve",
    "regularised_solve": "intention.solve",
    "regularised_inverse": "intention.solve",
}
"""Public operator -> its operator set."""

REFERENCE_COSTS: dict[str, str] = {
    "attention": "is dense in the number of keys",
    "attention.projected": "is dense in the number of inputs",
    "attention.prefix": "is dense in the number of keys times that of prefixes",
    "layers.stack": "is dense in the number of inputs",
    "nystrom.continual": "reads the whole window at every step",
    "intention": "reads keys and values more than once, and copies them for sums in float64",
}
"""Operator set -> the cost of its reference, for the warning when "auto" falls back to it. Sets of small matrices give
no warning."""


class Explanation(NamedTuple):
    """Whether an implementation can run the given inputs, and the reason."""

    impl: str
    usable: bool
    reason: str


def _names(operator_set: str) -> tuple[str, ...]:
    return (*IMPLEMENTATIONS[operator_set], "reference")


_MODULES: dict[str, list[ModuleType]] = {path: [] for modules in IMPLEMENTATIONS.values() for path in modules.values()}
"""Module path -> [the module] once imported, else []. Each module has its own list: a compiler reads a container once,
when it first traces it, and would not see modules that are added to a shared container later."""

_PROBLEMS: dict[str, str] = {}
"""Module path -> why the module cannot be imported ("" if it was imported), for every module that was tried."""


@traced_as_constant
def _import_problem(path: str) -> str:
    """Try once to import the module; return why it failed, or "" for success."""
    if path not in _PROBLEMS:
        try:
            _MODULES.setdefault(path, [])[:] = [importlib.import_module(path)]
            _PROBLEMS[path] = ""
        except ImportError as error:
            _PROBLEMS[path] = str(error)
    return _PROBLEMS[path]


def imported(operator_set: str, impl: str) -> ModuleType | None:
    """The module of an implementation, or None if it cannot be imported."""
    path = IMPLEMENTATIONS[operator_set][impl]
    return None if _import_problem(path) else _MODULES[path][0]


def is_available(operator_set: str, impl: str) -> bool:
    """Whether an implementation can be imported, and `use_impl` names no other implementation."""
    if impl == "native":
        _tells_what_is_missing(operator_set)
    return current_impl() in ("auto", impl) and imported(operator_set, impl) is not None


_TOLD: list[str] = []
"""The reason why there is no native code, after a call has warned about it."""


@traced_as_constant
def _tells_what_is_missing(operator_set: str) -> bool:
    """Warn at the first call that would run native code if native code is missing; return whether this call warned."""
    problem = _import_problem(IMPLEMENTATIONS[operator_set]["native"])
    if not problem or _TOLD:
        return False
    _TOLD.append(problem)
    advice = "on a CPU PyTorch runs in their place, more slowly; docs/install.md says what a build needs"
    warnings.warn(f"cmab_kernels has no native kernels: {problem}; {advice}", RuntimeWarning, stacklevel=5)
    return True


def implementation(operator_set: str, impl: str) -> ModuleType:
    """Return the module of an implementation. The name comes from `choose`, or from a graph that
    may have been compiled or exported elsewhere."""
    problem = _import_problem(IMPLEMENTATIONS[operator_set][impl])
    if problem:
        raise RuntimeError(f"impl: {impl!r} cannot run here: {problem}")
    return _MODULES[IMPLEMENTATIONS[operator_set][impl]][0]


def kernel(operator_set: str, impl: str, name: str) -> Callable[..., Any]:
    """Return the function `name` of an implementation that `choose` returned."""
    function: Callable[..., Any] = getattr(implementation(operator_set, impl), name)
    return function


def _unsupported(operator_set: str, impl: str, tensors: tuple[Tensor, ...]) -> str | None:
    """Return why `impl` cannot run `tensors`; None if it can."""
    if impl == "reference":
        return None
    path = IMPLEMENTATIONS[operator_set][impl]
    reason: str | None = _import_problem(path) or _MODULES[path][0].unsupported(*tensors)
    return reason


class use_impl:
    """Choose the implementation of every operator, from now on or within a `with` block.

    `impl` is "auto", "reference", "native", "cuda" or "triton"; any other value is a `ValueError`. Operators called
    with their own `impl=` keep it. Operators without an implementation of that name choose as with "auto".

    The choice applies to the thread or asyncio task that makes it. A new task begins with the choice of the code that
    creates it. A new thread begins with "auto", just as it begins with gradients enabled even under `torch.no_grad()`.
    When a block ends, its choice ends too, whichever other blocks are open.

    >>> with cmab_kernels.use_impl("reference"):
    ...     out = cmab_kernels.latent_attention(torch.randn(2, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8))
    """

    _before: setting.Level
    _after: setting.Level | None = None

    def __init__(self, impl: str) -> None:
        known = sorted({"auto", *(name for operator_set in IMPLEMENTATIONS for name in _names(operator_set))})
        check_choice("impl", impl, known)
        self._impl, self._around = impl, setting.impl
        if is_compiling():
            setting.impl = impl
            return
        self._before = setting.now()
        setting.impl = impl  # it is not known yet whether a block follows
        self._after = setting.now()

    def __enter__(self) -> use_impl:
        if is_compiling():
            setting.impl = self._impl
            return self
        if setting.now() is self._after:  # the first block replaces the choice that the call of `use_impl` made
            setting.back_to(self._before)
        setting.enter(self, self._impl)
        return self

    def __exit__(self, *exception: object) -> None:
        if is_compiling():
            setting.impl = self._around
        else:
            setting.leave(self)


def current_impl() -> str:
    """The implementation that `use_impl` has chosen in this thread or task."""
    return setting.impl if is_compiling() else setting.now().impl


def choose(operator_set: str, impl: str, *tensors: Tensor) -> str:
    """Return the name of the implementation to run: `impl`, or for "auto" the choice of `use_impl`, or the first
    implementation that supports `tensors`.

    If `needs_definition` is True, as in forward mode, the name is "reference", whatever the caller requested, because
    kernels have only a backward pass. An unknown name is a `ValueError`. An implementation that cannot run here is a
    `RuntimeError` with the reason.
    """
    check_name(operator_set, impl)
    if needs_definition():
        return "reference"
    if impl == "auto":
        impl = current_impl()
        if impl not in _names(operator_set):
            return _first_usable(operator_set, tensors)
    reason = _unsupported(operator_set, impl, tensors)
    if reason is not None:
        raise RuntimeError(f"impl: {impl!r} cannot run here: {reason}")
    return impl


def _first_usable(operator_set: str, tensors: tuple[Tensor, ...]) -> str:
    reasons = {}
    for impl in _in_order(operator_set, tensors):
        reason = _unsupported(operator_set, impl, tensors)
        if reason is None:
            return impl
        reasons[impl] = reason
    if tensors[0].device.type == "cpu" and _tells_what_is_missing(operator_set):
        return "reference"
    if operator_set in REFERENCE_COSTS and not is_compiling() and not tensors[0].is_meta:
        why = "; ".join(f"{impl}: {reason}" for impl, reason in reasons.items())
        warnings.warn(
            f"cmab_kernels runs its PyTorch reference, which {REFERENCE_COSTS[operator_set]} ({why})",
            RuntimeWarning,
            stacklevel=4,
        )
    return "reference"


def _in_order(operator_set: str, tensors: tuple[Tensor, ...]) -> Iterable[str]:
    """Return the implementations of a set, the fastest for such inputs first."""
    names = IMPLEMENTATIONS[operator_set]
    if operator_set in TRITON_IS_FASTER and TRITON_IS_FASTER[operator_set](*tensors):
        return sorted(names, key="cuda".__eq__)
    return names


def has_kernel(operator_set: str, *tensors: Tensor) -> bool:
    """Whether a kernel can run `tensors`, or the caller of `use_impl` has chosen an implementation. If neither is true,
    "auto" takes the reference."""
    if not is_free(operator_set, "auto") or any(
        _unsupported(operator_set, impl, tensors) is None for impl in IMPLEMENTATIONS[operator_set]
    ):
        return True
    if tensors[0].device.type == "cpu":
        _tells_what_is_missing(operator_set)
    return False


def is_free(operator_set: str, impl: str) -> bool:
    """Whether the caller leaves the choice open: `impl` is "auto", and `use_impl` names no implementation of the
    set."""
    return impl == "auto" and current_impl() not in _names(operator_set)


def check_name(operator_set: str, impl: str) -> None:
    """Raise `ValueError` unless `impl` is "auto" or an implementation of the operator set."""
    # This must be cheap, because it runs in every call.
    if not isinstance(impl, str) or (impl not in ("auto", "reference") and impl not in IMPLEMENTATIONS[operator_set]):
        check_choice("impl", impl, ("auto", *_names(operator_set)))  # raises


def impl_for(impl: str, operator_set: str, other: str) -> str:
    """Return the `impl` that an operator of a set passes to one of the set `other`: its own if that set has it, else
    "auto".

    If `operator_set` itself does not have `impl`, raise `ValueError`.
    """
    check_name(operator_set, impl)
    return impl if impl in _names(other) else "auto"


@overload
def explain(subject: str, *inputs: Any) -> list[Explanation]: ...
@overload
def explain(subject: nn.Module, *inputs: Any, **options: Any) -> list[ModuleExplanation]: ...
def explain(subject: str | nn.Module, *inputs: Any, **options: Any) -> list[Explanation] | list[ModuleExplanation]:
    """List which implementations of an operator can run these inputs, and why the others cannot, in the order in which
    "auto" tries them.

    `subject` is the name of a public operator; any other name is a `ValueError`. `inputs` are its query, key and value;
    for a solve, gram and rhs; for `iterative_pinv`, the matrix; for `projected_attention_state`, its first four
    arguments. `options` are not allowed (`TypeError`).

    `subject` may also be a module. The module is called once, as `subject(*inputs, **options)`, with all effects of a
    call, in the current modes of the module and of autograd. Compiled modules run uncompiled. Each row of the result
    says whether a module's call ran this package's operators, and if not, why. There is a row for each
    `torch.nn.MultiheadAttention`, each subclass of it, each layer of `cmab_kernels.nn` that may pass work to torch, and
    each module that calls `cmab_kernels.integrations.scaled_dot_product_attention` or has `attn_implementation="cmab"`.

    >>> q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    >>> cmab_kernels.explain("latent_attention", q, k, v)[-1]
    Explanation(impl='reference', usable=True, reason='runs anywhere')
    >>> layer = torch.nn.TransformerDecoderLayer(16, 2).train()
    >>> ours = {torch.nn.MultiheadAttention: cmab_kernels.nn.MultiheadAttention}
    >>> cmab_kernels.nn.replace_modules(layer, ours, verbose=False)
    2
    >>> cmab_kernels.explain(layer, torch.randn(3, 1, 16), torch.randn(9, 1, 16))[0]
    ModuleExplanation(module='self_attn', kind='MultiheadAttention', fused=False, reason='dropout is on')
    """
    if isinstance(subject, nn.Module):
        return explain_calls(subject, *inputs, **options)
    if not isinstance(subject, str) or subject not in OPERATORS:
        raise ValueError(mismatch("operator", repr(subject), f"a module, or one of {', '.join(OPERATORS)}"))
    if options:
        raise TypeError(
            mismatch(next(iter(options)), "an option", "no option, because only a call of a module takes options")
        )
    operator_set = OPERATORS[subject]
    if not inputs or not all(isinstance(each, Tensor) for each in inputs):
        given = ", ".join(map(kind_of, inputs)) or "nothing"
        raise TypeError(mismatch("inputs", given, f"tensors, the first arguments of {subject}"))
    kernels = (module for impl in IMPLEMENTATIONS[operator_set] if (module := imported(operator_set, impl)) is not None)
    read = inspect.signature(next((module.unsupported for module in kernels), lambda *_: None))
    try:
        read.bind(*inputs)
    except TypeError:
        given = f"{len(inputs)} tensor{'s' * (len(inputs) != 1)}"
        raise TypeError(mismatch("inputs", given, ", ".join(read.parameters))) from None
    reasons = [(impl, _unsupported(operator_set, impl, inputs)) for impl in _in_order(operator_set, inputs)]
    rows = [Explanation(impl, reason is None, reason or "supports these inputs") for impl, reason in reasons]
    return [*rows, Explanation("reference", True, "runs anywhere")]
