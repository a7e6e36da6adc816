"""The native extension, if it was built, and what setup.py noted of its build."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any


def build_report() -> dict[str, Any]:
    """`built`, `reason` (why not), `compiler`, `targets` (instruction sets)."""
    path = Path(__file__).with_name("_build.json")
    return json.loads(path.read_text()) if path.exists() else {"built": False, "reason": "the package was not built by its setup.py"}


def load() -> ModuleType:
    """`cmab_kernels._C`; `ImportError` with the reason if there is none. Torch is imported before it: both use one OpenMP."""
    try:
        return importlib.import_module("cmab_kernels._C")
    except ImportError as error:
        raise ImportError(f"the native extension is not there ({build_report()['reason'] or error})") from error
