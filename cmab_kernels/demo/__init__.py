"""`python -m cmab_kernels demo [cmab | intention | stream]`: what each of them does, measured and drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
}
"""Of the pictures."""


def require(*packages: str) -> None:
    """`SystemExit` with one line that names the packages that are missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise SystemExit(f"the demo needs {', '.join(missing)}: pip install cmab-kernels[demo]")


def checked_output(output: str) -> Path:
    """Where to draw; `SystemExit` with one line where nothing can be drawn."""
    target = Path(output)
    if target.suffix not in (".png", ".pdf", ".svg"):
        raise SystemExit(f"--output is {output}: a name that ends in .png, .pdf or .svg is needed")
    if not target.parent.is_dir():
        raise SystemExit(f"--output is {output}: there is no folder {target.parent}")
    return target


def where(device: str, impl: str) -> str:
    """Machine, torch and implementation, in words."""
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    return f"{machine}, float32, torch {torch.__version__}, cmab_kernels' {impl} implementation"
