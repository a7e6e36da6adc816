"""What a run depends on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

import cmab_kernels
from cmab_kernels.extension import build_report, load

PACKAGES = ("torch", "triton", "numpy", "pytest-benchmark")
CPU_FIELDS = ("brand_raw", "arch", "vendor_id_raw", "family", "model", "stepping", "hz_advertised_friendly", "l2_cache_size")


def processor(cpu: dict[str, Any]) -> dict[str, Any]:
    """What matters of what py-cpuinfo says."""
    features = [flag for flag in cpu.get("flags", ()) if flag.startswith(("avx", "amx", "fma", "f16c", "sve", "asimd"))]
    return {name: cpu[name] for name in CPU_FIELDS if name in cpu} | {"features": features}


def software() -> dict[str, Any]:
    """Versions, compiler, cores, and the instruction sets that torch and the native extension take."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "versions": {"python": platform.python_version(), "cmab_kernels": cmab_kernels.__version__}
        | {name: _version(name) for name in PACKAGES},
        "native_build": build_report(),
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
