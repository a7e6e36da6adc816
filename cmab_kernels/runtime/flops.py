"""FLOP formulas for `torch.utils.flop_counter`, registered at the moment that module is imported.

The formulas are not registered earlier, because that module imports Triton, which `import cmab_kernels` must not
import. They are not registered at an operator's first call either, because a counter copies the registry when it is
constructed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COUNTER = "torch.utils.flop_counter"
_FORMULAS: dict[Any, Callable[..., int]] = {}


def flop_formula(operator: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator: register the FLOP formula of a `torch.ops` operator. The formula is called with shapes in place of the
    tensors."""

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        _FORMULAS[operator] = formula
        if _COUNTER in sys.modules:
            _hand_over(sys.modules[_COUNTER])
        return formula

    return register


def _hand_over(counter: ModuleType) -> None:
    for operator in list(_FORMULAS):
        counter.register_flop_formula(operator)(_FORMULAS.pop(operator))


class _Notice(MetaPathFinder):
    """An import hook that registers the formulas as soon as `torch.utils.flop_counter` has been imported."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_hand_over(module: ModuleType) -> None:
            execute(module)
            _hand_over(module)

        spec.loader.exec_module = execute_and_hand_over  # type: ignore[method-assign]
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _Notice())
