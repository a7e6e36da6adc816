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


def provenance() -> dict[str, Any]:
    """Return where and with what a result was computed: versions, the commit if this is a checkout, the time."""
    folder = Path(__file__).parent
    commit = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cmab_kernels": cmab_kernels.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "commit": commit or None,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line to the file, a new one also where the last was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            file.write(b"" if file.read() == b"\n" else b"\n")
        file.write(json.dumps(record).encode() + b"\n")


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of the file, of which there may be none; a line that was cut off when its process ended is passed over."""
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)
