"""Every public operator has the inherited suite, and every public module has a test that constructs it."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cmab_kernels as ck
from cmab_kernels import nn
from cmab_kernels.runtime import backends

from ..declarations import TESTS, declarations

NO_OPERATORS = {
    "continual_attention_init": "a state's begin, which every declaration of its step calls",
    "continual_nystrom_init": "a state's begin, which every declaration of its step calls",
    "empty_ridge": "zeros",
    "empty_state": "zeros and -inf",
    "explain": "tells what would run",
    "merge_ridge": "sums, in any order: test_states.py",
    "merge_states": "a formula of two states: test_states.py, and tests/attention/test_state.py",
    "move_state": "copies a state to another device",
    "state_from_tensors": "takes back what state_to_tensors has made",
    "state_to_tensors": "names the tensors of a state",
    "use_impl": "chooses what runs",
}
"""Public functions without a declaration -> why they need none."""


def _missing(public: list[str], declared: set[str]) -> list[str]:
    functions = {name for name in public if inspect.isfunction(getattr(ck, name, None)) or not hasattr(ck, name)}
    return sorted(functions - declared - NO_OPERATORS.keys())


def test_every_public_operator_has_a_declaration() -> None:
    declared = {suite.operator for suite in declarations()}
    assert _missing(ck.__all__, declared) == []
    assert declared == set(backends.OPERATORS), "the operators that have implementations are those that are declared"
    assert set(NO_OPERATORS) <= set(ck.__all__) - declared, "what needs no declaration is public, and has none"


def test_an_operator_without_a_declaration_is_seen() -> None:
    declared = {suite.operator for suite in declarations()}
    assert _missing([*ck.__all__, "new_operator"], declared) == ["new_operator"]
    assert _missing(ck.__all__, declared - {"intention"}) == ["intention"]


@pytest.mark.parametrize("operator", sorted(backends.OPERATORS))
def test_every_implementation_on_a_cpu_is_declared(operator: str) -> None:
    there = {
        "reference",
        *(impl for impl in backends.IMPLEMENTATIONS[backends.OPERATORS[operator]] if impl == "native"),
    }
    suites = [suite for suite in declarations() if suite.operator == operator]
    assert suites and all(there <= set(suite.impls) for suite in suites)


WIDE_ONLY = {
    "iterative_pinv",
    "prefix_ridge_states",
    "regularised_inverse",
    "regularised_solve",
    "remove_from_state",
    "ridge_step",
    "sigma_intention",
    "solve_ridge",
}
"""Operators without a half type in any declaration, because their inputs are sums or states, or because half types have
separate tests."""


def test_every_dtype_has_a_declaration() -> None:
    dtypes: dict[str, set[torch.dtype]] = {}
    for suite in declarations():
        dtypes.setdefault(suite.operator, set()).update(suite.dtypes)
    assert all(torch.float64 in each for each in dtypes.values())
    assert {name for name, each in dtypes.items() if torch.bfloat16 not in each} == WIDE_ONLY


def _called(path: Path) -> set[str]:
    """Return the names that a file calls."""
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}


def test_every_public_module_is_built_by_a_test() -> None:
    modules = {
        name
        for name in nn.__all__
        if inspect.isclass(getattr(nn, name)) and issubclass(getattr(nn, name), torch.nn.Module)
    }
    called = set().union(*(_called(path) for path in TESTS.rglob("test_*.py")))
    assert modules - called == set()


@pytest.mark.nightly
def test_the_ordinary_tier_has_twelve_thousand_cases() -> None:
    """Two thirds of the minimum come from declarations alone; the rest are from each operator's own tests."""
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q"], cwd=TESTS.parent, capture_output=True, text=True
    )
    cases = sum(int(number) for number in re.findall(r"^tests/\S+\.py: (\d+)$", told.stdout, re.MULTILINE))
    assert told.returncode == 0 and cases >= 12_000, told.stdout[-1000:]
