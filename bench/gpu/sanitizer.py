"""compute-sanitizer's four tools on small cases of every kernel, and on planted faults, without which their silence would say nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

from bench.provenance import ROOT

from .sections import Row, Task
from .small_cases import FAMILIES

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PLANTED = (("memcheck", "out_of_bounds"), ("initcheck", "uninitialised"))
LIMIT = 110.0
"""Seconds; a sanitizer makes a program ten times as slow, and more."""
FOUND = 77
"""Exit code where it has found something."""
REFUSAL = "Device not supported"


def program() -> str | None:
    """The path of compute-sanitizer."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [os.environ.get("PATH", ""), *(os.path.join(home, "bin") for home in (*homes, "/usr/local/cuda"))]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """The tasks: first the planted faults, which the tools must see."""
    sanitizer = program()
    if sanitizer is None:
        reason = "compute-sanitizer is neither on the PATH nor in CUDA_HOME/bin"
        return [Task("compute-sanitizer", lambda: {"ok": True, "passed over": reason})]
    planted = [Task(f"{tool} sees {fault}", lambda t=tool, f=fault: must_see(sanitizer, t, f)) for tool, fault in PLANTED]
    return planted + [
        Task(f"{tool}, {family}", lambda t=tool, f=family: is_silent(sanitizer, t, f)) for family in FAMILIES for tool in TOOLS
    ]


def must_see(sanitizer: str, tool: str, fault: str) -> Row:
    code, text = looked_at(sanitizer, tool, fault)
    if REFUSAL in text:
        return {"ok": True, "passed over": f"compute-sanitizer: {REFUSAL}"}
    return {"ok": code == FOUND, "verdict": verdict(text), "lines": first_lines(text)}


def is_silent(sanitizer: str, tool: str, family: str) -> Row:
    """Right with a verdict of no error, and with every case run."""
    code, text = looked_at(sanitizer, tool, family)
    if REFUSAL in text:
        return {"ok": True, "passed over": f"compute-sanitizer: {REFUSAL}"}
    found = verdict(text)
    row = {"ok": code == 0 and found != "no verdict", "verdict": found}
    return row if row["ok"] else row | {"exit code": code, "lines": first_lines(text)}


def looked_at(sanitizer: str, tool: str, family: str) -> tuple[int, str]:
    """Exit code and output. Allocations are not cached: else one tensor's end is another's beginning."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5", "--target-processes", "application-only"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(
            [*command, sys.executable, "-m", "bench.gpu.small_cases", family],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired as stopped:
        said = stopped.stdout or b""
        return -1, (said.decode(errors="replace") if isinstance(said, bytes) else said) + f"\nstopped after {LIMIT:.0f} s"
    return run.returncode, run.stdout


def verdict(text: str) -> str:
    """The tool's last summary line."""
    found = re.findall(r"^=+ *((?:ERROR|RACECHECK|LEAK) SUMMARY:.*)$", text, re.M)
    return found[-1].strip() if found else "no verdict"


def first_lines(text: str, most: int = 12) -> list[str]:
    """The first lines of what the tool found; where it found nothing, the last that the program said."""
    lines = [line.rstrip()[:200] for line in text.splitlines() if line.strip()]
    findings = [line for line in lines if line.startswith("=========") and "COMPUTE-SANITIZER" not in line]
    return findings[:most] if len(findings) > 1 else lines[-most:]
