"""Runs several training processes at the same time, each with one thread, so that CPU seconds can be compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..training import BadCheckpoint, Run, records
from ..training.checkpoint import check_same, differences, load
from ..training.loop import HOW


def finished(run: Run) -> dict[str, Any] | None:
    """Return the record of this run if it finished with exactly these settings and this code."""
    recorded, defaults = json.loads(json.dumps([run.recorded(), run.defaults()]))
    for record in reversed(list(records(run.folder / "results.jsonl"))):
        if "cpu_seconds" in record and not any(differences(defaults | recorded, record, defaults)):
            return record
    return None


def command(run: Run) -> list[str]:
    """Return the command that trains and evaluates this run."""
    told = [sys.executable, "-m", "cmab_models", "train", run.system, "--task", run.task.name, "--seed", str(run.seed)]
    told += ["--device", run.device]
    told += ["--folder", str(run.folder)]
    told += [text for name in HOW for text in (f"--{name}", str(getattr(run, name)))]
    known = {"system", "task", "seed", *HOW}
    for name, value in run.described().items():
        if name not in known:
            told += ["--set", f"{name}={json.dumps(value)}"]
    return told + (["--resume"] if run.checkpoint.exists() else [])


def run_all(runs: Sequence[Run], workers: int, report: Callable[[Run, int], None]) -> list[Run]:
    """Finish all runs, `workers` at a time; return those that failed. Runs that are already finished do not run again.

    `report(run, exit_code)` is called when a run ends. The output of a run is kept in `log.txt` in its folder. On
    Ctrl-C the processes write their checkpoints, and the next call continues from them. A run whose settings or code
    have changed starts from the beginning.
    """
    waiting = [run for run in runs if finished(run) is None]
    running: dict[subprocess.Popen[bytes], Run] = {}
    failed = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                run = waiting.pop(0)
                running[_started(run)] = run
            time.sleep(0.2)
            for process in [each for each in running if each.poll() is not None]:
                run = running.pop(process)
                if process.returncode:
                    failed.append(run)
                report(run, process.returncode)
    finally:
        for process in running:
            process.wait()
    return failed


def _started(run: Run) -> subprocess.Popen[bytes]:
    run.folder.mkdir(parents=True, exist_ok=True)
    try:
        defaults = run.defaults()
        check_same(run.checkpoint, load(run.checkpoint), defaults | run.recorded(), defaults)
    except BadCheckpoint:
        run.checkpoint.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (run.folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command(run), stdout=log, stderr=subprocess.STDOUT, env=environment)
