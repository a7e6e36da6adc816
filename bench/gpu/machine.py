"""What figures of a GPU depend on: the card, its driver and clocks, versions, and the sources that were measured."""

from __future__ import annotations

import datetime
import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("cmab_kernels/**/*.py", "csrc/**/*", "bench/gpu/*.py", "bench/gpu_check.py")
STATE = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
LIMITS = ("clocks.max.sm", "clocks.max.mem", "power.limit")
THROTTLING = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The same by its newer and its older name."""


def machine() -> dict[str, Any]:
    import triton

    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "memory": gpu.total_memory,
        "l2": gpu.L2_cache_size,
        **ask("driver_version"),
        **ask(*LIMITS),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        "commit": commit(),
        "sources": digest(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def state() -> dict[str, str]:
    """Clocks, temperature, power and what holds the clocks back, now: a bit mask, 0 or idle where nothing does."""
    throttling = next((found for name in THROTTLING if "unknown" not in (found := ask(name)).values()), {THROTTLING[0]: "unknown"})
    return {**ask(*STATE), "throttling": next(iter(throttling.values()))}


def ask(*fields: str) -> dict[str, str]:
    """What nvidia-smi says of the first GPU; it fails as a whole where it does not know a field."""
    lines = output("nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader").splitlines()
    values = [part.strip() for part in lines[0].split(",")]
    return dict(zip(fields, values if len(values) == len(fields) else ["unknown"] * len(fields), strict=True))


def commit() -> str:
    return output("git", "-C", str(ROOT), "rev-parse", "HEAD")


def digest() -> str:
    """Of everything that is measured or measures, whether it is committed or not; not of tiles.json, which tuning writes."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()}):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def output(*command: str) -> str:
    """What a command prints; "unknown" where it is missing or fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip() or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"
