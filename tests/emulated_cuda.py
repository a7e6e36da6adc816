"""The CUDA kernels of csrc on the CPU: `csrc/cuda_emulated.cpp` is compiled here, and replaces `cmab_kernels._cuda`."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pybind11
import pytest

from cmab_kernels.runtime import constants

ROOT = Path(__file__).resolve().parents[1]
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
FLAGS = (
    "-std=c++17",
    "-O2",
    "-march=native",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-fvisibility=hidden",
    "-shared",
    *(["-Werror"] if os.environ.get("CMAB_KERNELS_WERROR") == "1" else []),  # as setup.py
)
LIBRARY = "emulated_cuda.so"
CONSTANTS = [f"-DCMAB_{name}={value}" for name, value in vars(constants).items() if name.isupper()]


def build(folder: Path, *flags: str) -> Path:
    """Compile the emulated extension into `folder`, with additional flags such as a sanitizer's, and return its
    path."""
    library = folder / LIBRARY
    source = ROOT / "csrc" / "cuda_emulated.cpp"
    includes = [f"-I{folder}" for folder in (ROOT / "csrc", sysconfig.get_path("include"), pybind11.get_include())]
    subprocess.run([str(COMPILER), *FLAGS, *flags, *includes, *CONSTANTS, str(source), "-o", str(library)], check=True)
    return library


def shared(factory: pytest.TempPathFactory) -> Path:
    """Return the path of the emulated extension, which is compiled once in a run.

    The environment variable CMAB_EMULATED_FLAGS adds flags.
    """
    return (
        once(factory, "emulated", lambda folder: build(folder, *os.environ.get("CMAB_EMULATED_FLAGS", "").split()))
        / LIBRARY
    )


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder of this name. The first process of a run fills it by `make`, and the other processes wait."""
    own = factory.getbasetemp()  # a worker's folder is in that of the run
    folder = (own.parent if own.name == f"popen-{os.environ.get('PYTEST_XDIST_WORKER')}" else own) / name
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder


@functools.cache
def _loaded(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("emulated_cuda", library)
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


class EmulatedCuda:
    """The functions of `cmab_kernels._cuda` that a launcher calls. `seed` chooses the order of blocks and threads."""

    def __init__(self, library: Path) -> None:
        self._extension = _loaded(library)
        self.seed = 0

    @property
    def seed(self) -> int:
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        self._extension.set_seed(seed)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(self._extension, name)


def launch(function: Callable[..., None], device: Any, **arguments: Any) -> None:
    """Call `function` as `cmab_kernels.runtime.cuda_launch.launch` does on a GPU."""
    function(**arguments, stream=0)


def run_under_sanitizers(file: str, chosen: str) -> None:
    """Run those tests of `file` that the expression `chosen` selects, in a process with the address and
    undefined-behaviour sanitizers."""
    preload = [
        subprocess.run(
            [str(COMPILER), f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0",
        "CMAB_EMULATED_FLAGS": "-g -fsanitize=address,undefined -fno-sanitize-recover=all",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-k", chosen, file]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
