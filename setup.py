"""Builds cmab_kernels._C from csrc, and cmab_kernels._cuda where nvcc is, with ninja. No torch, no GPU, no network.

What flags a source gets is in its name. CMAB_KERNELS_BUILD=auto (default): what does not build is left out, and `_build.json` in the
package says why; 1: a failed build is an error; 0: no build. Without nvcc, in CUDA_HOME or on the PATH, there is no _cuda.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
WANTED = os.environ.get("CMAB_KERNELS_BUILD", "auto")
FLAGS = "-O3 -std=c++17 -fPIC -fopenmp -fvisibility=hidden -ffp-contract=fast -Wall -Wextra -Werror"
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c"
INSTRUCTION_SETS = {
    "_avx2": "-mavx2 -mfma -mf16c",
    "_avx512": AVX512,
    "_avx512bf16": f"{AVX512} -mavx512bf16",
    "_amx": f"{AVX512} -mavx512bf16 -mamx-tile -mamx-bf16",
}
GPUS = {"sm_80": "80", "sm_90a": "90a", "sm_100": "100"}
"""Machine code for each, and PTX of the last for later GPUs."""
NVCC_FLAGS = "-O3 -std=c++17 -Xptxas -v -Werror all-warnings -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra,-Werror"


def suffix(source: Path) -> str:
    return next((s for s in INSTRUCTION_SETS if source.stem.endswith(s)), "")


def cpu_sources() -> list[Path]:
    on_x86 = platform.machine().lower() in ("x86_64", "amd64")
    files = [*(ROOT / "csrc").glob("*.cpp"), *(ROOT / "csrc" / "cpu").glob("*.cpp")]
    return [s for s in sorted(files) if on_x86 or not suffix(s)]


def cuda_sources() -> list[Path]:
    return [ROOT / "csrc" / "cuda" / "bindings.cpp", *sorted((ROOT / "csrc" / "cuda").glob("*.cu"))]


def find_compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise OSError("no C++ compiler: neither g++ nor clang++ is on the PATH, and CXX is not set")
    return compiler


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def ninja_file(cpu: Path, cuda: Path, folder: Path, compiler: str, nvcc: str | None) -> str:
    import pybind11

    includes = f"-I{sysconfig.get_path('include')} -I{pybind11.get_include()}"
    extra = os.environ.get("CXXFLAGS", "")
    codes = " ".join(f"-gencode arch=compute_{number},code={name}" for name, number in GPUS.items())
    newest = list(GPUS.values())[-1]
    codes += f" -gencode arch=compute_{newest},code=compute_{newest}"

    compile_cuda = f"{nvcc} -ccbin {compiler} {NVCC_FLAGS} {codes}"

    def objects(sources: list[Path]) -> dict[Path, Path]:
        return {s: folder / f"{s.relative_to(ROOT)}.o" for s in sources}

    def compile_all(sources: list[Path]) -> list[str]:
        return [
            f"build {o}: {'nvcc' if s.suffix == '.cu' else 'cpp'} {s}\n  flags = {INSTRUCTION_SETS.get(suffix(s), '')}"
            for s, o in objects(sources).items()
        ]

    lines = [
        "rule cpp\n  deps = gcc\n  depfile = $out.d",
        f"  command = {compiler} -MMD -MF $out.d {FLAGS} {includes} $flags {extra} -c $in -o $out",
        f"rule link\n  command = {compiler} -shared -fopenmp {extra} $in -o $out",
        *compile_all(cpu_sources()),
        f"build {cpu}: link {' '.join(map(str, objects(cpu_sources()).values()))}\n",
    ]
    if nvcc:
        lines += [
            "rule nvcc\n  deps = gcc\n  depfile = $out.d",
            f"  command = {compile_cuda} -MMD -MF $out.d -c $in -o $out > $out.log 2>&1 || (cat $out.log; false)",
            f"rule nvlink\n  command = {nvcc} -ccbin {compiler} -shared -cudart static $in -o $out",
            *compile_all(cuda_sources()),
            f"build {cuda}: nvlink {' '.join(map(str, objects(cuda_sources()).values()))}\n",
        ]
    return "\n".join(lines)


def kernels_in(log: str) -> list[dict]:
    """What ptxas says of each kernel: its name as the linker knows it, and what it takes of a multiprocessor."""
    entry = re.compile(
        r"Compiling entry function '(?P<kernel>\w+)' for '(?P<target>\w+)'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
        r"Used (?P<registers>\d+) registers",
        re.S,
    )
    return [{name: int(text) if text.isdigit() else text for name, text in found.groupdict().items()} for found in entry.finditer(log)]


class NinjaBuild(build_ext):
    def run(self) -> None:
        super().run()
        folder = Path(self.get_ext_fullpath("cmab_kernels._C")).parent
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_build.json").write_text(json.dumps(self.report | {"cuda": self.cuda_report}, indent=1) + "\n")

    def build_extensions(self) -> None:
        """Both from one ninja file, the CPU's first: it does not depend on whether nvcc succeeds."""
        self.folder = Path(self.build_temp).resolve()
        self.cpu, self.cuda = (Path(self.get_ext_fullpath(ext.name)).resolve() for ext in self.extensions)
        self.report = attempt(self.build_cpu)
        self.cuda_report = attempt(self.build_cuda)

    def build_cpu(self) -> dict:
        from ninja import BIN_DIR

        self.ninja = Path(BIN_DIR) / "ninja"
        compiler = find_compiler()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "build.ninja").write_text(ninja_file(self.cpu, self.cuda, self.folder, compiler, find_nvcc()))
        self.make(self.cpu, compiler)
        return {"compiler": version(compiler, 0), "targets": ["cpu", *sorted({s[1:] for s in map(suffix, cpu_sources()) if s})]}

    def build_cuda(self) -> dict:
        nvcc = find_nvcc()
        if not self.report["built"]:
            return {"built": False, "reason": self.report["reason"]}
        if not nvcc:
            return {"built": False, "reason": "no nvcc: neither in CUDA_HOME nor on the PATH"}
        self.make(self.cuda, nvcc)
        kernels = [kernel for log in sorted(self.folder.rglob("*.cu.o.log")) for kernel in kernels_in(log.read_text())]
        return {"compiler": version(nvcc, -2), "targets": list(GPUS), "kernels": kernels}

    def make(self, target: Path, compiler: str) -> None:
        build = subprocess.run([self.ninja, "-C", self.folder, target], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(build.stdout)
        if build.returncode:
            target.unlink(missing_ok=True)  # one of an earlier build is not what the sources say
            reason = next((line for line in build.stdout.splitlines() if "error:" in line or "not found" in line), "see the build's output")
            raise OSError(f"{compiler} failed: {reason.strip()}")


def attempt(build: Callable[[], dict]) -> dict:
    report = {"built": False, "reason": "", "compiler": "", "targets": []}
    if WANTED == "0":
        return report | {"reason": "CMAB_KERNELS_BUILD=0"}
    try:
        return report | {"built": True} | build()
    except (OSError, ImportError, subprocess.CalledProcessError) as error:
        if WANTED == "1":
            raise
        return report | {"reason": str(error)}


def version(compiler: str, line: int) -> str:
    return subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout.strip().splitlines()[line]


setup(
    ext_modules=[Extension("cmab_kernels._C", [], optional=WANTED != "1"), Extension("cmab_kernels._cuda", [], optional=True)],
    cmdclass={"build_ext": NinjaBuild},
)
