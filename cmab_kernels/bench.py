"""`python -m cmab_kernels bench`: measures, or takes a run that was saved, and writes what came out as a page and pictures.

The benchmarks themselves are in the checkout's bench/, beside this package. Whatever can be wrong with what was asked for is found before
anything is measured, and files come under their names only when they are whole.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {"pytest": "pytest", "pytest_benchmark": "pytest-benchmark", "matplotlib": "matplotlib"}
"""Module -> package that it is in."""

RAN = (0, 1)
"""Exit codes of pytest after which there is a run: all rows right, or some wrong."""


PATIENCE = 10.0
"""Seconds that pytest has to end after an interruption."""


class Refusal(Exception):
    """What was asked for cannot be done: what, why, and what to do."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    scans: Sequence[str] = ()
    quick: bool = False
    compare: Path | None = None
    saved: Path | None = None
    """The file that `--from` names; with it nothing is measured."""
    output: Path = Path("bench_report")
    device: str | None = None
    threads: int | None = None
    force: bool = False

    def arguments(self, file: Path) -> list[str]:
        """The arguments for pytest, which writes the run to `file`."""
        chosen = [argument for scan in self.scans for argument in ("--scan", scan)]
        chosen += ["--quick"] if self.quick else []
        chosen += ["--device", self.device] if self.device else []
        chosen += ["--threads", str(self.threads)] if self.threads is not None else []
        return ["-m", "pytest", "bench", "--json", str(file), *chosen]


def run(request: Request) -> int:
    """The exit status: 1 if a row has no right result. Refusal before anything is measured."""
    _check(request)
    runs, compare, page, table = (_module(name) for name in ("runs", "report.compare", "report.page", "report.table"))
    try:
        old = runs.load(request.compare) if request.compare else None
        saved = runs.load(request.saved) if request.saved else None
    except runs.BadRun as bad:
        raise Refusal(str(bad)) from None
    with _unfinished(request) as folder:
        file = folder / "run.json"
        status = 0 if saved else _measure(request, file)
        new = saved or runs.load(file)
        if saved:
            shutil.copyfile(saved.path, file)
            print("\n".join(table.of_run(saved)))
        comparison = compare.compare(old, new) if old else None
        if comparison:
            print("", *compare.table(comparison), sep="\n")
        written = [file, *page.write(new, folder, comparison)]
        _publish(written, request.output)
    print(f"\n{request.output / 'report.html'}, with run.json and {len(written) - 2} PNGs beside it")
    return 1 if status or new.wrong else 0


def _module(name: str) -> ModuleType:
    """A module of the checkout's bench, whatever else is called so."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"bench.{name}")


# ---- what can be wrong -----------------------------------------------------------------------------------------------------------------


def _check(request: Request) -> None:
    if not (ROOT / "bench" / "plugin.py").exists():
        raise Refusal(
            f"the benchmarks are not part of an installed package, and there is no bench/ beside {ROOT / 'cmab_kernels'}: "
            'in a checkout of the repository, pip install -e ".[bench]" and run this again'
        )
    if missing := [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]:
        raise Refusal(f'not installed: {", ".join(missing)}; pip install -e ".[bench]" in the checkout')
    measuring = {
        "a scan": request.scans,
        "--quick": request.quick,
        "--device": request.device,
        "--threads": request.threads is not None,
    }
    if request.saved and (given := [name for name, value in measuring.items() if value]):
        raise Refusal(f"--from shows a run that was saved, and {given[0]} says how to measure: leave one of them out")
    known = sorted(_module("scans").scans())
    if unknown := [scan for scan in request.scans if scan not in known]:
        raise Refusal(f"there is no scan {unknown[0]}: choose among {', '.join(known)}")
    if request.threads is not None and request.threads < 1:
        raise Refusal(f"--threads {request.threads}: give a number from 1 on")
    if request.device == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device cuda: torch finds no GPU; leave it out to measure the CPU")
    output = request.output
    if output.exists() and not output.is_dir():
        raise Refusal(f"--output {output}: a file, and no folder; give another name")
    if output.is_dir() and any(output.iterdir()) and not request.force:
        raise Refusal(f"{output} has files in it: give another --output, or --force to replace those of the same names")


# ---- running ---------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _unfinished(request: Request) -> Iterator[Path]:
    """A folder for files that are not whole yet: on the disk where they will be, and gone at the end whatever happens."""
    try:
        request.output.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".unfinished-", dir=request.output)
    except OSError as error:
        raise Refusal(f"--output {request.output}: cannot be written ({error.strerror}); give another folder") from None
    try:
        with folder as name:
            yield Path(name).absolute()
    finally:
        if not any(request.output.iterdir()):
            request.output.rmdir()


def _measure(request: Request, file: Path) -> int:
    """pytest's exit code, after it has shown its progress and its table."""
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}  # progress is for now, wherever it goes
    with subprocess.Popen([sys.executable, *request.arguments(file)], cwd=ROOT, env=unbuffered) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # which pytest has had too
            _end(process)
            raise
    if status not in RAN or not file.exists():
        raise Refusal(f"the run broke off, or measured nothing (pytest ended with {status}); nothing was written")
    return status


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.terminate()


def _publish(files: Sequence[Path], output: Path) -> None:
    for file in files:
        os.replace(file, output / file.name)
