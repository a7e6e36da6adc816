"""Every operator set has its rooms (files with a fixed purpose), and each room imports only what it may:
docs/architecture.md as a test."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import cmab_kernels
from cmab_kernels import nn
from cmab_kernels.runtime.backends import IMPLEMENTATIONS, SETS

from . import folders

HOUSE = Path(cmab_kernels.__file__).parent
SHARED = {"checks", "dtypes", "tracing"}
"""Shared modules that do not know the operators."""

MAY = {
    "contract": {"contract", "operator"},
    "api": {
        "api",
        "contract",
        "schema",
        "reference",
        "state",
        "dual",
        "gradient",
        "backends",
        "setting",
        "public",
        *SHARED,
    },
    "dual": {"api", "contract", "schema", "reference", "operator", "backends", *SHARED},
    "schema": {"contract", "schema", "reference", "state", "costs", "operator", "vmap", "backends", "flops", *SHARED},
    "gradient": {"api", "gradient", "schema", "reference", "state", "autograd", "backends", *SHARED},
    "reference": {"reference", "state", "constants", "dtypes", "tracing"},
    "state": {"backends", "checks", "dtypes"},
    "native": {"contract", "native", "extension", "state", *SHARED},
    "cuda": {"contract", "native", "extension", "cuda_launch", "state", *SHARED},
    "triton": {
        "contract",
        "triton",
        "state",
        "checks",
        "triton_launch",
        "triton_rows",
        "triton_products",
        "tiles",
        "constants",
        "dtypes",
    },
    "costs": {"reference", "checks", "constants"},
}
"""The imports that each room may have from its own family; "public" means the public names of another family."""

BUILT_ON = {("layers", "triton"): {"the insides of attention"}}
"""(Family, room) -> its further imports: the Triton layers run attention kernels, and project with the kernels of
attention over projected inputs."""


def _imports(file: Path) -> Iterator[tuple[str, ...]]:
    """Return the imports of a file from this package, as paths from its root, such as ("intention", "solve", "api")."""
    inside = file.relative_to(HOUSE).parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = inside[: len(inside) + 1 - node.level] + tuple((node.module or "").split(".") if node.module else ())
            yield from ([base] if node.module else [(*base, alias.name) for alias in node.names])
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (tuple(name.split(".")[1:]) for name in names if name and name.split(".")[0] == "cmab_kernels")


def _room(path: tuple[str, ...], family: str) -> str:
    """Return the room, or the shared module, to which an import belongs."""
    if path[0] == "runtime":
        return path[-1]
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
    assert IMPLEMENTATIONS[name].keys() >= {"native"}
    inner = ("variants", "solve", "continual", "prefix", "projected", "stack")
    known = {*MAY, "__init__"} | {path.name for path in folder.iterdir() if path.name in inner}
    strangers = [path.name for path in folder.iterdir() if path.stem not in known and path.name != "__pycache__"]
    assert not strangers, f"{name} has rooms that are none: {strangers}"


SHARED_ROOMS = {"constructors", "inputs", "parts", "stream"}
ROOMS_OF_NN = {
    **{shared: set() for shared in SHARED_ROOMS},
    "stream": {"constructors"},
    "cmab": SHARED_ROOMS,
    "multihead": SHARED_ROOMS,
    "continual": SHARED_ROOMS | {"multihead"},
    "transformer": SHARED_ROOMS | {"multihead"},
    "replace": {"constructors", "parts", "multihead", "transformer"},
}
"""The rooms of `nn`, and which of them each may import."""


def wrong_imports_of_nn() -> list[str]:
    """Return a room's imports of another room of `nn` that are not allowed, or of the inside of a family or of another
    room."""
    found = []
    for file in (HOUSE / "nn").rglob("*.py"):
        room = file.relative_to(HOUSE / "nn").parts[0].removesuffix(".py")
        for path in _imports(file) if room != "__init__" else ():
            inside = path[0] in SETS and len(path) > 1
            strange = path[0] == "nn" and path[1] not in ROOMS_OF_NN[room] | {room}
            found += [f"{file.relative_to(HOUSE)} imports {'.'.join(path)}"] if inside or strange else []
    return found


def test_every_room_of_modules_imports_what_it_may_and_no_more() -> None:
    rooms = {path.name.removesuffix(".py") for path in (HOUSE / "nn").iterdir()} - {"__init__", "__pycache__"}
    assert rooms == ROOMS_OF_NN.keys()
    assert not wrong_imports_of_nn()


def test_rooms_that_the_page_says_occur_once_do() -> None:
    found = Counter(room for _, room, _ in _files())
    assert found["dual"] == found["costs"] == 1


def test_the_page_names_the_operator_sets() -> None:
    named = re.search(r"^The operator sets are (.+?)\. Each", folders.PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert named and tuple(re.findall(r"`(.+?)`", named[1])) == SETS


def test_the_map_is_that_of_the_tree() -> None:
    """`python -m tests.folders` updates it."""
    assert folders.MAP.search(folders.PAGE.read_text())[0] == folders.written()  # type: ignore[index]  # a page without the map fails here too
    assert folders.TOLD.keys() <= {folder.as_posix() for folder in folders.listed()}


def test_tests_and_benchmarks_import_nothing_of_each_other() -> None:
    """Code that both use is beside them, in `gpu_machine`."""
    found = []
    for folder, stranger in (
        ("tests", "bench"),
        ("bench", "tests"),
        ("gpu_machine", "bench"),
        ("gpu_machine", "tests"),
    ):
        files = sorted((folders.ROOT / folder).rglob("*.py"))
        assert files
        found += [
            file.relative_to(folders.ROOT).as_posix()
            for file in files
            if re.search(rf"^\s*(?:from|import) {stranger}\b", file.read_text(), re.MULTILINE)
        ]
    assert found == []


# ---- the paths of calls


def _calls() -> dict[str, Callable[[], Any]]:
    """Return the calls whose paths the page shows, by their names there."""
    rows, points = torch.randn(1, 2, 9, 8), torch.randn(1, 9, 16)
    sums = cmab_kernels.ridge_state(rows, rows)
    stream = cmab_kernels.continual_nystrom_init(rows, rows, rows, num_landmarks=3)
    token = rows[:, :, :1]
    block = nn.CMAB(dim=16, num_latents=4, num_heads=2)
    before = block.init_state(1)

    def update() -> Any:
        return block.update(points, points[0, :3], before)

    return {
        "`latent_attention`": lambda: cmab_kernels.latent_attention(rows, rows, rows),
        "`solve_ridge`": lambda: cmab_kernels.solve_ridge(sums, 0.1),
        "`intention`": lambda: cmab_kernels.intention(rows, rows, rows, alpha=0.1),
        "`nystrom_attention`": lambda: cmab_kernels.nystrom_attention(rows, rows, rows, num_landmarks=3),
        "`continual_nystrom_step`": lambda: cmab_kernels.continual_nystrom_step(stream, token, token, token),
        "`nn.CMAB.update`": torch.no_grad()(update),
        "`nn.CMAB.update`, recording a gradient": update,
    }


def _modules(frame: FrameType | None) -> list[str]:
    """Return the modules of this package through which a frame was called, the outermost first."""
    inside: list[str] = []
    while frame is not None:
        file, frame = Path(frame.f_code.co_filename), frame.f_back
        if file.is_relative_to(HOUSE):
            inside.append(file.relative_to(HOUSE).with_suffix("").as_posix())
    return [name for name, after in zip(reversed(inside), [*reversed(inside[:-1]), None], strict=True) if name != after]


def _ways(call: Callable[[], Any]) -> str:
    """Return the paths by which a call reaches kernels of the extension, in the form of the page."""
    extension = {
        id(function): name for name, function in vars(sys.modules["cmab_kernels._C"]).items() if callable(function)
    }
    ways: dict[str, None] = {}

    def see(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and extension.get(id(called), "collect_parameters") not in (
            "collect_parameters",
            "is_not_below_infinity",
        ):
            ways[", ".join(f"`{name}`" for name in _modules(frame))] = None

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return "; ".join(ways)


def test_calls_go_the_ways_that_the_page_shows() -> None:
    table = folders.PAGE.read_text().partition("its paths to the extension")[2]
    shown = dict(re.findall(r"^\| (.+?) \| (`\w+/.+?) \|$", table, re.MULTILINE))
    calls = _calls()
    for call in calls.values():
        call()  # by now all imports at first use have happened
    assert {name: _ways(call) for name, call in calls.items()} == shown
