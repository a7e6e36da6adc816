"""Every error for an argument has the form «argument: got X, expected Y», because `mismatch` writes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
    for package in ("cmab_kernels", "python/cmab_models")
    for path in sorted((ROOT / package).rglob("*.py"))
}
KINDS = ("ValueError", "TypeError", "BadCheckpoint")
REASONS = {
    ("cmab_kernels/nn/constructors.py", "check_options"): "Python's own text for arguments that do not bind",
    ("cmab_kernels/nn/replace/modules.py", "_sharing"): "it puts the module before the message of an argument",
    ("cmab_kernels/runtime/tiles.py", "entries"): "it puts the entry of a file before the message of a field",
    (
        "cmab_kernels/online/rows.py",
        "_array",
    ): "scikit-learn's checks want this text for complex and infinite numbers, and `mismatch` quotes the third",
    ("cmab_kernels/online/rows.py", "_csr"): "scikit-learn's checks want this text for complex and infinite numbers",
    ("cmab_kernels/online/rows.py", "_tensor"): "scikit-learn's checks want this text for complex and infinite numbers",
    ("cmab_kernels/online/rows.py", "__init__"): "scikit-learn's checks want this text for no targets",
    (
        "cmab_kernels/online/rows.py",
        "read_points",
    ): "scikit-learn's checks want this text for empty data and for other features",
    ("cmab_kernels/online/interface.py", "set_params"): "scikit-learn's own text for an unknown parameter",
    ("python/cmab_models/neural_processes/official.py", "shape"): "its caller puts it into `mismatch`",
}
"""(file, function) -> why its message has another form."""


def _called(tree: ast.AST) -> set[str]:
    """Return the names of the functions and methods that are called anywhere in the code."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {
        call.id if isinstance(call, ast.Name) else call.attr
        for call in calls
        if isinstance(call, ast.Name | ast.Attribute)
    }


def _makers() -> set[str]:
    """Return the names of the functions that return the result of `mismatch`."""
    returned: dict[str, set[str]] = {}
    for module in MODULES.values():
        for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and node.value is not None:
                    returned.setdefault(function.name, set()).update(_called(node.value))
    made, before = {"mismatch"}, set[str]()
    while made != before:
        before = made
        made = made | {name for name, calls in returned.items() if calls & made}
    return made


def _assigned(module: ast.Module, makers: set[str]) -> set[str]:
    """Return the names of variables to which such a message is assigned."""
    assigned = (node for node in ast.walk(module) if isinstance(node, ast.Assign))
    return {
        name.id
        for node in assigned
        if _called(node.value) & makers
        for name in node.targets
        if isinstance(name, ast.Name)
    }


def _raised(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Yield each error of `KINDS` that is raised, and the innermost function around it."""
    for node in ast.iter_child_nodes(tree):
        if (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and isinstance(node.exc.func, ast.Name)
            and node.exc.func.id in KINDS
        ):
            yield function, node.exc
        yield from _raised(node, node.name if isinstance(node, ast.FunctionDef) else function)


def _others(modules: dict[str, ast.Module]) -> dict[tuple[str, str], int]:
    """Return (file, function) -> the line of an error whose message is of another form."""
    makers = _makers()
    constants = {name for module in MODULES.values() for name in _assigned(module, makers) if name.isupper()}
    others = {}
    for path, module in modules.items():
        variables = constants | _assigned(module, makers)
        for function, error in _raised(module):
            message = error.args[0] if error.args else error
            if not (_called(message) & makers or getattr(message, "id", "") in variables):
                others[path, function] = error.lineno
    return others


def test_messages_of_errors_have_one_form() -> None:
    others = _others(MODULES)
    assert {where: line for where, line in others.items() if where not in REASONS} == {}
    assert REASONS.keys() <= others.keys(), "these have the form now"


def test_another_form_is_found() -> None:
    sound = "def f(x):\n    raise ValueError(mismatch('x', x, 'an int'))\n"
    other = "def g(x):\n    raise TypeError(f'x is {x}')\ndef h(x):\n    text = str(x)\n    raise ValueError(text)\n"
    assert _others({"a.py": ast.parse(sound), "b.py": ast.parse(other)}) == {("b.py", "g"): 2, ("b.py", "h"): 5}
