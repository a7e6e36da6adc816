"""Records of results, as lines of JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import cmab_kernels

RESULTS = ("cmab_models/RESULTS.", "cmab_models/pictures_of_results/")
"""The files that `make reproduce` itself writes into a checkout."""


def provenance() -> dict[str, Any]:
    """Return where and with what software a result was computed, and the time.

    For a checkout, this includes the commit, and whether its tree is `dirty` apart from results."""
    return {
        "cmab_kernels": cmab_kernels.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(
            _git(
                "status",
                "--porcelain",
                "--untracked-files=no",
                "--",
                ":/",
                *(f":(top,exclude)*{each}*" for each in RESULTS),
            )
        ),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _git(*arguments: str) -> str | None:
    """Return git's answer for the checkout to which this file belongs; None if there is no answer, or no checkout."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line to the file. If the last line was cut off, begin a new line first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            file.write(b"" if file.read() == b"\n" else b"\n")
        file.write(json.dumps(record).encode() + b"\n")


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of the file. The file may be missing. A line that was cut off when its process ended is
    skipped."""
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)
