"""The compiled extensions to check: those built in the checkout, or else those of the installed package."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

CUDA = "_cuda*.so"


def adopt_installed(checkout: Path, places: Iterable[str] | None = None) -> None:
    """Copy the extensions of an installed package (found in `places`, by default Python's path) into a checkout that
    has no `_cuda`.

    Raises a `ValueError` if the installed package has other sources than the checkout.
    """
    package = checkout / "cmab_kernels"
    if any(package.glob(CUDA)):
        return
    installed = (Path(place) / "cmab_kernels" for place in (sys.path if places is None else places))
    for there in installed:
        if there.resolve() == package.resolve() or not any(there.glob(CUDA)):
            continue
        if _sources(there) != _sources(package):
            raise ValueError(f"the package installed in {there} has other sources than {checkout}: install it again")
        for path in (*there.glob("_*.so"), there / "_build.json"):
            shutil.copy2(path, package)
        return


def _sources(package: Path) -> dict[str, bytes]:
    return {str(path.relative_to(package)): path.read_bytes() for path in package.rglob("*.py")}
