"""A digest of the code on which a result depends. It shows whether a result is older than its code."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("cmab_models", "cmab_kernels")
DEFINITIONS = ("cmab_models.", "cmab_kernels.nn.", "cmab_kernels.intention.variants.")
REGISTRIES = ("cmab_models.systems",)
"""Modules that name all systems. A digest leaves them out, because no system depends on the others."""


def digest(*modules: str) -> str:
    """Return a hash of these modules and of the modules of `PACKAGES` that they import, directly or not, without
    comments and docstrings.

    From cmab_kernels, the hash includes the definitions: the modules of `nn`, the references, and the estimators of
    Intention. It leaves out the kernels, because tests compare them with the definitions.
    """
    found = hashlib.sha256()
    for module in sorted(reached(modules)):
        if _counts(module):
            found.update(f"{module}\0{_text(module)}\0".encode())
    return found.hexdigest()[:12]


def reached(modules: tuple[str, ...]) -> set[str]:
    """Return those of these modules that belong to `PACKAGES`, and all modules there that they import, directly or
    through others. A caller's own module may have no file: a task can be defined in a notebook."""
    found: set[str] = set()
    waiting = [module for module in modules if module.split(".")[0] in PACKAGES]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += _imports(module)
    return found


def _counts(module: str) -> bool:
    return module.startswith(DEFINITIONS) or module.endswith(".reference")


@cache
def _path(module: str) -> Path | None:
    """Return the file of a module, None if there is no such module."""
    package, *rest = module.split(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).parent.joinpath(*rest)
    return next((path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()), None)


@cache
def _tree(module: str) -> ast.Module:
    path = _path(module)
    assert path is not None, module
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _imports(module: str) -> frozenset[str]:
    """Return the modules of `PACKAGES` from which a module imports. A package is replaced by the modules that define
    the names."""
    names = ((source, name) for source, names in _import_lines(module) for name in names)
    return frozenset(found for source, name in names if (found := _defining(source, name)) not in (None, *REGISTRIES))


def _import_lines(module: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules of `PACKAGES` from which names are imported, and the names."""
    path = _path(module)
    assert path is not None, module
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, [""]) for alias in node.names if alias.name.split(".")[0] in PACKAGES)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            if source.split(".")[0] in PACKAGES:
                yield source, [alias.name for alias in node.names]


def _defining(source: str, name: str) -> str | None:
    """Return the module that defines a name. A package without the name, and the import of a whole package, are not
    followed."""
    path = _path(source)
    if path is None or path.name != "__init__.py":
        return source if path else None
    for deeper, names in _import_lines(source):
        if name in names:
            return _defining(deeper, name)
    return f"{source}.{name}" if name and _path(f"{source}.{name}") else None


@cache
def _text(module: str) -> str:
    return _written(_tree(module))


def _written(node: object) -> str:
    """Return a syntax tree as text that is the same in all versions of Python: without positions, empty fields, and
    docstrings."""
    if isinstance(node, list):
        return f"[{','.join(_written(each) for each in node if not _documents(each))}]"
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        return f"{type(node).__name__}({','.join(f'{name}={_written(value)}' for name, value in fields)})"
    return repr(node)


def _documents(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
