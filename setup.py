"""Builds cmab_kernels._C from csrc with ninja. No torch, no network; what flags a source gets is in its name.

CMAB_KERNELS_BUILD=auto (default): without a working compiler the package installs without the extension, and `_build.json` in it says why;
1: a failed build is an error; 0: no build.
"""

import json
import os
import platform
import shutil
import subprocess
import sysconfig
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


def suffix(source: Path) -> str:
    return next((s for s in INSTRUCTION_SETS if source.stem.endswith(s)), "")


def sources() -> list[Path]:
    on_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return [s for s in sorted((ROOT / "csrc").rglob("*.cpp")) if on_x86 or not suffix(s)]


def ninja_file(target: Path, folder: Path, compiler: str) -> str:
    import pybind11

    includes = f"-I{sysconfig.get_path('include')} -I{pybind11.get_include()}"
    extra = os.environ.get("CXXFLAGS", "")
    objects = {s: folder / f"{s.relative_to(ROOT)}.o" for s in sources()}
    return "\n".join(
        [
            "rule cpp\n  deps = gcc\n  depfile = $out.d",
            f"  command = {compiler} -MMD -MF $out.d {FLAGS} {includes} $flags {extra} -c $in -o $out",
            f"rule link\n  command = {compiler} -shared -fopenmp {extra} $in -o $out",
            *(f"build {o}: cpp {s}\n  flags = {INSTRUCTION_SETS.get(suffix(s), '')}" for s, o in objects.items()),
            f"build {target}: link {' '.join(map(str, objects.values()))}\n",
        ]
    )


class NinjaBuild(build_ext):
    def run(self) -> None:
        super().run()
        folder = Path(self.get_ext_fullpath("cmab_kernels._C")).parent
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_build.json").write_text(json.dumps(self.report, indent=1) + "\n")

    def build_extension(self, ext: Extension) -> None:
        self.report = {"built": False, "reason": "", "compiler": "", "targets": []}
        if WANTED == "0":
            self.report["reason"] = "CMAB_KERNELS_BUILD=0"
            return
        try:
            self.report |= self.compile(Path(self.get_ext_fullpath(ext.name)).resolve())
        except (OSError, ImportError, subprocess.CalledProcessError) as error:
            if WANTED == "1":
                raise
            self.report["reason"] = str(error)

    def compile(self, target: Path) -> dict:
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if not compiler:
            raise OSError("no C++ compiler: neither g++ nor clang++ is on the PATH, and CXX is not set")
        from ninja import BIN_DIR

        folder = Path(self.build_temp).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(ninja_file(target, folder, compiler))
        build = subprocess.run([Path(BIN_DIR) / "ninja", "-C", folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(build.stdout)
        if build.returncode:
            reason = next((line for line in build.stdout.splitlines() if "error:" in line or "not found" in line), "see the build's output")
            raise OSError(f"{compiler} failed: {reason.strip()}")
        version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]
        return {"built": True, "compiler": version, "targets": ["cpu", *sorted({s[1:] for s in map(suffix, sources()) if s})]}


setup(ext_modules=[Extension("cmab_kernels._C", [], optional=WANTED != "1")], cmdclass={"build_ext": NinjaBuild})
