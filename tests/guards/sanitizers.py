"""The native tests under a sanitizer: `python -m tests.guards.sanitizers memory` or `threads`, and arguments of pytest.

The drivers, and the kernels for the instruction set in use, are compiled with the sanitizer; bindings are linked as they are. With
"memory", accesses out of bounds and undefined behaviour end the process, and all memory that nobody has written is filled with NaN. With
"threads", OpenMP's run time is that of openmp.cpp: the sanitizer does not know how GCC's synchronises.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.mutations.fault import Fault
from tests.mutations.tree import ROOT, Tree, steps_of

COMPILER = os.environ.get("CXX") or shutil.which("g++") or "c++"
FOUND = 66
"""Exit code of a process in which the sanitizer has found something."""


class Sanitizer(NamedTuple):
    """How a sanitizer is built and run, what it says when it has found something, and what it must find."""

    flags: str
    libraries: tuple[str, ...]
    """To be loaded before Python's own."""
    options: dict[str, str]
    """Environment variables."""
    report: str
    tests: str
    """The native tests, as arguments of pytest."""
    faults: tuple[Fault, ...]


NATIVE = "tests/attention tests/intention tests/layers tests/nystrom -k 'native and not compile and not memory'"

SANITIZERS = {
    "memory": Sanitizer(
        "-O1 -g1 -Wno-error -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr -fno-wrapv -fno-sanitize-recover=all",
        ("libasan.so", "libubsan.so", "libstdc++.so"),
        {"ASAN_OPTIONS": f"detect_leaks=0:exitcode={FOUND}:max_malloc_fill_size=1073741824:malloc_fill_byte=255"},
        "AddressSanitizer|runtime error",
        NATIVE,
        (
            Fault(
                "csrc/attention/merge.h",
                "for (int i = 0; i < rows * width; ++i) at.acc[i] = 0.0;",
                "for (int i = 0; i < 100 * rows * width; ++i) at.acc[i] = 0.0;",
                "tests/attention/test_native.py::test_empty_extents",
            ),
            Fault(
                "csrc/attention/forward.cpp",
                "const int64_t units = in_.batch * blocks * in_.heads,",
                "const int64_t units = in_.batch * blocks * in_.heads + 0 * (INT32_MAX + int(blocks)),",
                "tests/attention/test_native.py::test_widths",
            ),
        ),
    ),
    "threads": Sanitizer(
        "-O1 -g1 -Wno-error -fno-omit-frame-pointer -fsanitize=thread",
        ("libtsan.so",),
        {"TSAN_OPTIONS": f"ignore_noninstrumented_modules=1:exitcode={FOUND}"},
        "ThreadSanitizer: data race",
        "tests/attention tests/intention tests/layers tests/nystrom -k 'native and threads or test_same_bits and native or threads_change'",
        (
            Fault(
                "csrc/attention/forward.cpp",
                "#pragma omp for schedule(dynamic)\n      for (size_t i = 0; i < all_blocks_.size(); ++i) pack(",
                "#pragma omp for schedule(dynamic) nowait\n      for (size_t i = 0; i < all_blocks_.size(); ++i) pack(",
                "tests/attention/test_native.py::test_same_bits_for_any_threads_and_alone",
            ),
        ),
    ),
}


class Sanitized:
    """A tree whose extension is compiled with a sanitizer."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.sanitizer = SANITIZERS[kind]
        self.tree = Tree(folder, self.sanitizer.flags)
        self._libraries = [
            subprocess.run([COMPILER, f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
            for name in self.sanitizer.libraries
        ]
        if kind == "threads":
            self._libraries.append(str(folder / "openmp.so"))
            source = Path(__file__).with_name("openmp.cpp")
            subprocess.run(
                [COMPILER, "-std=c++17", "-fPIC", "-shared", *self.sanitizer.flags.split(), str(source), "-o", self._libraries[-1]],
                check=True,
            )
        self.tree.link(steps_of())

    def run(self, tests: str) -> subprocess.CompletedProcess[str]:
        """Run these tests with the sanitizer."""
        folder = self.tree.folder
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": f"{folder}:{folder / 'python'}", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        environment |= {"LD_PRELOAD": " ".join(self._libraries), **self.sanitizer.options}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-s", "--tb=short", "-p", "no:cacheprovider", *shlex.split(tests)]
        plain = ["setarch", "-R"] if shutil.which("setarch") else []  # no random addresses: the thread sanitizer wants its own
        return subprocess.run([*plain, *command], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run_with(self, fault: Fault) -> subprocess.CompletedProcess[str]:
        """The same with a fault, and the tests that must meet it."""
        source = self.tree.folder / fault.path
        right = source.read_text()
        source.write_text(right.replace(fault.right, fault.wrong))
        self.tree.link(steps_of())
        source.write_text(right)
        return self.run(fault.caught_by)


def main(kind: str, *tests: str) -> int:
    run = Sanitized(kind, ROOT / "build" / f"sanitizer-{kind}").run(shlex.join(tests) or SANITIZERS[kind].tests)
    print(run.stdout)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
