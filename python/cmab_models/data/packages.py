"""Packages that contain data. Each is imported when its data is needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def imported(module: str, package: str) -> Any:
    """Return the module, or raise an `ImportError` that says what to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f'{package}: the package is not installed; pip install {package}, or pip install "cmab-kernels[models]"'
        ) from error
