"""The native tests under a sanitizer: `python -m tests.guards.sanitizers KIND VECTORS`, with optional arguments of
pytest.

All parts of the extension that run are compiled with the sanitizer. Of the kernels, these are those for VECTORS:
"portable", "avx2", or "avx512" with the engines of bfloat16. KIND is "memory" or "threads". With "memory", accesses out
of bounds and undefined behaviour end the process, and memory from malloc is filled with NaN. With "threads", a race
ends the process, and the OpenMP runtime is that of openmp.cpp, because the sanitizer does not know how libgomp
synchronises.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from cmab_kernels.runtime.extension import load
from tests.mutations.fault import Fault
from tests.mutations.tree import ROOT, Tree, steps_of

from .one_isa import COMPILED

COMPILER = os.environ.get("CXX") or shutil.which("g++") or "c++"
FOUND = 66
"""The exit code of a process in which a sanitizer has found something."""
FLAGS = "-O1 -g1 -Wno-error -fno-omit-frame-pointer"
OPERATORS = "tests/attention tests/intention tests/layers tests/nystrom"
BY_TORCH = "compile or opcheck or gradgradcheck or near_singular or memory or instructions"
NATIVE = f"{OPERATORS} -k '(native or bf16) and not (cubin or {BY_TORCH})'"
"""The native suite, without kernels for a GPU and without tests that mainly run torch:
compilation, second derivatives."""
THREADED = f"{OPERATORS} tests/test_many_threads.py -k threads"


class Sanitizer(NamedTuple):
    """How a sanitizer is built and run, its output when it reports something, and the faults that it must report."""

    flags: str
    libraries: tuple[str, ...]
    """The library that must be loaded before all others."""
    options: dict[str, str]
    """Environment variables."""
    report: str
    """A pattern of its output."""
    tests: str
    """The arguments of pytest for the tests that run, without the instruction set."""
    faults: tuple[Fault, ...]


SANITIZERS = {
    "memory": Sanitizer(
        f"{FLAGS} -fsanitize=address,undefined -fno-sanitize=vptr -fno-wrapv -fno-sanitize-recover=all",
        ("libasan.so", "libubsan.so", "libstdc++.so"),
        {"ASAN_OPTIONS": f"detect_leaks=0:exitcode={FOUND}:max_malloc_fill_size=1073741824:malloc_fill_byte=255"},
        "AddressSanitizer|runtime error",
        NATIVE,
        (
            Fault(
                "csrc/attention/merge.h",
                "for (int e = 0; e < width; ++e) to[e] = T(mix.sums * acc[e]);",
                "for (int e = 0; e <= width; ++e) to[e] = T(mix.sums * acc[e]);",
                "tests/attention/test_native.py::test_borders_of_tiles_and_pieces",
            ),
            Fault(
                "csrc/common/tile.h",
                "for (int k = 0; k < rows; ++k) {",
                "for (int k = 0; k <= rows; ++k) {",
                "tests/attention/test_native.py::test_borders_of_tiles_and_pieces",
            ),
        ),
    ),
    "threads": Sanitizer(
        f"{FLAGS} -fsanitize=thread",
        ("libtsan.so",),
        {"TSAN_OPTIONS": f"ignore_noninstrumented_modules=1:halt_on_error=1:exitcode={FOUND}"},
        "ThreadSanitizer: data race",
        THREADED,
        (
            Fault(
                "csrc/attention/forward.cpp",
                "#pragma omp for schedule(dynamic)\n      for (size_t i = 0; i < all_blocks_.size(); ++i) pack(",
                "#pragma omp for schedule(dynamic) nowait\n      for (size_t i = 0; i < all_blocks_.size(); ++i) pack(",
                "tests/attention/test_native.py::test_same_bits_for_any_threads_and_alone",
            ),
            Fault(
                "csrc/layers/crew.h",
                "if (has_sets(sets)) return;\n#pragma omp barrier",
                "if (sets >= 0) return;\n#pragma omp barrier",
                "tests/layers/test_block.py::test_strides_and_threads_change_no_bit",
            ),
        ),
    ),
}


class Sanitized:
    """A tree in `folder` whose extension is compiled with a sanitizer."""

    def __init__(self, kind: str, vectors: str, folder: Path) -> None:
        self.sanitizer, self.sets = SANITIZERS[kind], COMPILED[vectors]
        self.tree = Tree(folder, self.sanitizer.flags)
        self._libraries = [
            subprocess.run(
                [COMPILER, f"-print-file-name={name}"], check=True, capture_output=True, text=True
            ).stdout.strip()
            for name in self.sanitizer.libraries
        ]
        if kind == "threads":
            self._libraries.append(str(folder / "openmp.so"))
            source, flags = Path(__file__).with_name("openmp.cpp"), self.sanitizer.flags.split()
            subprocess.run(
                [COMPILER, "-std=c++17", "-fPIC", "-shared", *flags, str(source), "-o", self._libraries[-1]], check=True
            )
        self.tree.link(steps_of(sets=self.sets), stay=True)

    def run(self, tests: str) -> subprocess.CompletedProcess[str]:
        """Run these tests; tests of another instruction set are left out."""
        folder = self.tree.folder
        best = [name for name in load().instruction_sets() if name in self.sets][-1]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {
            "PYTHONPATH": f"{folder}:{folder / 'python'}",
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        environment |= {"LD_PRELOAD": " ".join(self._libraries), "CMAB_KERNELS_ISA": best, **self.sanitizer.options}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-s",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "-p",
            "tests.guards.one_isa",
        ]
        # No random addresses, because the thread sanitizer needs its own address layout.
        plain = ["setarch", "-R"] if shutil.which("setarch") else []
        return subprocess.run(
            [*plain, *command, *shlex.split(tests)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def reports(self, fault: Fault) -> bool:
        """Whether the sanitizer reports the fault in the tests that must reach it."""
        source = self.tree.folder / fault.path
        right = source.read_text()
        source.write_text(right.replace(fault.right, fault.wrong))
        self.tree.link(steps_of(fault.path, self.sets))
        source.write_text(right)
        run = self.run(fault.caught_by)
        return run.returncode != 0 and re.search(self.sanitizer.report, run.stdout) is not None


def main(kind: str, vectors: str, *tests: str) -> int:
    run = Sanitized(kind, vectors, ROOT / "build" / f"sanitizer-{kind}-{vectors}").run(
        shlex.join(tests) or SANITIZERS[kind].tests
    )
    print(run.stdout)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
