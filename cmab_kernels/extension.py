"""The native extensions, if they were built, and what setup.py noted of their build."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any


def build_report() -> dict[str, Any]:
    """`built`, `reason` (why not), `compiler`, `targets` (instruction sets); under "cuda" the same of the GPU kernels, and `kernels`."""
    path = Path(__file__).with_name("_build.json")
    nothing = {"built": False, "reason": "the package was not built by its setup.py"}
    return {"cuda": nothing, **(json.loads(path.read_text()) if path.exists() else nothing)}


def load() -> ModuleType:
    """`cmab_kernels._C`; `ImportError` with the reason if there is none. Torch is imported before it: both use one OpenMP."""
    try:
        return importlib.import_module("cmab_kernels._C")
    except ImportError as error:
        raise ImportError(f"the native extension is not there ({build_report()['reason'] or error})") from error


def load_cuda() -> ModuleType:
    """`cmab_kernels._cuda`, which needs no GPU or driver to be imported; `ImportError` with the reason if there is none."""
    report = build_report()["cuda"]
    try:
        if not report["built"]:  # there may be one of an earlier build
            raise ImportError(report["reason"])
        return importlib.import_module("cmab_kernels._cuda")
    except ImportError as error:
        raise ImportError(f"the CUDA kernels are not there ({error})") from error
