"""What a run depends on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

import cmab_kernels
from cmab_kernels.info import build_report

PACKAGES = ("torch", "triton", "numpy", "pytest-benchmark")
CPU_FIELDS = ("brand_raw", "arch", "vendor_id_raw", "family", "model", "stepping", "hz_advertised_friendly", "l2_cache_size")


def provenance(cpu: dict[str, Any]) -> dict[str, Any]:
    """Processor (`cpu` is what py-cpuinfo says), versions, compiler, and the instruction sets that torch and the native extension take."""
    features = [flag for flag in cpu.get("flags", ()) if flag.startswith(("avx", "amx", "fma", "f16c", "sve", "asimd"))]
    return {
        "cpu": {name: cpu[name] for name in CPU_FIELDS if name in cpu} | {"features": features},
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
    if not build_report()["built"]:
        return None
    from cmab_kernels.attention import native

    return native.instruction_set()
