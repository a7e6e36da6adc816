"""Check, time and tune the kernels on the GPU of this machine: `python bench/gpu_check.py`.

Of all families: parity with float64 oracles, equal bits, graphs, streams and launches, sanitizers; times beside their floors and peers; the
block sizes that are fastest, which go to `cmab_kernels/tiles.json`, with a copy beside the results. A call takes 8 minutes at most. What it
has found stands in `bench/results/gpu_check_<gpu>_<date>.json`, and the same command goes on where it stopped: what is complete and right
is not run again unless --sections names it. A table comes last.
Exit codes: 0 all is right, 1 something is wrong or not done, 2 it cannot run.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  after the path, so that a checkout runs without installing

from bench.gpu.printed import table  # noqa: E402  after the path too
from bench.gpu.results import Report, opened  # noqa: E402  after the path too
from bench.gpu.sections import Outcome, Section, run  # noqa: E402  after the path too
from bench.provenance import gpu, gpu_state  # noqa: E402  after the path too
from cmab_kernels import tiles  # noqa: E402  after the path too

BUDGET = 480.0
"""Seconds of a call."""
TO_FINISH = 10.0
"""Seconds of the budget that are kept to stop workers, to write and to print."""

SECTIONS = {
    "parity": Section("bench.gpu.parity:tasks", 120, workers=8),
    "ridge_parity": Section("bench.gpu.ridge_parity:tasks", 90, workers=8),
    "nystrom_parity": Section("bench.gpu.nystrom_parity:tasks", 90, workers=8),
    "continual_parity": Section("bench.gpu.continual_parity:tasks", 60, workers=4),
    "repeats": Section("bench.gpu.repeats:tasks", 100, workers=6),
    "promises": Section("bench.gpu.promises:tasks", 90, row_limit=45, workers=2),
    "timings": Section("bench.gpu.timings:tasks", 130, row_limit=30, judged=False),
    "ridge_timings": Section("bench.gpu.timings:intention_tasks", 50, row_limit=30, judged=False),
    "nystrom_timings": Section("bench.gpu.timings:nystrom_tasks", 40, row_limit=30, judged=False),
    "continual_timings": Section("bench.gpu.timings:continual_tasks", 30, row_limit=20, judged=False),
    "sanitizer": Section("bench.gpu.sanitizer:tasks", 240, row_limit=120, workers=9),
    "candidates": Section("bench.gpu.tune:candidate_tasks", 180, row_limit=45, workers=12),
    "tune": Section("bench.gpu.tune:tasks", 180, row_limit=60),
    "tuned_timings": Section("bench.gpu.timings:tuned_tasks", 60, row_limit=30, judged=False),
    "compiled_timings": Section("bench.gpu.timings:compiled_tasks", 200, row_limit=75, judged=False),
}
"""The sections, in the order in which a rare hour is best spent: what is right, how fast it is, last what may crash or takes long."""


def main(arguments: list[str] | None = None) -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", help=f"run these, also if they are complete: {', '.join(SECTIONS)}, separated by commas")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results", help="folder of the JSON file")
    parser.add_argument("--force", action="store_true", help="begin anew, and replace the file that is there")
    options = parser.parse_args(arguments)
    named = list(dict.fromkeys(options.sections.split(","))) if options.sections else []
    if unknown := [name for name in named if name not in SECTIONS]:
        return _refuse(f"unknown sections: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        return _refuse("there is no GPU that torch can use")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        report = opened(options.output, gpu(), options.force)
        report.save()
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    left = run_all(report, named, "cuda", started + BUDGET - TO_FINISH)
    if any(row.get("written") for row in report.outcomes.get("tune", Outcome()).rows):
        shutil.copyfile(tiles.FILE, report.path.with_name(f"{report.path.stem}_tiles.json"))
    print(table(report, SECTIONS))
    if left:
        print(f"not run, for want of time: {', '.join(left)}; go on with --sections {','.join(left)}")
    wrong = [name for name in named or SECTIONS if name not in left and not report.outcomes[name].right]
    return 1 if left or wrong else 0


def _refuse(reason: str) -> int:
    print(f"gpu_check: {reason}", file=sys.stderr)
    return 2


def run_all(report: Report, named: list[str], device: str, end: float) -> list[str]:
    """The sections named, or all that are not yet complete and right; returns those whose limit did not fit any more."""
    left = []
    for name in named or SECTIONS:
        section, outcome = SECTIONS[name], report.outcomes.get(name, Outcome())
        if outcome.right and not named:
            continue
        if time.monotonic() + section.limit > end:
            left.append(name)
            continue
        if outcome.right:
            outcome = Outcome()
        report.outcomes[name] = outcome
        before = {other: made.rows for other, made in report.outcomes.items()}
        run(section, device, outcome, before, report.save)
        outcome.state = gpu_state()
        report.save()
        print(f"{name}: {len(outcome.rows)} rows in {report.path}{f', {outcome.problem}' if outcome.problem else ''}", flush=True)
    return left


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers are stopped with it
    sys.exit(main())
