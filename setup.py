"""Builds cmab_kernels._C from csrc, and cmab_kernels._cuda on request, with ninja. The build needs no torch, no GPU and
no network.

Files named kernels.cpp and bf16_kernels.cpp are compiled once for each instruction set. CMAB_KERNELS_BUILD=auto
(default): an extension that fails to build is left out, and `_build.json` in the package says why; 1: a failed build is
an error; 0: no build. CMAB_KERNELS_CUDA says the same
about _cuda: 0 (default): no build; auto: it is built if there is nvcc, in CUDA_HOME or on the PATH; 1: a missing nvcc
is also an error. CMAB_KERNELS_WERROR=1 makes warnings errors, for CI. With a compiler newer than this code, such errors
would leave users without kernels.
"""

import fcntl
import importlib.util
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
BORDER = ("common/arguments.cpp", "common/tensor_view.cpp", "continual/fields.cpp")
"""The sources that both extensions share: they read tensors and states passed from Python."""
OBJECTS = ROOT / "build" / f"objects.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
"""Where object files are kept from one build to the next: pip builds in temporary folders, and would compile everything
each time."""
WANTED = os.environ.get("CMAB_KERNELS_BUILD", "auto")
WANTED_CUDA = "auto" if WANTED == "0" else os.environ.get("CMAB_KERNELS_CUDA", "0")  # without _C its reason is given
_SHARED = runpy.run_path(str(ROOT / "cmab_kernels" / "runtime" / "constants.py"))
CONSTANTS = {name: value for name, value in _SHARED.items() if name.isupper()}
DEFINES = " ".join(f"-DCMAB_{name}={value}" for name, value in CONSTANTS.items())
STRICT = os.environ.get("CMAB_KERNELS_WERROR") == "1"
FLAGS = f"{DEFINES} -O3 -DNDEBUG -std=c++17 -fPIC -fopenmp -fvisibility=hidden -ffp-contract=fast -Wall -Wextra"
FLAGS += " -Werror" if STRICT else ""
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c"
BF16 = f"{AVX512} -mavx512bf16"
VECTORS = {
    "portable": "-DCMAB_VECTOR_BYTES=16",
    "avx2": "-DCMAB_VECTOR_BYTES=32 -mavx2 -mfma -mf16c",
    "avx512": f"-DCMAB_VECTOR_BYTES=64 {AVX512}",
}
"""The instruction sets for which each kernels.cpp is compiled, with their flags."""
ENGINES = {
    "avx512bf16": f"-DCMAB_ENGINE=DotEngine {BF16}",
    "amx": f"'-DCMAB_ENGINE=TileEngine<HardwareTiles>' {BF16} -mamx-tile -mamx-bf16",
    "amx_emulated": f"'-DCMAB_ENGINE=TileEngine<EmulatedTiles>' {BF16}",
}
"""The instruction sets for which bf16_kernels.cpp is compiled, with their flags."""
# The platform for which the build runs, which may differ from this one.
ON_X86 = sysconfig.get_platform().lower().endswith(("x86_64", "amd64"))
GPUS = {"sm_80": "80", "sm_90a": "90a", "sm_100": "100", "sm_120": "120"}
"""The GPU architectures for which machine code is compiled, with their compute capabilities. The code of sm_80 also
runs on 8.6 and 8.9, that of sm_100 also on 10.3, and that of sm_120 also on 12.1."""
PTX = "100"
"""The compute capability whose PTX is added, for GPUs without machine code: the driver compiles it there."""
NVCC_FLAGS = f"{DEFINES} -O3 -std=c++17 -Xptxas -v -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra"
NVCC_FLAGS += " -Xcompiler -Werror -Werror all-warnings" if STRICT else ""


def cpu_sources() -> list[tuple[Path, str]]:
    """Each source of _C with the instruction set for which it is compiled; "" if it is compiled once, for any CPU.

    Kernels, which take longest, come first, so that both of two processors have work until the end.
    """
    sources = []
    for source in sorted(
        [CSRC / "module.cpp", *CSRC.glob("*/*.cpp")], key=lambda source: ("kernels" not in source.stem, source)
    ):
        sets = {"kernels": VECTORS, "bf16_kernels": ENGINES, "cuda_binding": {}}.get(source.stem, {"": ""})
        sources += [(source, name) for name in sets if ON_X86 or name in ("", "portable")]
    return sources


def cuda_sources() -> list[tuple[Path, str]]:
    """Each source of _cuda, in the form of cpu_sources()."""
    sources = [
        CSRC / "cuda_module.cpp",
        *(CSRC / name for name in BORDER),
        *CSRC.glob("*/cuda_binding.cpp"),
        *CSRC.glob("*/*.cu"),
    ]
    return [(source, "") for source in sorted(sources)]


def flags(instruction_set: str) -> str:
    """The compiler flags for an instruction set; none for ""."""
    return f"-DCMAB_INSTRUCTION_SET={instruction_set} {(VECTORS | ENGINES)[instruction_set]}" if instruction_set else ""


def find_compiler() -> list[str]:
    """The words of the command. CXX may contain a launcher before the compiler and flags after it, or a path with
    spaces."""
    given = os.environ.get("CXX", "").strip()
    words = [given] if shutil.which(given) else shlex.split(given)
    found = words or [path for path in (shutil.which("g++"), shutil.which("clang++")) if path][:1]
    if not found:
        raise OSError("no C++ compiler: neither g++ nor clang++ is on the PATH, and CXX is not set")
    return found


def for_nvcc(compiler: list[str]) -> list[str]:
    """The options that pass a compiler and its flags to nvcc. nvcc does not support a launcher before it."""
    programs = list(itertools.takewhile(lambda word: not word.startswith("-"), compiler))
    return ["-ccbin", programs[-1], *(word for flag in compiler[len(programs) :] for word in ("-Xcompiler", flag))]


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which(os.path.join(home, "bin", "nvcc") if home else "nvcc")


def pybind11_headers() -> Path:
    """The folder of the headers of pybind11 3 or newer: those of its package, else the copy that a torch may
    contain."""
    for spec in map(importlib.util.find_spec, ("pybind11", "torch")):
        for folder in spec.submodule_search_locations or () if spec else ():
            if Path(folder, "include", "pybind11", "critical_section.h").exists():  # version 2 has none
                return Path(folder, "include")
    raise OSError("no headers of pybind11 3.0 or newer: `pip install pybind11` brings them")


def shell_words(*command: str | Path) -> str:
    """Words of a command, quoted for a shell in a ninja file."""
    return shlex.join(map(str, command)).replace("$", "$$")


def ninja_path(path: Path) -> str:
    """A path in the form of a ninja file: relative to ROOT, whose own name may then contain any character."""
    return re.sub(r"[$ :]", r"$\g<0>", os.path.relpath(path, ROOT))


def ninja_file(cpu: Path, cuda: Path, folder: Path, compiler: list[str], nvcc: str | None) -> str:
    """The text of build.ninja, which makes the extensions `cpu` and, given nvcc, `cuda`, with objects in `folder`.
    ninja runs in ROOT.

    Each object also depends on a file with the version of its compiler, so that another compiler in the same place
    compiles everything again.
    """
    includes = shell_words("-Icsrc", f"-I{sysconfig.get_path('include')}", "-isystem", pybind11_headers())
    extra = os.environ.get("CXXFLAGS", "").replace("$", "$$").replace("\n", " ")
    codes = " ".join(f"-gencode arch=compute_{number},code={name}" for name, number in GPUS.items())
    codes += f" -gencode arch=compute_{PTX},code=compute_{PTX}"

    def object_file(source: Path, instruction_set: str) -> Path:
        name = source.with_stem(f"{source.stem}_{instruction_set}") if instruction_set else source
        return folder / f"{name.relative_to(ROOT)}.o"

    def compiled(sources: list[tuple[Path, str]]) -> Iterator[str]:
        for source, name in sources:
            rule = "nvcc" if source.suffix == ".cu" else "cpp"
            made = f"build {ninja_path(object_file(source, name))}: {rule} {ninja_path(source)}"
            yield f"{made} | {ninja_path(folder / f'{rule}.version')}\n  flags = {flags(name)}"

    def linked(target: Path, rule: str, sources: list[tuple[Path, str]]) -> str:
        return f"build {ninja_path(target)}: {rule} {' '.join(ninja_path(object_file(*each)) for each in sources)}\n"

    lines = [
        f"builddir = {ninja_path(folder)}",
        "rule cpp\n  deps = gcc\n  depfile = $out.d",
        f"  command = {shell_words(*compiler)} -MMD -MF $out.d {FLAGS} {includes} $flags {extra} -c $in -o $out",
        f"rule link\n  command = {shell_words(*compiler)} -shared -fopenmp {extra} $in -o $out",
        *compiled(cpu_sources()),
        linked(cpu, "link", cpu_sources()),
    ]
    if nvcc:
        host = shell_words(nvcc, *for_nvcc(compiler))
        lines += [
            "rule nvcc\n  deps = gcc\n  depfile = $out.d",
            f"  command = {host} {NVCC_FLAGS} -Icsrc {codes} -MMD -MF $out.d -c $in -o $out > $out.log 2>&1 || (cat "
            "$out.log; false)",
            f"rule nvlink\n  command = {host} -shared -cudart static $in -o $out",
            *compiled([each for each in cuda_sources() if each not in cpu_sources()]),
            linked(cuda, "nvlink", cuda_sources()),
        ]
    return "\n".join(lines)


def kernels_in(log: str) -> list[dict]:
    """The report of ptxas on each kernel: its mangled name, target, registers per thread, and bytes of stack and
    spills."""
    entry = re.compile(
        r"Compiling entry function '(?P<kernel>\w+)' for '(?P<target>\w+)'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
        r"Used (?P<registers>\d+) registers",
        re.S,
    )
    return [
        {name: int(text) if text.isdigit() else text for name, text in found.groupdict().items()}
        for found in entry.finditer(log)
    ]


class NinjaBuild(build_ext):
    """Builds the extensions with ninja, and writes `_build.json`: what was built with which compiler and targets, or
    why not."""

    def run(self) -> None:
        super().run()
        folder = Path(self.get_ext_fullpath("cmab_kernels._C")).parent
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_build.json").write_text(json.dumps(self.report | {"cuda": self.cuda_report}, indent=1) + "\n")

    def build_extensions(self) -> None:
        """Build both extensions from one ninja file, the CPU's first, so that it does not depend on whether nvcc
        succeeds."""
        self.cpu, self.cuda = (Path(self.get_ext_fullpath(ext.name)).resolve() for ext in self.extensions)
        with alone_in(OBJECTS):
            self.report = attempt(self.build_cpu, "CMAB_KERNELS_BUILD", WANTED)
            self.cuda_report = attempt(self.build_cuda, "CMAB_KERNELS_CUDA", WANTED_CUDA)

    def build_cpu(self) -> dict:
        from ninja import BIN_DIR

        self.ninja = Path(BIN_DIR) / "ninja"
        compiler = find_compiler()
        nvcc = find_nvcc() if WANTED_CUDA != "0" else None
        keep(OBJECTS / "cpp.version", "\n".join(version(*compiler)))
        if nvcc:
            keep(OBJECTS / "nvcc.version", "\n".join(version(nvcc)))
        (OBJECTS / "build.ninja").write_text(ninja_file(self.cpu, self.cuda, OBJECTS, compiler, nvcc))
        self.make(self.cpu, shlex.join(compiler))
        targets = {name for _, name in cpu_sources()} - {"", "portable", "amx_emulated"}
        return {"compiler": version(*compiler)[0], "targets": ["cpu", *sorted(targets)]}

    def build_cuda(self) -> dict:
        nvcc = find_nvcc()
        if not self.report["built"]:
            raise OSError(self.report["reason"])
        if not nvcc:
            raise OSError("no nvcc: neither in CUDA_HOME nor on the PATH")
        self.make(self.cuda, nvcc)
        logs = [OBJECTS / f"{source.relative_to(ROOT)}.o.log" for source, _ in cuda_sources() if source.suffix == ".cu"]
        kernels = [kernel for log in sorted(logs) for kernel in kernels_in(log.read_text())]
        return {"compiler": version(nvcc)[-2:][0], "targets": list(GPUS), "kernels": kernels}

    def make(self, target: Path, compiler: str) -> None:
        command = [self.ninja, "-C", ROOT, "-f", OBJECTS / "build.ninja", *jobs(), os.path.relpath(target, ROOT)]
        build = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(build.stdout)
        if build.returncode:
            target.unlink(missing_ok=True)  # an earlier build would not match the sources
            reason = next(
                (line for line in build.stdout.splitlines() if "error:" in line or "not found" in line),
                "see the build's output",
            )
            raise OSError(f"{compiler} failed: {reason.strip()}")


def jobs() -> list[str]:
    """ninja's option for the number of compilers at once, which MAX_JOBS limits as in torch's builds."""
    most = os.environ.get("MAX_JOBS", "").strip()
    if most and not (most.isdecimal() and int(most)):
        raise OSError(f"MAX_JOBS is {most!r}: a number of at least 1 is needed")
    return ["-j", most] if most else []


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder, and wait until no other build of these sources uses it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def keep(path: Path, text: str) -> None:
    """Write a file only if its text has changed, because ninja builds everything again that depends on a written
    file."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def attempt(build: Callable[[], dict], variable: str, wanted: str) -> dict:
    """Run one build and report on it, in the form of `_build.json`. A failure raises an error only if `wanted`, the
    value of the variable, is 1."""
    report = {"built": False, "reason": "", "compiler": "", "targets": []}
    if wanted == "0":
        return report | {"reason": f"{variable}=0"}
    try:
        return report | {"built": True} | build()
    except (OSError, ImportError, subprocess.CalledProcessError) as error:
        if wanted == "1":
            raise
        return report | {"reason": str(error)}


def version(*compiler: str) -> list[str]:
    """The lines that `compiler --version` prints; one empty line if it prints nothing."""
    return subprocess.run([*compiler, "--version"], stdout=subprocess.PIPE, text=True).stdout.strip().splitlines() or [
        ""
    ]


# ---- the bill of materials


class BilledWheel(bdist_wheel):
    """A wheel with a software bill of materials, an SPDX document, in the folder that PEP 770 specifies."""

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        super().egg2dist(egginfo_path, distinfo_path)
        report = Path(self.bdist_dir or "", "cmab_kernels", "_build.json")
        cuda = json.loads(report.read_text())["cuda"] if report.exists() else {"built": False}
        bill = bill_of_materials(self.distribution, cuda["compiler"] if cuda["built"] else "")
        folder = Path(distinfo_path, "sboms")
        folder.mkdir(exist_ok=True)
        (folder / "cmab_kernels.spdx.json").write_text(json.dumps(bill, indent=1) + "\n")


def bill_of_materials(distribution: Distribution, nvcc: str) -> dict:
    """The package, its requirements from the index, and the CUDA runtime that `nvcc` (its version, or "") linked into
    it, in SPDX 2.3."""
    name, version = distribution.get_name(), distribution.get_version()
    needed = [re.match(r"[\w.-]+", requirement)[0] for requirement in distribution.install_requires]
    contained = [material("cudart", nvcc)] if nvcc else []
    own = material(name, version, f"pkg:pypi/{name}@{version}") | {"licenseDeclared": "Apache-2.0"}
    others = [material(each, "", f"pkg:pypi/{each}") for each in needed] + contained
    relations = [
        ("SPDXRef-DOCUMENT", "DESCRIBES", own),
        *((own["SPDXID"], "DEPENDS_ON", each) for each in others[: len(needed)]),
    ]
    relations += [(own["SPDXID"], "CONTAINS", each) for each in contained]
    unique = uuid.uuid5(uuid.NAMESPACE_DNS, repr(others))
    made = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{name}-{version}",
        "documentNamespace": f"https://spdx.org/spdxdocs/{name}-{version}-{unique}",
        "creationInfo": {"created": time.strftime("%Y-%m-%dT%H:%M:%SZ", made), "creators": [f"Tool: {name}-setup.py"]},
        "packages": [own, *others],
        "relationships": [
            {"spdxElementId": whose, "relationshipType": kind, "relatedSpdxElement": whom["SPDXID"]}
            for whose, kind, whom in relations
        ],
    }


def material(name: str, version: str, locator: str = "") -> dict:
    """A package of the bill, with its version and its package URL if they are known."""
    reference = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": locator}
    known = ({"versionInfo": version} if version else {}) | ({"externalRefs": [reference]} if locator else {})
    entry = {"SPDXID": f"SPDXRef-{name}", "name": name, "downloadLocation": "NOASSERTION", "filesAnalyzed": False}
    return (
        entry
        | {"licenseConcluded": "NOASSERTION", "licenseDeclared": "NOASSERTION", "copyrightText": "NOASSERTION"}
        | known
    )


def warn(report: dict) -> None:
    """Say on stderr, and on the terminal if pip does not show stderr, that the kernels are missing and why, unless this
    was requested."""
    if report["built"] or WANTED == "0":
        return
    text = f"""
cmab_kernels WAS BUILT WITHOUT ITS NATIVE KERNELS: {report["reason"]}
On a CPU it runs its PyTorch definitions, which are slow.
CMAB_KERNELS_BUILD=1 makes a failed build an error, with the compiler's output.
"""
    print(text, file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        with suppress(OSError), open("/dev/tty", "w") as terminal:
            print(text, file=terminal)


done = setup(
    ext_modules=[
        Extension("cmab_kernels._C", [], optional=WANTED != "1"),
        Extension("cmab_kernels._cuda", [], optional=True),
    ],
    cmdclass={"build_ext": NinjaBuild, "bdist_wheel": BilledWheel},
)
warn(getattr(done.get_command_obj("build_ext", create=False), "report", {"built": True}))  # the last lines of the build
