"""The circumstances of a record of figures, and its form in bench/results."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import cmab_kernels
from cmab_kernels.runtime.extension import load

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


def provenance() -> dict[str, Any]:
    """Return the machine, the versions, the commit and the day."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "processor": next(iter(names), platform.processor()),
        "instruction_set": load().instruction_set(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cmab_kernels": cmab_kernels.__version__,
        },
        "commit": commit or "unknown",
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def write(name: str, figures: dict[str, Any]) -> Path:
    """Write the figures and their circumstances as bench/results/NAME.json, and return that path."""
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(provenance() | figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read(name: str) -> dict[str, Any]:
    """Return the record bench/results/NAME.json."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found
