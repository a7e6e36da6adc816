"""The products of setup.py, its messages when it fails, and ptxas's results for the CUDA kernels on each GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import cmab_kernels
from cmab_kernels.runtime.extension import build_report, load_cuda

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[1]
KERNELS = {  # by linker name: the most registers per thread with which the planned number of blocks fits
    r"solve_kernelIf": 128,
    r"solve_kernelId": 128,
    r"nystrom_step_kernelI\w*BFloat16": 128,
    r"nystrom_step_kernelI\w*7Float16": 128,
    r"nystrom_step_kernelIf": 128,
    r"nystrom_step_kernelId": 255,
    r"attention_step_kernelI\w*BFloat16": 128,
    r"attention_step_kernelI\w*7Float16": 128,
    r"attention_step_kernelIf": 128,
    r"attention_step_kernelId": 255,
}

in_sources = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="there is no setup.py beside the tests")


def _cuda_report() -> dict[str, Any]:
    report = build_report()["cuda"]
    if not report["built"]:
        assert shutil.which("nvcc") is None, (
            f"nvcc is on the PATH, and the CUDA kernels were not built: {report['reason']}"
        )
        pytest.skip(f"the CUDA kernels were not built: {report['reason']}")
    return report


# ---- the built kernels


def test_every_kernel_was_built_for_every_gpu_and_nothing_spills() -> None:
    report = _cuda_report()
    assert {"sm_80", "sm_90a", "sm_100", "sm_120"} <= set(report["targets"])
    lines = []
    for pattern, most in KERNELS.items():
        found = [kernel for kernel in report["kernels"] if re.search(pattern, kernel["kernel"])]
        assert [kernel["target"] for kernel in found] == report["targets"], pattern
        for kernel in found:
            spilled = kernel["stack"] + kernel["stores"] + kernel["loads"]
            lines.append(
                f"{pattern:25} {kernel['target']:7} registers {kernel['registers']:3} of {most}  spilled {spilled}"
            )
            assert spilled == 0 and kernel["registers"] <= most, lines[-1]
    print("\n".join(["", *lines]))
    assert len(lines) == len(report["kernels"]), "a kernel that no line of this test looks at"


def test_machine_code() -> None:
    """The machine code loads four elements at a time, and uses no local memory and no generic addresses.

    There is a fence on both sides of each atomic counter.
    """
    nvidia = pytest.importorskip("triton.backends.nvidia", reason="cuobjdump comes with Triton", exc_type=ImportError)
    _cuda_report()
    cuobjdump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    text = subprocess.run(
        [cuobjdump, "--dump-sass", "--gpu-architecture", "sm_90a", load_cuda().__file__],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout
    functions = text.split("Function : ")[1:]
    assert len(functions) == len(KERNELS)
    for function in functions:
        name = function.split("\n", 1)[0]
        found = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", function, re.M))
        assert not [op for op in found if op.split(".")[0] in ("LD", "ST", "LDL", "STL", "ATOM")], name


def test_importing_the_kernels_needs_no_gpu() -> None:
    """Importing the CUDA kernels loads no driver."""
    _cuda_report()
    code = """
import torch, cmab_kernels
from cmab_kernels.runtime.extension import load_cuda
cuda = load_cuda()
print("libcuda.so" in open("/proc/self/maps").read())
"""
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
        == "False"
    )


# ---- setup.py, with fake compilers


WORKS = (
    '#!/bin/sh\nwhile [ $# -gt 0 ]; do if [ "$1" = -o ]; then touch "$2"; fi; shift; done; echo a compiler; echo '
    "that pretends\n"
)
FAILS = "#!/bin/sh\necho 'regularised_solve.cu(1): error: no such luck'\nexit 1\n"


def _build(
    tree: Path, wanted: str, wanted_cuda: str, compiler: str, nvcc: str | None, **variables: str
) -> tuple[int, dict[str, Any]]:
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    shutil.copy(ROOT / "setup.py", tree)
    (tree / "cmab_kernels").mkdir()
    (tree / "cmab_kernels" / "runtime").mkdir()
    shutil.copy(ROOT / "cmab_kernels" / "runtime" / "constants.py", tree / "cmab_kernels" / "runtime")
    (tree / "bin").mkdir(exist_ok=True)
    for name, script in (("c++", compiler), ("nvcc", nvcc)):
        if script is not None:
            (tree / "bin" / name).write_text(script)
            (tree / "bin" / name).chmod(0o755)
    asked = {"CMAB_KERNELS_BUILD": wanted, "CMAB_KERNELS_CUDA": wanted_cuda}
    environment = {**os.environ, **asked, "CXX": str(tree / "bin" / "c++"), "CUDA_HOME": str(tree), **variables}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    # No terminal.
    run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, start_new_session=True)
    (tree / "stderr").write_text(run.stderr)
    report = tree / "cmab_kernels" / "_build.json"
    return run.returncode, json.loads(report.read_text()) if report.exists() else {}


needs_tools = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ninja", "setuptools")),
    reason="ninja or setuptools are not here: pip brings them to where it builds",
)


@in_sources
@needs_tools
@pytest.mark.parametrize(
    "wanted, wanted_cuda, compiler, nvcc, code, reason, cuda_reason",
    [
        ("auto", "auto", WORKS, WORKS, 0, "", ""),
        ("auto", "auto", WORKS, FAILS, 0, "", "no such luck"),
        ("auto", "auto", WORKS, None, 0, "", "no nvcc"),
        ("auto", "auto", FAILS, WORKS, 0, "no such luck", "no such luck"),
        ("1", "0", WORKS, FAILS, 0, "", "CMAB_KERNELS_CUDA=0"),
        ("auto", "1", WORKS, WORKS, 0, "", ""),
        ("auto", "1", WORKS, None, 1, None, None),
        ("auto", "1", WORKS, FAILS, 1, None, None),
        ("1", "0", FAILS, None, 1, None, None),
        ("0", "1", FAILS, FAILS, 0, "CMAB_KERNELS_BUILD=0", "CMAB_KERNELS_BUILD=0"),
    ],
)
def test_what_setup_says(
    tmp_path: Path,
    wanted: str,
    wanted_cuda: str,
    compiler: str,
    nvcc: str | None,
    code: int,
    reason: str | None,
    cuda_reason: str | None,
) -> None:
    returned, report = _build(tmp_path, wanted, wanted_cuda, compiler, nvcc)
    assert (returned != 0) == code
    if reason is None or cuda_reason is None:
        return
    for part, why in ((report, reason), (report["cuda"], cuda_reason)):
        assert part["built"] == (why == "") and why in part["reason"]
    there = {path.name.split(".")[0] for path in (tmp_path / "cmab_kernels").glob("*.so")}
    assert there == {name for name, why in (("_C", reason), ("_cuda", cuda_reason)) if why == ""}
    last = "".join((tmp_path / "stderr").read_text().strip().splitlines()[-3:])
    assert ("WITHOUT ITS NATIVE KERNELS" in last and reason in last) == (reason != "" and wanted != "0")


NOTES = WORKS.replace("\n", '\necho "$(basename "$0")" "$@" >> "$(dirname "$0")/calls"\n', 1)
"""A compiler that also records how it was called."""


@in_sources
@needs_tools
@pytest.mark.parametrize("name", ["my projects", "a$b", "a(b)", "a:b", "it's", "a|b&c;d", "$HOME", 'é#"'])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    """The compiler and nvcc have such a path too, for example in an environment inside a checkout.

    Only in CXX, the path must be quoted.
    """
    compiler = str(tmp_path / name / "bin" / "c++")
    quoted = {"CXX": shlex.quote(compiler)} if {"'", '"'} & {*name} else {}
    returned, report = _build(tmp_path / name, "1", "1", WORKS, WORKS, **quoted)
    assert returned == 0 and report["built"] and report["cuda"]["built"]


@in_sources
@needs_tools
@pytest.mark.parametrize(
    "command", ["{0}/launcher {0}/c++", "{0}/c++ -m64", "{0}/launcher {0}/c++ -m64 -isystem /x", "'{0}/c++' '-m64'"]
)
def test_the_compiler_may_be_a_command(tmp_path: Path, command: str) -> None:
    """A launcher such as ccache, and flags. nvcc takes only the compiler, and its flags through an option."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "launcher").write_text('#!/bin/sh\necho launched >> "$(dirname "$0")/calls"\nexec "$@"\n')
    (folder / "launcher").chmod(0o755)
    returned, report = _build(tmp_path, "1", "1", NOTES, NOTES, CXX=command.format(folder))
    calls = (folder / "calls").read_text().splitlines()
    compiled, by_nvcc = (
        [call for call in calls if call.startswith(f"{name} ") and " -c " in call] for name in ("c++", "nvcc")
    )
    assert returned == 0 and report["built"] and report["compiler"] == "a compiler" and len(compiled) > 20 and by_nvcc
    assert calls.count("launched") > len(compiled) or "launcher" not in command
    assert all(("-m64" in command) == (" -m64 " in call) for call in compiled)
    assert all(f" -ccbin {folder}/c++ " in call for call in by_nvcc)
    assert all(("-m64" in command) == (" -Xcompiler -m64 " in call) for call in by_nvcc)


@in_sources
@needs_tools
@pytest.mark.parametrize("strict", ["", "1"])
def test_warnings_are_errors_only_where_that_is_asked_for(tmp_path: Path, strict: str) -> None:
    returned, _ = _build(
        tmp_path, "1", "1", NOTES, NOTES, CMAB_KERNELS_WERROR=strict, CXXFLAGS="-Wshadow\n'-DNAME=a $b'"
    )
    compiled = [call for call in (tmp_path / "bin" / "calls").read_text().splitlines() if " -c " in call]
    assert returned == 0 and all(("-Werror" in call) == (strict == "1") for call in compiled)
    assert all(" -Wshadow -DNAME=a $b " in call for call in compiled if call.startswith("c++ "))


@in_sources
@needs_tools
def test_the_number_of_compilers_at_once_can_be_limited(tmp_path: Path) -> None:
    alone = WORKS.replace("\n", '\nmkdir "$0.busy" || exit 1\n', 1) + 'rmdir "$0.busy"\n'
    assert _build(tmp_path / "one", "1", "0", alone, None, MAX_JOBS="1")[0] == 0
    returned, report = _build(tmp_path / "none", "auto", "0", WORKS, None, MAX_JOBS="0")
    assert returned == 0 and report["reason"] == "MAX_JOBS is '0': a number of at least 1 is needed"


@in_sources
@needs_tools
def test_a_command_that_is_none_is_a_reason(tmp_path: Path) -> None:
    returned, report = _build(tmp_path, "auto", "0", WORKS, None, CXX="no_such_compiler -m64")
    assert returned == 0 and "no_such_compiler" in report["reason"]


@in_sources
@needs_tools
@pytest.mark.parametrize(
    "version, packages, used",
    [(3, ["pybind11", "torch"], "pybind11"), (3, ["torch"], "torch"), (2, ["pybind11"], None)],
)
def test_headers_are_those_of_pybind11_or_of_torch(
    tmp_path: Path, version: int, packages: list[str], used: str | None
) -> None:
    """If pybind11 is not installed, torch may contain a copy of it. Version 2 of pybind11 lacks functions that the
    bindings need."""
    for package in ("pybind11", "torch"):
        headers = tmp_path / "packages" / package / "include" / "pybind11"
        headers.mkdir(parents=True)
        (headers.parents[1] / "__init__.py").touch()
        if package in packages:
            (headers / ("critical_section.h" if version == 3 else "gil.h")).touch()
    returned, report = _build(tmp_path, "auto", "0", NOTES, None, PYTHONPATH=str(tmp_path / "packages"))
    assert returned == 0 and report["built"] == (used is not None)
    assert used or "no headers of pybind11 3.0 or newer" in report["reason"]
    calls = (tmp_path / "bin" / "calls").read_text().splitlines() if used else []
    assert all(f"-isystem {tmp_path / 'packages' / used / 'include'} " in call for call in calls if " -c " in call)


@in_sources
@needs_tools
def test_a_second_build_compiles_nothing_anew(tmp_path: Path) -> None:
    """pip builds in temporary folders. A replaced compiler compiles everything again."""
    assert _build(tmp_path, "1", "0", NOTES, None)[0] == 0
    compiler, calls = tmp_path / "bin" / "c++", tmp_path / "bin" / "calls"
    compiled = calls.read_text().count(" -c ")
    environment = {**os.environ, "CXX": str(compiler), "CMAB_KERNELS_CUDA": "0"}
    again = [
        sys.executable,
        "setup.py",
        "build_ext",
        "--build-temp",
        str(tmp_path / "temp"),
        "--build-lib",
        str(tmp_path / "lib"),
    ]
    subprocess.run(again, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert compiled > 20 and calls.read_text().count(" -c ") == compiled
    assert list((tmp_path / "lib").rglob("_C*.so"))
    compiler.write_text(NOTES.replace("echo a compiler", "echo its next version"))
    subprocess.run(again, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert calls.read_text().count(" -c ") == 2 * compiled


@in_sources
@needs_tools
@pytest.mark.parametrize("platform, on_x86", [("linux-aarch64", False), ("linux-x86_64", True)])
def test_kernels_are_those_of_the_platform_that_is_built_for(tmp_path: Path, platform: str, on_x86: bool) -> None:
    """Python's build tools name it in this variable when a wheel is cross-compiled."""
    _, report = _build(tmp_path, "1", "0", WORKS, None, _PYTHON_HOST_PLATFORM=platform)
    assert report["targets"] == (["cpu", "amx", "avx2", "avx512", "avx512bf16"] if on_x86 else ["cpu"])


def test_the_report_goes_with_the_package() -> None:
    assert (Path(cmab_kernels.__file__).parent / "_build.json").exists() and {"built", "reason", "cuda"} <= set(
        build_report()
    )
