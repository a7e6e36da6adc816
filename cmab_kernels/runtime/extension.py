"""Loads the two native extensions, `_C` for the CPU and `_cuda` for NVIDIA GPUs, and reads what setup.py reported about
building them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any


def build_report() -> dict[str, Any]:
    """Return the build report of `_C`: `built`, `reason` (why it was not built), `compiler`, `targets` (instruction
    sets).

    The report of `_cuda` is under "cuda". Its `kernels` are the registers and spills that the compiler reported for
    each GPU kernel.
    """
    path = Path(__file__).parents[1] / "_build.json"
    nothing = {"built": False, "reason": "the package was not built by its setup.py"}
    return {"cuda": nothing, **(json.loads(path.read_text()) if path.exists() else nothing)}


def load() -> ModuleType:
    """Return `cmab_kernels._C`; raise `ImportError` with the reason if it was not built. torch is imported first, so
    that both share one OpenMP."""
    try:
        return importlib.import_module("cmab_kernels._C")
    except ImportError as error:
        raise ImportError(f"the native extension is not there ({build_report()['reason'] or error})") from error


def load_cuda() -> ModuleType:
    """Return `cmab_kernels._cuda`; raise `ImportError` with the reason if it was not built. Importing it needs no GPU
    and no driver."""
    report = build_report()["cuda"]
    try:
        if not report["built"]:  # an extension of an earlier build may still be there
            raise ImportError(report["reason"])
        return importlib.import_module("cmab_kernels._cuda")
    except ImportError as error:
        raise ImportError(f"the CUDA kernels are not there ({error})") from error
