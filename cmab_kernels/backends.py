"""Which implementation runs, and why.

Each operator set has several implementations of one definition. Asked for by name, one runs or raises with the reason; `auto` takes the
first that supports the inputs, in the order of `FAMILIES`, and the reference last.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import wrong
from .tracing import traced_as_constant

SETS = ("attention", "nystrom", "nystrom.continual", "intention", "intention.solve")
"""The operator sets: subpackages, each a folder with the same rooms."""

ROOMS = {"native": "native", "cuda": "cuda", "triton": "kernels"}
"""implementation -> the room of a set that holds it, in the order in which `auto` looks"""


def _implementations(operator_set: str) -> dict[str, str]:
    folder = Path(__file__).parent.joinpath(*operator_set.split("."))
    there = {impl: room for impl, room in ROOMS.items() if (folder / f"{room}.py").exists() or (folder / room).is_dir()}
    return {impl: f"cmab_kernels.{operator_set}.{room}" for impl, room in there.items()}


FAMILIES = {operator_set: _implementations(operator_set) for operator_set in SETS}
"""operator set -> implementation -> the module that holds it, imported when first used; `reference` is always there"""

COMPLETED_BY = {("intention", "cuda"): "triton"}
"""(operator set, implementation) -> the one whose kernels it takes where it has none: CUDA has sums and solve fused, no more"""

OPERATORS: dict[str, str] = {
    "latent_attention": "attention",
    "attention_state": "attention",
    "remove_from_state": "attention",
    "nystrom_attention": "nystrom",
    "iterative_pinv": "nystrom",
    "continual_nystrom_step": "nystrom.continual",
    "continual_attention_step": "nystrom.continual",
    "intention": "intention",
    "sigma_intention": "intention",
    "ridge_state": "intention",
    "remove_ridge": "intention",
    "solve_ridge": "intention.solve",
    "regularised_solve": "intention.solve",
    "regularised_inverse": "intention.solve",
}
"""public operator -> operator set"""

REFERENCE_COSTS: dict[str, str] = {
    "attention": "is dense in the number of keys",
    "nystrom.continual": "reads the whole window at every step",
    "intention": "reads keys and values more than once, and copies them for sums in float64",
}
"""operator set -> what its reference costs, of which `auto` warns; for small matrices there is nothing to warn of"""


class Explanation(NamedTuple):
    """Whether an implementation can run given inputs, and if not, why."""

    impl: str
    usable: bool
    reason: str


def _names(family: str) -> tuple[str, ...]:
    return (*FAMILIES[family], "reference")


_MODULES: dict[str, list[ModuleType]] = {path: [] for modules in FAMILIES.values() for path in modules.values()}
"""path -> its module alone, once it is imported: a list for each, since a compiler reads a container when it first meets it, which for one
container of all modules would be before some of them are imported"""

_PROBLEMS: dict[str, str] = {}
"""path -> why it cannot be imported ("" when it can), once that was tried"""


@traced_as_constant
def _import_problem(path: str) -> str:
    """Import the module once and say why it cannot be ("" when it can)."""
    if path not in _PROBLEMS:
        try:
            _MODULES.setdefault(path, [])[:] = [importlib.import_module(path)]
            _PROBLEMS[path] = ""
        except ImportError as error:
            _PROBLEMS[path] = str(error)
    return _PROBLEMS[path]


def imported(family: str, impl: str) -> ModuleType | None:
    """The module of an implementation, or None where it cannot be imported."""
    path = FAMILIES[family][impl]
    return None if _import_problem(path) else _MODULES[path][0]


def implementation(family: str, impl: str) -> ModuleType:
    """The module of an implementation that `choose` chose."""
    _import_problem(FAMILIES[family][impl])
    return _MODULES[FAMILIES[family][impl]][0]


def kernel(family: str, impl: str, name: str) -> Callable[..., Any]:
    """The function `name` of an implementation that `choose` chose, or of the one that completes it."""
    module = implementation(family, impl)
    if not hasattr(module, name):
        module = implementation(family, COMPLETED_BY[family, impl])
    return getattr(module, name)


def _unsupported(family: str, impl: str, tensors: tuple[Tensor, ...]) -> str | None:
    """Why `impl`, or what completes it, cannot run `tensors`; None when it can."""
    if impl == "reference":
        return None
    path = FAMILIES[family][impl]
    reason = _import_problem(path) or _MODULES[path][0].unsupported(*tensors)
    completing = COMPLETED_BY.get((family, impl))
    return reason if reason or completing is None else _unsupported(family, completing, tensors)


class use_impl:
    """Choose the implementation of every operator, from now on or within a `with` block.

    `impl` is "auto", "reference", "native", "cuda" or "triton" (`ValueError` otherwise). Operators called with their own `impl=` keep it,
    and those that have no implementation of that name choose as with "auto". The choice is the process's, like `torch.set_num_threads`.

    >>> with cmab_kernels.use_impl("reference"):
    ...     out = cmab_kernels.latent_attention(torch.randn(2, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8))
    """

    current = "auto"

    def __init__(self, impl: str) -> None:
        known = sorted({"auto", *(name for family in FAMILIES for name in _names(family))})
        if impl not in known:
            raise ValueError(wrong("impl", f"is {impl!r}", f"it must be one of {', '.join(known)}"))
        self._previous = use_impl.current
        use_impl.current = impl

    def __enter__(self) -> use_impl:
        return self

    def __exit__(self, *exception: object) -> None:
        use_impl.current = self._previous


def choose(family: str, impl: str, *tensors: Tensor) -> str:
    """The implementation that runs: `impl`, or what `use_impl` says, or the first that supports `tensors`.

    `ValueError` for an unknown name, `RuntimeError` for one that cannot run here, with the reason.
    """
    if impl == "auto":
        impl = use_impl.current
        if impl == "auto" or impl not in _names(family):
            return _first_usable(family, tensors)
    check_name(family, impl)
    reason = _unsupported(family, impl, tensors)
    if reason is not None:
        raise RuntimeError(wrong("impl", f"is {impl!r}, which cannot run here", reason))
    return impl


def _first_usable(family: str, tensors: tuple[Tensor, ...]) -> str:
    reasons = {}
    for impl in FAMILIES[family]:
        reason = _unsupported(family, impl, tensors)
        if reason is None:
            return impl
        reasons[impl] = reason
    if family in REFERENCE_COSTS and not torch.compiler.is_compiling() and not tensors[0].is_meta:
        why = "; ".join(f"{impl}: {reason}" for impl, reason in reasons.items())
        warnings.warn(f"cmab_kernels runs its PyTorch reference, which {REFERENCE_COSTS[family]} ({why})", RuntimeWarning, stacklevel=4)
    return "reference"


def check_name(family: str, impl: str) -> None:
    """`ValueError` unless `impl` is "auto" or an implementation that the operator set has."""
    if impl != "auto" and impl not in _names(family):
        raise ValueError(wrong("impl", f"is {impl!r}", f"it must be one of auto, {', '.join(_names(family))}"))


def passed_on(impl: str, family: str, other: str) -> str:
    """What an operator of `family` that was asked for `impl` asks of a second set, `other`: the same where it is there, else "auto".

    `ValueError` where `family` itself has no `impl`.
    """
    check_name(family, impl)
    return impl if impl in _names(other) else "auto"


def explain(operator: str, *tensors: Any) -> list[Explanation]:
    """Which implementations of `operator` can run these inputs, and why not the others, in the order in which `auto` looks.

    `operator` is the name of a public operator (`ValueError` otherwise), `tensors` its query, key and value; of a solve, gram and rhs; of
    `iterative_pinv`, the matrix.

    >>> q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    >>> cmab_kernels.explain("latent_attention", q, k, v)[-1]
    Explanation(impl='reference', usable=True, reason='runs anywhere')
    """
    if operator not in OPERATORS:
        raise ValueError(wrong("operator", f"is {operator!r}", f"it must be one of {', '.join(OPERATORS)}"))
    family = OPERATORS[operator]
    reasons = [(impl, _unsupported(family, impl, tensors)) for impl in FAMILIES[family]]
    rows = [Explanation(impl, reason is None, reason or "supports these inputs") for impl, reason in reasons]
    return [*rows, Explanation("reference", True, "runs anywhere")]
