"""The map of docs/architecture.md, a line for each folder and each shared module: `python -m tests.folders` writes it
again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .pages import DOCS, ROOT

PAGE = DOCS / "architecture.md"
MAP = re.compile(r"(?<=<!-- map: begin -->\n).*?(?=\n<!-- map: end -->)", flags=re.DOTALL)
"""The text between the marks on the page."""

TOPS = ("csrc", "cpp", "cmab_kernels", "python", "bench", "gpu_machine", "tests")
SOURCES = {".py", ".h", ".cpp", ".cu"}
ROOMS = {"triton", "__pycache__"}
"""Folders that the map leaves out: the Triton kernels of each operator set are one of its rooms (parts with a fixed
purpose)."""

TOLD = {
    "bench/tests": "The tests of the benchmarks and of the GPU check.",
    "cpp": "The operators of exported programs as a library without Python, and a program that steps a stream with it.",
    "cpp/without_python": "A replacement for Python's header, for builds without Python.",
    "csrc": "The two extensions in C++ and CUDA, bound with pybind11, without torch's headers.",
    "csrc/attention": "Latent cross-attention, forward and backward.",
    "csrc/common": "What the other folders share: arguments, dtypes, views of tensors, work plans, vector types.",
    "csrc/continual": "The steps of attention over a sliding window.",
    "csrc/intention": "Regularised least squares: sums over rows, and rows times matrices.",
    "csrc/layers": "Layers of latents, and whole blocks and stacks, in one call.",
    "csrc/linear": "Products, norms and activations of linear layers, for `layers` and `projected`.",
    "csrc/nystrom": "Landmarks and their pseudo-inverse by iteration, for Nyström attention.",
    "csrc/prefix": "The attention states of all prefixes.",
    "csrc/projected": "Latent cross-attention over inputs that are projected inside.",
    "csrc/solve": "Batched regularised solves.",
    "gpu_machine/cuda": "The code of the host that records launches of the CUDA kernels.",
    "python/examples": "Short programs, each by itself.",
    "tests": "The tests. The tests of an operator set are in the folder with its name.",
}
"""The contents of a folder without a docstring."""


def listed() -> list[Path]:
    """Return the folders that hold sources, without those of tests except the first; each folder comes after its
    parent."""
    found = {file.parent for top in TOPS[:-1] for file in (ROOT / top).rglob("*") if file.suffix in SOURCES} | {
        ROOT / "tests"
    }
    inside = (folder.relative_to(ROOT) for folder in found)
    return sorted(
        (folder for folder in inside if not ROOMS & set(folder.parts)),
        key=lambda folder: (TOPS.index(folder.parts[0]), folder),
    )


def said(file: Path) -> str:
    """Return the first sentence of a module's docstring."""
    source = file.read_text() if file.exists() else ""
    paragraph = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].replace("\n", " ")
    sentence = re.match(r".+?\.(?= |$)", paragraph)
    assert sentence, (
        f"{file.relative_to(ROOT)} has no docstring, and {Path(__file__).name} does not say what its folder holds"
    )
    return sentence[0]


def rows() -> Iterator[tuple[str, str]]:
    """Yield each folder, and each module that all folders of cmab_kernels share, with its description."""
    for folder in listed():
        name = folder.as_posix()
        held = TOLD.get(name) or said(ROOT / folder / "__init__.py")
        yield f"`{name}/`", held[:-1] + ", also in CUDA." if any((ROOT / folder).glob("*.cu")) else held
        if name in ("cmab_kernels", "cmab_kernels/runtime"):
            yield from ((f"`{name}/{file.name}`", said(file)) for file in sorted((ROOT / folder).glob("[!_]*.py")))


def written() -> str:
    """Return the map as a table."""
    return "\n".join(["| where | what |", "|---|---|", *(f"| {where} | {what} |" for where, what in rows())])


if __name__ == "__main__":
    PAGE.write_text(MAP.sub(lambda _: written(), PAGE.read_text()))
