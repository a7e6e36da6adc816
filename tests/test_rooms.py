"""Every operator set has its rooms, and each room imports only what it may: docs/architecture.md as a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import cmab_kernels
from cmab_kernels.backends import FAMILIES, SETS

HOUSE = Path(cmab_kernels.__file__).parent
SHARED = {"checks", "dtypes", "tracing"}
"""Shared modules that do not know the operators."""

MAY = {
    "api": {"api", "schema", "reference", "state", "dual", "backends", "public", *SHARED},
    "dual": {"api", "schema", "reference", "autograd", "backends", *SHARED},
    "block": {"schema", "reference", "autograd", "backends", "public", *SHARED},
    "schema": {"schema", "reference", "state", "costs", "autograd", "backends", "flops", *SHARED},
    "reference": {"reference", "state", "constants", "dtypes", "tracing"},
    "state": {"checks", "dtypes"},
    "native": {"native", "extension", "state", *SHARED},
    "cuda": {"native", "extension", "cuda_launch", "state", *SHARED},
    "kernels": {"kernels", "state", "triton_common", "tiles", "constants", "dtypes"},
    "costs": {"reference", "checks", "constants"},
}
"""What each room may import from its own family; "public" stands for the names that another family exports to users."""

BUILT_ON = {("layers", "kernels"): {"the insides of attention"}}
"""(Family, room) -> what it may import besides: the Triton kernels of attention layers run those of attention between their projections."""


def _imports(file: Path) -> Iterator[tuple[str, ...]]:
    """Return what a file imports from this package, as paths from its root, such as ("intention", "solve", "api")."""
    inside = file.relative_to(HOUSE).parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = inside[: len(inside) + 1 - node.level] + tuple((node.module or "").split(".") if node.module else ())
            yield from ([base] if node.module else [(*base, alias.name) for alias in node.names])
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (tuple(name.split(".")[1:]) for name in names if name and name.split(".")[0] == "cmab_kernels")


def _room(path: tuple[str, ...], family: str) -> str:
    """Return the room, or the shared module, that an import belongs to."""
    if path[0] not in {name.split(".")[0] for name in SETS}:
        return path[0]
    if path[0] != family:
        return "public" if len(path) == 1 else f"the insides of {path[0]}"
    return next((part for part in path if part in MAY), "api")  # a set's __init__ exports its api


def _files() -> Iterator[tuple[str, str, Path]]:
    """Yield (family, room, file) for each room of each set."""
    for name in SETS:
        folder = HOUSE.joinpath(*name.split("."))
        for room in MAY:
            for file in [folder / f"{room}.py", *folder.glob(f"{room}/*.py")]:
                if file.exists():
                    yield name.split(".")[0], room, file


def wrong_imports() -> list[str]:
    return [
        f"{file.relative_to(HOUSE)} ({room}) imports {_room(path, family)}: {'.'.join(path)}"
        for family, room, file in _files()
        for path in _imports(file)
        if _room(path, family) not in MAY[room] | BUILT_ON.get((family, room), set())
    ]


def test_every_room_imports_what_it_may_and_no_more() -> None:
    assert not wrong_imports()


@pytest.mark.parametrize("name", SETS)
def test_no_room_is_missing(name: str) -> None:
    folder = HOUSE.joinpath(*name.split("."))
    for room in ("__init__", "api", "schema", "reference"):
        assert (folder / f"{room}.py").exists(), f"{name} has no {room}.py"
    assert FAMILIES[name].keys() >= {"native"}
    inner = ("variants", "solve", "continual", "prefix", "projected")
    known = {*MAY, "__init__"} | {path.name for path in folder.iterdir() if path.name in inner}
    strangers = [path.name for path in folder.iterdir() if path.stem not in known and path.name != "__pycache__"]
    assert not strangers, f"{name} has rooms that are none: {strangers}"
