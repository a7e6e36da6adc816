"""`python -m cmab_kernels bench`: runs the benchmarks, or loads a saved run, and writes a report of HTML, JSON and PNG
files.

The benchmarks themselves are in the checkout's bench/, beside this package. A request is checked before any
measurement. Files get their final names only when they are complete.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from .runtime.checks import mismatch

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {"cpuinfo": "py-cpuinfo", "matplotlib": "matplotlib"}
"""Module to import -> name of the package to install."""


class Refusal(Exception):
    """The command cannot carry out the request. The message says what is wrong, why, and what to do."""


@dataclass(frozen=True)
class Request:
    """The options of the command line."""

    scans: Sequence[str] = ()
    quick: bool = False
    compare: Path | None = None
    saved: Path | None = None
    """The saved run named by `--from`. The report shows this run instead of a new measurement."""
    output: Path = Path("bench_report")
    device: str | None = None
    threads: int | None = None
    force: bool = False


def run(request: Request) -> int:
    """Measure or load a run, and write the report. Return the exit status, which is 1 if a result is wrong.

    A request that cannot be carried out raises a `Refusal`.
    """
    _check(request)
    runs, session, compare, page, table = (
        _module(name) for name in ("runs", "session", "report.compare", "report.page", "report.table")
    )
    try:
        old = runs.load(request.compare) if request.compare else None
        saved = runs.load(request.saved) if request.saved else None
    except runs.BadRun as bad:
        raise Refusal(str(bad)) from None
    with _unfinished(request) as folder:
        new = saved or session.measured(request.scans, request.quick, request.device or "cpu", request.threads)
        if not new.rows:
            raise Refusal("bench: nothing could be measured, and nothing was written")
        file = folder / "run.json"
        runs.save(new, file)
        if saved:
            print("\n".join(table.of_run(saved)))
        comparison = compare.compare(old, new) if old else None
        if comparison:
            print("", *compare.table(comparison), sep="\n")
        written = [file, *page.write(new, folder, comparison)]
        _publish(written, request.output)
    print(f"\n{request.output / 'report.html'}, with run.json and {len(written) - 2} PNGs beside it")
    return 1 if new.wrong else 0


def _module(name: str) -> ModuleType:
    """Import the module `bench.<name>` of the checkout."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"bench.{name}")


# ---- checks of the request -------------------------------------------------------------------------------------------


def _check(request: Request) -> None:
    if not (ROOT / "bench" / "session.py").exists():
        raise Refusal(
            "bench: the benchmarks are not part of an installed package, and there is no bench/ beside "
            f"{ROOT / 'cmab_kernels'}; "
            'in a checkout of the repository, pip install -e ".[bench]" and run this again'
        )
    if missing := [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]:
        raise Refusal(f'{", ".join(missing)}: not installed; pip install -e ".[bench]" in the checkout')
    measuring = {
        "a scan": request.scans,
        "--quick": request.quick,
        "--device": request.device,
        "--threads": request.threads is not None,
    }
    if request.saved and (given := [name for name, value in measuring.items() if value]):
        raise Refusal(
            mismatch(
                "--from", f"a saved run together with {given[0]}", "a saved run alone; nothing is measured with --from"
            )
        )
    known = sorted(_module("scans").scans())
    if unknown := [scan for scan in request.scans if scan not in known]:
        raise Refusal(mismatch("scan", unknown[0], f"one of {', '.join(known)}"))
    if request.threads is not None and request.threads < 1:
        raise Refusal(mismatch("--threads", request.threads, "an int >= 1"))
    if request.device == "cuda" and not torch.cuda.is_available():
        raise Refusal(mismatch("--device", "cuda", "cpu, as torch finds no GPU"))
    output = request.output
    if output.exists() and not output.is_dir():
        raise Refusal(mismatch("--output", f"{output}, a file", "a folder; give another name"))
    if output.is_dir() and any(output.iterdir()) and not request.force:
        raise Refusal(
            mismatch(
                "--output",
                f"{output}, which has files in it",
                "an empty folder, or --force to replace files of the same names",
            )
        )


# ---- files -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _unfinished(request: Request) -> Iterator[Path]:
    """Yield a temporary folder for unfinished files, and always remove it at the end.

    It is inside the output folder, so that a rename is enough to publish a file.
    """
    try:
        request.output.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".unfinished-", dir=request.output)
    except OSError as error:
        raise Refusal(
            mismatch("--output", f"{request.output}, which cannot be written ({error.strerror})", "another folder")
        ) from None
    try:
        with folder as name:
            yield Path(name).absolute()
    finally:
        if not any(request.output.iterdir()):
            request.output.rmdir()


def _publish(files: Sequence[Path], output: Path) -> None:
    for file in files:
        os.replace(file, output / file.name)
