"""The CUDA kernels of csrc played by the CPU: `csrc/cuda_emulated.cpp`, compiled here, in the place of `cmab_kernels._cuda`."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
FLAGS = ("-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")


def build(folder: Path, *flags: str) -> Path:
    """The shared library; `flags` such as a sanitizer's."""
    library = folder / "emulated_cuda.so"
    source = ROOT / "csrc" / "cuda_emulated.cpp"
    subprocess.run([str(COMPILER), *FLAGS, *flags, f"-I{ROOT}/csrc", str(source), "-o", str(library)], check=True)
    return library


class EmulatedCuda:
    """The functions of `cmab_kernels._cuda` that a launcher calls. `seed` chooses the order of blocks and threads."""

    MAX_LANDMARKS, MAX_VALUE_WIDTH = 64, 512

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.seed = 0

    def ridge_needs(self, matrices: int, keys: int, key_width: int, value_width: int, most: int) -> tuple[int, int, int]:
        needs = (ctypes.c_int64 * 3)()
        self._library.ridge_needs(*map(ctypes.c_int64, (matrices, keys)), key_width, value_width, ctypes.c_int64(most), needs)
        return needs[0], needs[1], needs[2]

    def ridge_solve(self, numbers: Sequence[int]) -> None:
        self._library.emulate_ridge_solve((ctypes.c_int64 * 32)(*numbers), self.seed)

    def regularised_solve(self, numbers: Sequence[int]) -> None:
        self._library.emulate_regularised_solve((ctypes.c_int64 * 17)(*numbers), self.seed)

    def nystrom_step(self, numbers: Sequence[int]) -> None:
        self._library.emulate_nystrom_step((ctypes.c_int64 * 49)(*numbers), self.seed)

    def attention_step(self, numbers: Sequence[int]) -> None:
        self._library.emulate_attention_step((ctypes.c_int64 * 40)(*numbers), self.seed)
