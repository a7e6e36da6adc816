"""Triton's cache as a file that can be copied to another machine."""

from __future__ import annotations

import itertools
import json
import tarfile
from pathlib import Path

import triton
from triton.runtime import cache

KEPT = (".cubin", ".json")
"""The files to load; the files of the stages of compilation are ten times as large."""


def same_keys() -> None:
    """Let the cache find kernels that another Python compiled: keys contain Triton's version, not a hash of its
    files."""
    cache.triton_key = lambda: triton.__version__


def pack(folder: Path, file: Path) -> int:
    """Write the kernels of a cache to a file (.tar.xz); return the number of kernels."""
    groups = sorted(each for each in folder.iterdir() if any(each.glob("*.cubin")))
    with tarfile.open(file, "w:xz") as packed:
        for path in itertools.chain.from_iterable(sorted(group.iterdir()) for group in groups):
            if path.suffix in KEPT:
                packed.add(path, path.relative_to(folder))
    return len(groups)


def unpack(file: Path, folder: Path) -> None:
    """Put the kernels of a file into a cache folder. There, each group names its files by their whole path.

    Raises a `ValueError` for any other file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(file, "r:xz") as packed:
            packed.extractall(folder, filter="data")
    except tarfile.TarError as error:
        raise ValueError(
            f"{file}: got no kernels ({error}), expected what `python -m bench.gpu.ahead` writes"
        ) from None
    for group in folder.glob("*/__grp__*.json"):
        there = {path.name: str(path) for path in group.parent.iterdir() if path != group}
        group.write_text(json.dumps({"child_paths": there}))
