"""The circumstances of a run: processor, versions, commit and sources, and the state of the GPU.

`python -m bench.provenance` prints the commit and the sources of a clean checkout, for the GPU check in a copy without
git.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import io
import os
import platform
import re
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import cmab_kernels
from cmab_kernels.runtime.extension import build_report, load

from .devices import threads
from .rates import rates_of

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("nystrom-attention", "continual-inference", "flash-attn", "flashinfer-python", "flash-linear-attention")
PACKAGES = ("torch", "triton", "numpy", *PEERS)
CPU_FIELDS = ("arch", "vendor_id_raw", "family", "model", "stepping", "hz_advertised_friendly", "l2_cache_size")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


# ---- software --------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    """Python, this package, and the packages that are used or compared; None for packages that are not installed."""
    own = {"python": platform.python_version(), "cmab_kernels": cmab_kernels.__version__}
    return (
        own | {name: _version(name) for name in PACKAGES} | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of this checkout; "unknown" if there is none."""
    return output("git", "-C", str(ROOT), "rev-parse", "HEAD")


def dirty() -> bool:
    """Whether the checkout has uncommitted changes, except results, which a run writes before the next begins."""
    return (
        output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
        != "unknown"
    )


COMPILED = ROOT / "bench" / "results" / "compiled"
"""The files that torch and Triton compile in a run."""
FOLDERS = ("bench", "cmab_kernels", "csrc", "tests")
SOURCE = re.compile(r"csrc/.+|.+\.py")
"""The sources that are measured, that measure, or that test; tiles.json is not included, because tuning writes it."""
_FOR_CUDA = r"csrc/(.+\.cuh?|common/(dtype|host_device|stream)\.h|continual/schedule\.h|solve/info\.h)"
_IN_PYTHON = r"cmab_kernels/(.+/triton/.+|.+/cuda|runtime/(triton_.+|cuda_launch))\.py"
KERNEL = re.compile(f"{_FOR_CUDA}|{_IN_PYTHON}")
"""The sources of the kernels for a GPU, what they include, and their launches."""

Sources = Mapping[str, bytes]
"""Path in the checkout -> its contents."""


def sources() -> dict[str, bytes]:
    """The sources of the checkout, committed or not."""
    paths = (
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and COMPILED not in path.parents
    )
    return {name: path.read_bytes() for path in paths if SOURCE.fullmatch(name := path.relative_to(ROOT).as_posix())}


def sources_of(commit: str) -> dict[str, bytes]:
    """The sources of a commit. Raises a `ValueError` if git does not know it."""
    try:
        command = ["git", "-C", str(ROOT), "archive", commit, *FOLDERS]
        packed = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        raise ValueError(f"git does not know commit {commit} here") from None
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        found = ((member.name, files.extractfile(member)) for member in files if SOURCE.fullmatch(member.name))
        return {name: file.read() for name, file in found if file}


def digest(files: Sources) -> str:
    """A hash of all of these files."""
    found = hashlib.sha256()
    for name in sorted(files):
        found.update(f"{name}\0".encode() + files[name])
    return found.hexdigest()[:12]


_IMPORTS = re.compile(rb"^(?:from \S+ )?import (?:\([^)]*\)|.*)\n", re.MULTILINE)
_STRING = rb'"(?:\\.|[^"\\\n])*"'
_PROSE_IN_PYTHON = re.compile(rb'^ *"""(?:.|\n)*?"""$|(' + _STRING + rb")|#.*", re.MULTILINE)
_PROSE_IN_CPP = re.compile(rb"(" + _STRING + rb")|//.*|/\*(?:.|\n)*?\*/")
"""Matches docstrings and comments. It also matches strings, as a group, because a string may look like a comment."""


def kernel_digests(files: Sources) -> dict[str, str]:
    """Path -> a hash of each kernel source, without its path and without imports, docstrings, comments and line breaks.

    A file that was only moved, or in which only comments have changed, has the same hash.
    """
    return {name: digest({"": _code(name, files[name])}) for name in sorted(files) if KERNEL.fullmatch(name)}


def _code(name: str, source: bytes) -> bytes:
    if not name.endswith(".py"):
        return b" ".join(_PROSE_IN_CPP.sub(rb"\1", source).split())
    return b" ".join(_PROSE_IN_PYTHON.sub(rb"\1", _IMPORTS.sub(b"", source)).split())


def clean_commit(told: str = "") -> str:
    """The commit whose sources are those of the checkout; `ValueError` if there is none.

    `told`: "COMMIT:SOURCES" as this module prints it in the checkout, for a copy in which git cannot determine the
        commit.
    """
    here, named = sources(), commit()
    if named == "unknown":
        named, _, expected = told.partition(":")
        if not expected:
            raise ValueError(
                "git finds no commit here: pass to --commit what `python -m bench.provenance` prints in the checkout"
            )
        if digest(here) != expected:
            raise ValueError(
                f"commit: the sources here are {digest(here)}, expected {expected}: they are not those of {named}"
            )
        return named
    there = sources_of(named)
    if changed := sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name)):
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ValueError(f"{', '.join(changed[:3])}{more}: different from commit {named[:10]}: commit or restore them")
    return named


def output(*command: str) -> str:
    """The output of a command; "unknown" if it is missing, fails or prints nothing."""
    try:
        return (
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip() or "unknown"
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"


# ---- the machine -----------------------------------------------------------------------------------------------------


def processor(device: str) -> str:
    """The name of the measured CPU or GPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpu = _cpu()
    return str(cpu.get("brand_raw", cpu.get("arch")))


def machine() -> dict[str, Any]:
    """Cores, system, the build of the native extension, and the instruction sets that it and torch use."""
    cpu = _cpu()
    features = [flag for flag in cpu.get("flags", ()) if flag.startswith(("avx", "amx", "fma", "f16c", "sve", "asimd"))]
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "native_build": {name: value for name, value in build_report().items() if name != "cuda"},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "native_instruction_set": _native_instruction_set(),
        "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
        "cpu": {name: cpu[name] for name in CPU_FIELDS if name in cpu} | {"features": features},
    }


def _cpu() -> dict[str, Any]:
    import cpuinfo  # takes half a second, so only on demand

    return dict(cpuinfo.get_cpu_info())


def _native_instruction_set() -> str | None:
    try:
        return load().instruction_set()
    except ImportError:
        return None


def rates(device: str, thread_counts: set[int]) -> dict[str, Any]:
    """The rates from which floors are computed, for the GPU or for each number of threads."""
    if device == "cuda":
        return {device: asdict(rates_of(device))}
    measured = {}
    for count in sorted(thread_counts):
        with threads(count):
            measured[str(count)] = asdict(rates_of(device))
    return measured


# ---- the GPU ---------------------------------------------------------------------------------------------------------

STATE = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
LIMITS = ("clocks.max.sm", "clocks.max.mem", "power.limit")
THROTTLING = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The same field by its newer and its older name."""


def gpu(commit: str) -> dict[str, Any]:
    """The circumstances of figures of the GPU check: the card, its driver and clocks,
    versions, and the measured sources."""
    card, files = torch.cuda.get_device_properties(0), sources()
    return {
        "gpu": card.name,
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "memory": card.total_memory,
        "l2": card.L2_cache_size,
        **ask("driver_version"),
        **ask(*LIMITS),
        "versions": versions(),
        "commit": commit,
        "sources": digest(files),
        "kernels": kernel_digests(files),
        "date": now(),
    }


def gpu_state() -> dict[str, str]:
    """Clocks, temperature, power, and the reasons for throttling now: a bit mask, 0 or idle if there is none."""
    throttling = next(
        (found for name in THROTTLING if "unknown" not in (found := ask(name)).values()), {THROTTLING[0]: "unknown"}
    )
    return {**ask(*STATE), "throttling": next(iter(throttling.values()))}


def ask(*fields: str) -> dict[str, str]:
    """nvidia-smi's fields of the first GPU; it fails as a whole if it does not know a field."""
    lines = output("nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader").splitlines()
    values = [part.strip() for part in lines[0].split(",")]
    return dict(zip(fields, values if len(values) == len(fields) else ["unknown"] * len(fields), strict=True))


if __name__ == "__main__":
    try:
        print(f"{clean_commit()}:{digest(sources())}")
    except ValueError as error:
        raise SystemExit(f"provenance: {error}") from None
