"""What a run depends on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict
from typing import Any

import torch

import cmab_kernels
from cmab_kernels.extension import build_report, load

from .harness import threads
from .rates import rates_of

PEERS = ("nystrom-attention", "continual-inference", "flash-attn", "flash-linear-attention")
PACKAGES = ("torch", "triton", "numpy", "pytest-benchmark", *PEERS)
CPU_FIELDS = ("brand_raw", "arch", "vendor_id_raw", "family", "model", "stepping", "hz_advertised_friendly", "l2_cache_size")


def processor(cpu: dict[str, Any]) -> dict[str, Any]:
    """What matters of what py-cpuinfo says."""
    features = [flag for flag in cpu.get("flags", ()) if flag.startswith(("avx", "amx", "fma", "f16c", "sve", "asimd"))]
    return {name: cpu[name] for name in CPU_FIELDS if name in cpu} | {"features": features}


def software() -> dict[str, Any]:
    """Versions, compiler, cores, and the instruction sets that torch and the native extension take; the GPU where there is one."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "versions": {"python": platform.python_version(), "cmab_kernels": cmab_kernels.__version__}
        | {name: _version(name) for name in PACKAGES},
        "native_build": {name: value for name, value in build_report().items() if name != "cuda"},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "native_instruction_set": _native_instruction_set(),
        "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _native_instruction_set() -> str | None:
    try:
        return load().instruction_set()
    except ImportError:
        return None


def of_row(row: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """What one row of a run must say to be read alone."""
    machine, stats = run["machine_info"], row["stats"]
    return {
        "device": machine["gpu"] if run["device"] == "cuda" else machine["cpu"].get("brand_raw", machine["cpu"].get("arch")),
        "cores": machine["cores"],
        "versions": machine["versions"],
        "commit": run["commit_info"].get("id"),
        "dirty": run["commit_info"].get("dirty"),
        "date": run["datetime"],
        "rounds": stats["rounds"],
        "spread": stats["iqr"] / stats["median"],
    }


def rates(device: str, thread_counts: set[int]) -> dict[str, Any]:
    """What the floors were computed with: of the GPU, or by number of threads."""
    if device == "cuda":
        return {device: asdict(rates_of(device))}
    measured = {}
    for count in sorted(thread_counts):
        with threads(count):
            measured[str(count)] = asdict(rates_of(device))
    return measured
