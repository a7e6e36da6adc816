"""A copy of the tree in which faults are planted, one at a time, and tests are run.

For a fault in C++, only the objects that read its file are compiled, and linked with the other objects of the build,
which setup.py has left in build/. Of the kernels, only those for the instruction set in use are compiled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pybind11

from cmab_kernels.runtime.extension import load

from .fault import Fault

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("cmab_kernels", "csrc", "python", "tests", "gpu_machine", "pyproject.toml", "setup.py")
VECTORS = ("portable", "avx2", "avx512")
ENGINES = ("avx512bf16", "amx", "amx_emulated")
"""The instruction sets for which kernels.cpp and bf16_kernels.cpp are compiled."""
LIMIT = 600
"""The largest number of seconds for tests, because a fault may make a loop endless."""
QUICKLY = "-O1 -Wno-error"
"""Flags added for the compiler, because its code runs in a few tests only."""


class Outcome(NamedTuple):
    """The outcome of a planted fault."""

    caught: str
    """The test that failed, or the way its process ended; "" if no test failed."""
    seconds: float
    output: str
    """The end of the output of the tests, or of the compiler."""


class Tree:
    """A new copy of the tree in `folder`; `flags` are added for the compiler."""

    def __init__(self, folder: Path, flags: str = QUICKLY) -> None:
        self.folder, self.flags = folder, flags
        self._servers: dict[bool, subprocess.Popen[str]] = {}
        self._staying: dict[str, str] = {}
        shutil.rmtree(folder, ignore_errors=True)
        for name in COPIED:
            source, to = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
            else:
                shutil.copy(source, to)

    def outcome(self, fault: Fault) -> Outcome:
        """Plant the fault, run the tests that must catch it, and remove it."""
        started = time.monotonic()
        try:
            with self._planted(fault):
                caught, output = self._tested(fault.caught_by)
        except subprocess.CalledProcessError as error:  # the compiler failed
            caught, output = "", str(error.output)
        return Outcome(caught, time.monotonic() - started, output[-3000:])

    @contextlib.contextmanager
    def _planted(self, fault: Fault) -> Iterator[None]:
        source = self.folder / fault.path
        right = source.read_text()
        source.write_text(right.replace(fault.right, fault.wrong))
        try:
            if fault.path.startswith("csrc") and source.suffix in (".h", ".cpp"):
                self.link(steps_of(fault.path, (fault.vectors,) if fault.vectors else ()))
            yield
        finally:
            source.write_text(right)
            if fault.path.startswith("csrc"):
                shutil.copy(_extension(), self.folder / "cmab_kernels")

    def link(self, steps: list[dict[str, Any]], *, stay: bool = False) -> None:
        """Compile the objects of these steps again, and link the extension with them; if they `stay`, all later
        extensions are also linked with them."""
        folder = self.folder / ("objects" if stay else "planted")
        folder.mkdir(exist_ok=True)
        made = {}
        for step in steps:
            made[step["output"]] = str(folder / step["output"].replace("/", "-"))
            command = step["command"].replace(step["output"], made[step["output"]])
            # pip builds in an environment that it then deletes, with the headers of pybind11 that the command names.
            headers = shlex.join(["-isystem", pybind11.get_include()])
            _run(f"{command} {headers} {self.flags}", self.folder)  # paths are relative to csrc of this tree
        if stay:
            self._staying = made
        (linking,) = (step for step in _steps() if Path(step["output"]).name == _extension().name)
        extension = self.folder / "cmab_kernels" / _extension().name
        extension.unlink()  # a process that still reads the old file is not affected
        renamed = {**self._staying, **made, linking["output"]: str(extension)}
        _run(" ".join([renamed.get(word, word) for word in linking["command"].split()] + [self.flags]), ROOT)

    def _tested(self, tests: str) -> tuple[str, str]:
        """The test that caught the fault, or "", and the output of the tests."""
        log = self.folder / "log"
        request = {
            "folder": str(self.folder),
            "arguments": ["-x", "-q", "-rf", "--tb=short", "-p", "no:cacheprovider", *shlex.split(tests)],
            "log": str(log),
            "limit": LIMIT,
        }
        code = self._answer(request, "test_triton" in tests)
        output = log.read_text(errors="replace")
        if code < 0:
            return f"no end after {LIMIT} s" if code == -signal.SIGALRM else f"ended by signal {-code}", output
        failed = re.findall(r"^FAILED (.+?)(?: - .*)?$", output, re.M)
        return failed[0] if code == 1 and failed else "", output

    def _answer(self, request: dict[str, Any], interpret: bool) -> int:
        """The exit code of tests that run in a fork of a server; one server is for Triton's interpreter, and one for
        all other tests."""
        if interpret not in self._servers:
            kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))}
            kept |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
            kept |= {"CMAB_EMULATED_FLAGS": QUICKLY} | ({"TRITON_INTERPRET": "1"} if interpret else {})
            command = [sys.executable, str(Path(__file__).parent / "server.py")]
            self._servers[interpret] = subprocess.Popen(
                command, env=kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        server = self._servers[interpret]
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps(request), file=server.stdin, flush=True)
        return int(server.stdout.readline())

    def close(self) -> None:
        """End the servers."""
        for server in self._servers.values():
            server.communicate()
        self._servers.clear()


def _extension() -> Path:
    return Path(str(load().__file__)).resolve()


def _objects() -> Path:
    folders = list((ROOT / "build").glob("objects.*"))
    assert len(folders) == 1, (
        f"build/ has {len(folders)} builds of the extension, one is needed: python setup.py build_ext --inplace"
    )
    return folders[0]


def _ninja(*arguments: str) -> str:
    from ninja import BIN_DIR

    return _run(shlex.join([str(Path(BIN_DIR) / "ninja"), "-f", str(_objects() / "build.ninja"), *arguments]), ROOT)


def _run(command: str, folder: Path) -> str:
    return subprocess.run(
        command, shell=True, check=True, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout


def _steps() -> list[dict[str, Any]]:
    """The steps of the build: the command of each object and of the extension, with its `output`."""
    text = _ninja("-t", "compdb", "cpp", "link")
    steps: list[dict[str, Any]] = json.loads(text[text.index("[\n") :])
    return steps


def steps_of(path: str = "", sets: Collection[str] = ()) -> list[dict[str, Any]]:
    """The steps that compile an object which reads the file `path`, or all of them.

    Objects of kernels are only those for the instruction sets `sets` (by default, the one in use). Objects of bfloat16
    kernels are all included, because the program chooses among their engines.
    """
    compiled, reads = sets or _in_use("bf16" in path), _reads()
    found = []
    for step in _steps():
        name = Path(step["output"]).name.removesuffix(".cpp.o")
        reads_it = ROOT / path in reads.get(step["output"], ()) if path else step["output"] in reads
        if reads_it and name.partition("kernels_")[2] in ("", *compiled):
            found.append(step)
    assert found, f"no object of the build reads {path or 'anything'}: python setup.py build_ext --inplace"
    return found


def _in_use(with_engines: bool) -> tuple[str, ...]:
    """The widest vectors that this processor has, and the engines of bfloat16 if requested."""
    best = max((name for name in load().instruction_sets() if name in VECTORS), key=VECTORS.index)
    return (best, *ENGINES) if with_engines else (best,)


def _reads() -> dict[str, set[Path]]:
    """Each object of the build -> the files that its compilation read."""
    found: dict[str, set[Path]] = {}
    for paragraph in _ninja("-t", "deps").split("\n\n"):
        first, *files = paragraph.strip().splitlines() or [""]
        found[first.partition(":")[0]] = {(ROOT / file.strip()).resolve() for file in files}
    return found
