"""compute-sanitizer on tests of every family, and on a planted fault, which shows that the sanitizer does report
faults.

Its initcheck is not among the tools, because the tests fill all memory with NaN before a kernel sees it, and so find
reads of unwritten memory themselves.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bench.provenance import ROOT

from .sections import Row, Task

FAMILIES = ("attention", "intention", "nystrom")
"""Folders of tests."""
TOOLS = ("memcheck", "racecheck", "synccheck")
LIMIT = 100.0
"""Seconds to compile the kernels of a family, and the same again to run them: a sanitizer makes a program ten times
slower or more."""
FOUND = 77
"""Exit code of the sanitizer if it found something."""
REFUSAL = "Device not supported"
SOME = "test_suite and (arguments_are_not_changed or float32-normal-0)"
"""Tests that launch every kernel of a family, in one run of keys and in several."""
FAULT = [sys.executable, "-m", "bench.gpu.fault"]


def program() -> str | None:
    """The path of compute-sanitizer."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [os.environ.get("PATH", ""), *(os.path.join(home, "bin") for home in (*homes, "/usr/local/cuda"))]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def tasks(device: str, before: Mapping[str, list[Row]]) -> list[Task]:
    """The tasks: first the planted fault, which must be found."""
    sanitizer = program()
    if sanitizer is None:
        reason = "compute-sanitizer is neither on the PATH nor in CUDA_HOME/bin"
        return [Task("compute-sanitizer", lambda: {"ok": True, "passed over": reason})]
    planted = Task("memcheck sees a write beyond the end", lambda: must_see(sanitizer, "memcheck", FAULT))
    looks = [
        Task(f"{tool}, {family}", lambda t=tool, f=family: is_silent(sanitizer, t, tests_of(f)))
        for family in FAMILIES
        for tool in TOOLS
    ]
    return [planted, *looks]


def tests_of(family: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-x", "-p", "no:cacheprovider", "-k", SOME, f"tests/{family}"]


def must_see(sanitizer: str, tool: str, command: Sequence[str]) -> Row:
    code, text = looked_at(sanitizer, tool, command)
    if REFUSAL in text:
        return {"ok": True, "passed over": f"compute-sanitizer: {REFUSAL}"}
    return {"ok": code == FOUND, "verdict": verdict(text), "lines": first_lines(text)}


def is_silent(sanitizer: str, tool: str, command: Sequence[str]) -> Row:
    """A row is right if the tool reports no error.

    The command first runs without the tool, so that nothing is compiled in the run under the tool.
    """
    code, text = _output(command)
    if code != 0:
        return {"ok": False, "problem": "it fails without a sanitizer", "lines": first_lines(text)}
    code, text = looked_at(sanitizer, tool, command)
    if REFUSAL in text:
        return {"ok": True, "passed over": f"compute-sanitizer: {REFUSAL}"}
    found = verdict(text)
    row = {"ok": code == 0 and found != "no verdict", "verdict": found}
    return row if row["ok"] else row | {"exit code": code, "lines": first_lines(text)}


def looked_at(sanitizer: str, tool: str, command: Sequence[str]) -> tuple[int, str]:
    """Exit code and output under a sanitizer.

    Errors that the driver returns are not reported: torch and Triton request features that older drivers lack, and
    continue without them.
    """
    options = f"--tool {tool} --error-exitcode {FOUND} --print-limit 5 --target-processes application-only".split()
    return _output([sanitizer, *options, *(["--report-api-errors", "no"] if tool == "memcheck" else []), *command])


def _output(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of a command. Allocations are not cached, because otherwise tensors would be adjacent in
    memory."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired as stopped:
        said = stopped.stdout or b""
        return -1, (
            said.decode(errors="replace") if isinstance(said, bytes) else said
        ) + f"\nstopped after {LIMIT:.0f} s"
    return run.returncode, run.stdout


def verdict(text: str) -> str:
    """The tool's last summary line."""
    found = re.findall(r"^=+ *((?:ERROR|RACECHECK|LEAK) SUMMARY:.*)$", text, re.M)
    return found[-1].strip() if found else "no verdict"


def first_lines(text: str, most: int = 12) -> list[str]:
    """The first lines of the tool's findings; if there are none, the last lines of the program."""
    lines = [line.rstrip()[:200] for line in text.splitlines() if line.strip()]
    findings = [line for line in lines if line.startswith("=========") and "COMPUTE-SANITIZER" not in line]
    return findings[:most] if len(findings) > 1 else lines[-most:]
