"""The three demos. `python -m cmab_kernels demo [cmab | intention | stream]` runs one demo, prints its figures and
draws them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from ..runtime.checks import mismatch

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
}
"""Settings of matplotlib for all pictures of the demos."""


def require(*packages: str) -> None:
    """Check that the packages are installed; raise `SystemExit` with one line that names the missing packages."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise SystemExit(f"demo: it needs {', '.join(missing)}; pip install '.[demo]' in the checkout")


def checked_output(output: str) -> Path:
    """Return the path of the picture to draw.

    Raise `SystemExit` with one line if the file cannot be written or its suffix is not that of a picture.
    """
    target = Path(output)
    if target.suffix not in (".png", ".pdf", ".svg"):
        raise SystemExit(mismatch("--output", output, "a name that ends in .png, .pdf or .svg"))
    if not target.parent.is_dir():
        raise SystemExit(mismatch("--output", output, f"a name in a folder that exists; there is no {target.parent}"))
    try:
        _refuse_unwritable(target)
    except OSError as error:
        raise SystemExit(
            mismatch("--output", f"{output}, which cannot be written ({error.strerror})", "another name")
        ) from None
    return target


def _refuse_unwritable(target: Path) -> None:
    """Raise `OSError` if the file cannot be written.

    An existing picture does not change. If there was no file, the check leaves no file behind.
    """
    existed = target.exists()
    with target.open("ab"):  # a permission check is not enough: /proc, for example, accepts no files
        pass
    if not existed:
        target.resolve().unlink()  # resolve() keeps a link to a missing file


def where(device: str, impl: str) -> str:
    """Return one line of text: the machine, the dtype, the version of torch, and the implementation."""
    threads = torch.get_num_threads()
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{threads} CPU thread{'' if threads == 1 else 's'}"
    return f"{machine}, float32, torch {torch.__version__}, cmab_kernels' {impl} implementation"
