"""What a run depends on: processor, versions, commit and sources, and the state of the GPU."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import cmab_kernels
from cmab_kernels.extension import build_report, load

from .devices import threads
from .rates import rates_of

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("nystrom-attention", "continual-inference", "flash-attn", "flash-linear-attention")
PACKAGES = ("torch", "triton", "numpy", *PEERS)
CPU_FIELDS = ("arch", "vendor_id_raw", "family", "model", "stepping", "hz_advertised_friendly", "l2_cache_size")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


# ---- software --------------------------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    """Python, this package, and whatever it is measured with and beside; None for what is not installed."""
    own = {"python": platform.python_version(), "cmab_kernels": cmab_kernels.__version__}
    return own | {name: _version(name) for name in PACKAGES} | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of this checkout; "unknown" where there is none."""
    return output("git", "-C", str(ROOT), "rev-parse", "HEAD")


def dirty() -> bool:
    """True if the checkout has changes that are in no commit, other than results, which a run writes before the next begins."""
    return output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results") != "unknown"


COMPILED = ROOT / "bench" / "results" / "compiled"
"""What torch and Triton compile in a run."""
SOURCES = ("cmab_kernels/**/*.py", "csrc/**/*", "bench/**/*.py")


def digest() -> str:
    """A hash of everything that is measured or measures, whether it is committed or not; tiles.json, which tuning writes, is not in it."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file() and COMPILED not in path.parents}):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def output(*command: str) -> str:
    """What a command prints; "unknown" where it is missing, fails or prints nothing."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip() or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"


# ---- the machine -----------------------------------------------------------------------------------------------------------------------


def processor(device: str) -> str:
    """The name of the CPU or the GPU that is measured."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpu = _cpu()
    return str(cpu.get("brand_raw", cpu.get("arch")))


def machine() -> dict[str, Any]:
    """Cores, system, the build of the native extension, and the instruction sets that it and torch take."""
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
    import cpuinfo  # half a second, where it is wanted

    return dict(cpuinfo.get_cpu_info())


def _native_instruction_set() -> str | None:
    try:
        return load().instruction_set()
    except ImportError:
        return None


def rates(device: str, thread_counts: set[int]) -> dict[str, Any]:
    """What the floors were computed with: the rates of the GPU, or by number of threads."""
    if device == "cuda":
        return {device: asdict(rates_of(device))}
    measured = {}
    for count in sorted(thread_counts):
        with threads(count):
            measured[str(count)] = asdict(rates_of(device))
    return measured


# ---- the GPU ---------------------------------------------------------------------------------------------------------------------------

STATE = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
LIMITS = ("clocks.max.sm", "clocks.max.mem", "power.limit")
THROTTLING = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The same by its newer and its older name."""


def gpu() -> dict[str, Any]:
    """What figures of the GPU check depend on: the card, its driver and clocks, versions, and the sources that were measured."""
    card = torch.cuda.get_device_properties(0)
    return {
        "gpu": card.name,
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "memory": card.total_memory,
        "l2": card.L2_cache_size,
        **ask("driver_version"),
        **ask(*LIMITS),
        "versions": versions(),
        "commit": commit(),
        "sources": digest(),
        "date": now(),
    }


def gpu_state() -> dict[str, str]:
    """Clocks, temperature, power and what holds the clocks back, now: a bit mask, 0 or idle where nothing does."""
    throttling = next((found for name in THROTTLING if "unknown" not in (found := ask(name)).values()), {THROTTLING[0]: "unknown"})
    return {**ask(*STATE), "throttling": next(iter(throttling.values()))}


def ask(*fields: str) -> dict[str, str]:
    """What nvidia-smi says of the first GPU; it fails as a whole where it does not know a field."""
    lines = output("nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader").splitlines()
    values = [part.strip() for part in lines[0].split(",")]
    return dict(zip(fields, values if len(values) == len(fields) else ["unknown"] * len(fields), strict=True))
