"""Check, time and tune the kernels on the GPU of this machine: `python bench/gpu_check.py`.

It runs the package's own tests on the GPU, times the operators and compares them with their floors and peers, runs the
tests under sanitizers, and finds the fastest block sizes. These block sizes are written to
`cmab_kernels/runtime/tiles.json`, with a copy beside the results, and are then tested. A call takes 8 minutes at most.
Its results are in `bench/results/gpu_check_<gpu>_<date>.json`, and compiled kernels are in `compiled` beside it. The
same command continues where it stopped: results that are complete and right are not measured again unless --sections
names them. A table comes last. Exit codes: 0 everything is right, 1 something is wrong or not done, 2 the check cannot
run: there is no GPU, or the sources are not committed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  after the path, so that a checkout runs without installing

from bench.gpu.extension import adopt_installed  # noqa: E402  after the path too
from bench.gpu.printed import table  # noqa: E402  after the path too
from bench.gpu.results import Report, opened  # noqa: E402  after the path too
from bench.gpu.sanitizer import LIMIT  # noqa: E402  after the path too
from bench.gpu.sections import Outcome, Section, run  # noqa: E402  after the path too
from bench.provenance import clean_commit, gpu, gpu_state  # noqa: E402  after the path too
from cmab_kernels.runtime import tiles  # noqa: E402  after the path too

BUDGET = 480.0
"""Seconds of a call."""
TO_FINISH = 10.0
"""Seconds of the budget that are reserved to stop workers, to write and to print."""
WORTH_BEGINNING = 30.0
"""A section does not begin if fewer seconds are left, because workers take some seconds to start."""

COMPILERS = max(8, (os.cpu_count() or 8) - 2)
"""Workers if nothing is timed and the CPU compiles most of the time: one per core, except for the watchers."""

SECTIONS = {
    "suite": Section("bench.gpu.suite:tasks", counted=90, workers=COMPILERS),
    "timings": Section("bench.gpu.timings:tasks", judged=False),
    "ridge_timings": Section("bench.gpu.timings:intention_tasks", judged=False),
    "nystrom_timings": Section("bench.gpu.timings:nystrom_tasks", judged=False),
    "continual_timings": Section("bench.gpu.timings:continual_tasks", judged=False),
    "layer_timings": Section("bench.gpu.timings:layer_tasks", judged=False),
    "profiles": Section("bench.gpu.profiles:tasks", counted=40, judged=False),
    "sanitizer": Section("bench.gpu.sanitizer:tasks", counted=LIMIT, workers=9),
    "candidates": Section("bench.gpu.tune:candidate_tasks", counted=60, workers=COMPILERS),
    "tune": Section("bench.gpu.tune:tasks", after="candidates"),
    "tuned_suite": Section("bench.gpu.suite:tuned_tasks", counted=90, workers=COMPILERS, after="tune"),
    "tuned_timings": Section("bench.gpu.timings:tuned_tasks", judged=False, after="tune"),
    "compiled_timings": Section("bench.gpu.timings:compiled_tasks", counted=40, judged=False),
}
"""The sections in the best order if time on a GPU is scarce: correctness first, then speed, and last the sections that
may crash or take long."""
PARTS = {
    "1": ["suite"],
    "2": ["timings", "ridge_timings", "nystrom_timings", "continual_timings", "layer_timings", "compiled_timings"],
    "3": ["candidates", "profiles"],
    "4": ["candidates", "tune", "tuned_suite", "tuned_timings", "sanitizer"],
}
"""The parts of `bench/gpu_session.sh`."""


def main(arguments: list[str] | None = None) -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sections", help=f"run these, even if they are complete: {', '.join(SECTIONS)}, separated by commas"
    )
    parser.add_argument("--part", choices=PARTS, help="run only the sections of this part of bench/gpu_session.sh")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results", help="folder of the JSON file")
    parser.add_argument(
        "--commit", default="", help="in a copy without git: what `python -m bench.provenance` prints in the checkout"
    )
    parser.add_argument(
        "--compiled", type=Path, help="kernels that `python -m bench.gpu.ahead` compiled for such a GPU"
    )
    parser.add_argument("--force", action="store_true", help="start again, and replace the existing file")
    options = parser.parse_args(arguments)
    named = list(dict.fromkeys(options.sections.split(","))) if options.sections else []
    if unknown := [name for name in named if name not in SECTIONS]:
        return _refuse(f"unknown sections: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        return _refuse("there is no GPU that torch can use")
    try:
        machine = gpu(clean_commit(options.commit))
        options.output.mkdir(parents=True, exist_ok=True)
        adopt_installed(ROOT)
        report = opened(options.output, machine, options.force)
        compiled = options.output.resolve() / "compiled"
        if options.compiled:
            from bench.gpu.cached import unpack  # Triton

            unpack(options.compiled, compiled / "triton")
        report.save()
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    os.environ["TRITON_CACHE_DIR"] = str(compiled / "triton")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled / "inductor")
    tuned = report.path.with_name(f"{report.path.stem}_tiles.json")
    if tuned.exists() and report.rows("tune"):
        shutil.copyfile(tuned, tiles.FILE)
    chosen = named or PARTS.get(options.part, list(SECTIONS))
    left = run_all(report, chosen, bool(named), "cuda", started + BUDGET - TO_FINISH)
    if any(row.get("written") for row in report.rows("tune")):
        shutil.copyfile(tiles.FILE, tuned)
    print(table(report, SECTIONS))
    if left:
        print(f"not done yet: {', '.join(left)}; run the same command to continue")
    wrong = [name for name in chosen if not (name in report.outcomes and report.outcomes[name].right)]
    return 1 if left or wrong else 0


def _refuse(reason: str) -> int:
    print(f"gpu_check: {reason}", file=sys.stderr)
    return 2


def run_all(report: Report, names: list[str], again: bool, device: str, end: float) -> list[str]:
    """Run these sections, or only those of them that are not yet complete and right, unless `again`; return those that
    are not complete."""
    left = []
    for name in names:
        section, outcome = SECTIONS[name], report.outcomes.get(name, Outcome())
        if outcome.right and not again:
            continue
        seconds = end - time.monotonic()
        if seconds < WORTH_BEGINNING or (section.after and not report.complete(section.after)):
            left.append(name)
            continue
        if outcome.right:
            outcome = Outcome()
            for other in [other for other in report.outcomes if SECTIONS[other].after == name]:
                del report.outcomes[other]  # its rows depend on rows that are made again
        report.outcomes[name] = outcome
        before = {other: made.rows for other, made in report.outcomes.items()}
        run(section, device, outcome, before, seconds, report.save)
        outcome.state = gpu_state()
        report.save()
        print(
            f"{name}: {len(outcome.rows)} rows in {report.path}{f', {outcome.problem}' if outcome.problem else ''}",
            flush=True,
        )
        if not outcome.complete:
            left.append(name)
    return left


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers are stopped with it
    sys.exit(main())
