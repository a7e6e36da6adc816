"""CUDA kernels run on the machine: nvcc compiles csrc to PTX, and a C++ compiler compiles the host code, whose launches
are recorded."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pybind11
import torch
from torch import Tensor

from cmab_kernels.runtime import constants

from .launch import fresh_memory
from .machine import Machine
from .parse import parse

ROOT = Path(__file__).resolve().parents[1]
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
CONSTANTS = [f"-DCMAB_{name}={value}" for name, value in vars(constants).items() if name.isupper()]
SOURCES = ("solve/regularised_solve", "continual/nystrom_step", "continual/attention_step")
HERE = Path(__file__).parent / "cuda"
HOST = "launches.so"


def nvcc() -> str | None:
    """Return the path of nvcc, from CUDA_HOME or the PATH, or None."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


class Built(NamedTuple):
    """The host code of the CUDA kernels, as a module like `cmab_kernels._cuda`, and the PTX of each kernel by its
    name."""

    module: ModuleType
    texts: dict[str, str]


def build(folder: Path) -> Built:
    """Compile the host code into `folder`, and the kernels to PTX for compute capability 8.0."""
    includes = [f"-I{path}" for path in (HERE, ROOT / "csrc", sysconfig.get_path("include"), pybind11.get_include())]
    flags = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-shared"]
    host = [str(HERE / "launches.cpp"), "-o", str(folder / HOST)]
    subprocess.run([str(COMPILER), *flags, *includes, *CONSTANTS, *host], check=True)
    for source in SOURCES:
        _compile_ptx(folder, source)
    return built_in(folder)


def built_in(folder: Path) -> Built:
    """Load the files that `build` has compiled into `folder`."""
    spec = importlib.util.spec_from_file_location("launches", folder / HOST)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    texts = [path.read_text() for path in sorted(folder.glob("*.ptx"))]
    return Built(module, {name: text for text in texts for name in parse(text)})


def _compile_ptx(folder: Path, source: str) -> None:
    made = folder / f"{Path(source).name}.ptx"
    flags = ["-ptx", "-arch=sm_80", "-std=c++17", "-lineinfo", f"-I{ROOT / 'csrc'}", *CONSTANTS]
    subprocess.run(
        [str(nvcc()), "-ccbin", str(COMPILER), *flags, str(ROOT / "csrc" / f"{source}.cu"), "-o", str(made)], check=True
    )


@contextmanager
def cuda_on_machine(machine: Machine, built: Built, *launchers: ModuleType) -> Iterator[None]:
    """Within this context, the functions of `launchers`, such as `cmab_kernels.intention.cuda`, run their kernels on
    the machine."""

    def on_launch(kernel: str, kind: str, blocks: int, threads: int, shared: int, arguments: tuple[bytes, ...]) -> None:
        name = _entry(built.texts, kernel.partition("<")[0], kind)
        machine.launch(built.texts[name], name, (blocks,), threads, shared, arguments)

    def launch(function: Callable[..., None], device: Any, **arguments: Any) -> None:
        for name, tensor in _tensors(arguments):
            machine.memory.give(tensor, name)
        function(**arguments, stream=0)

    built.module.set_launch(on_launch)
    with ExitStack() as patched:
        for launcher in launchers:
            patched.enter_context(mock.patch.object(launcher, "CUDA", built.module))
            patched.enter_context(mock.patch.object(launcher, "launch", launch))
        patched.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        patched.enter_context(fresh_memory(machine))
        yield


def _tensors(arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among arguments, and in the tuples of a state."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, tuple):
            yield from _tensors({f"{name}[{number}]": part for number, part in enumerate(value)})


def _entry(texts: dict[str, str], kernel: str, kind: str) -> str:
    """Return the name in PTX of the instance of a kernel for a type, given the C++ compiler's name of the type."""
    plain = kind if len(kind) == 1 else re.sub(r"^N\d+[a-z]+|E$", "", kind)
    (name,) = [name for name in texts if re.search(rf"\d{kernel}I(NS_|N\d+cmab)?{plain}E", name)]
    return name
