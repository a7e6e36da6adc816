"""Check and time the kernels on the GPU of this machine: `python bench/gpu_check.py`.

For all families: parity with a float64 oracle, repeats with equal bits, then the times beside the floor and torch's own. Section by
section it writes `bench/results/gpu_check_<gpu>_<date>.json`; it prints a table last, and fails when a result is wrong. It takes 8 minutes
at most.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  after the path, so that a checkout runs without installing

SECTIONS = {
    "parity": 90,
    "ridge_parity": 90,
    "nystrom_parity": 50,
    "continual_parity": 60,
    "repeats": 60,
    "ridge_timings": 30,
    "continual_timings": 20,
    "timings": 80,
}
"""name -> seconds that it may take; 8 minutes in all. Those without a family are of attention, the repeats of attention and Intention."""

Row = dict[str, Any]


def parity(device: str) -> Iterator[Row]:
    from bench.gpu.parity import check, problems

    for problem in problems():
        yield check(problem, device)


def ridge_parity(device: str) -> Iterator[Row]:
    from bench.gpu.ridge_parity import check, problems

    for problem in problems():
        yield check(problem, device)


def nystrom_parity(device: str) -> Iterator[Row]:
    from bench.gpu.nystrom_parity import check, problems

    for problem in problems():
        yield check(problem, device)


def continual_parity(device: str) -> Iterator[Row]:
    from bench.gpu.continual_parity import run

    yield from run(device)


def repeats(device: str) -> Iterator[Row]:
    from bench.gpu.repeats import run

    yield from run(device)


def ridge_timings(device: str) -> Iterator[Row]:
    from bench.gpu.ridge_timings import run

    yield from run(device)


def continual_timings(device: str) -> Iterator[Row]:
    from bench.gpu.continual_parity import timings

    yield from timings(device)


def timings(device: str) -> Iterator[Row]:
    from bench.gpu.timings import run

    yield from run(device)


def _section(name: str, device: str, path: str) -> None:
    """One section in a process of its own, each row on file when it is there: what hangs or crashes costs the rows behind it."""
    with open(path, "a") as file:
        try:
            for row in globals()[name](device):
                print(json.dumps(row), file=file, flush=True)
        except BaseException:
            print(json.dumps({"ok": False, "problem": traceback.format_exc().strip().splitlines()[-1]}), file=file, flush=True)
            traceback.print_exc()


def run_section(name: str, device: str, limit: float) -> list[Row]:
    """The rows of a section; the last says so if it did not finish."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.jsonl")
        process = multiprocessing.get_context("spawn").Process(target=_section, args=(name, device, path))
        process.start()
        process.join(limit)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()] if os.path.exists(path) else []
    if late:
        rows.append({"ok": name.endswith("timings"), "problem": f"stopped after {limit:.0f} s"})
    elif process.exitcode:
        rows.append({"ok": False, "problem": f"ended with exit code {process.exitcode}"})
    return rows


def machine() -> Row:
    """What the figures depend on."""
    import triton

    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "memory": gpu.total_memory,
        "l2": gpu.L2_cache_size,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit() -> str:
    return _output("git", "-C", str(ROOT), "rev-parse", "HEAD")


def _output(*command: str) -> str:
    """What a command prints; "unknown" where it is missing or fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip() or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def passed(report: Row) -> bool:
    """No wrong row, and no section that ended early."""
    return all(row.get("ok", True) for rows in report["sections"].values() for row in rows)


def table(report: Row) -> str:
    lines = [", ".join(f"{name} {report['machine'][name]}" for name in ("gpu", "driver", "versions", "commit", "date"))]
    sections = report["sections"]
    for name, rows in sections.items():
        if not name.endswith("timings"):
            wrong = [row for row in rows if not row["ok"]]
            lines.append(f"{name}: {len(rows) - len(wrong)} of {len(rows)} passed")
            lines += [f"  WRONG {json.dumps(row)}" for row in wrong]
    for row in (row for name in reversed(SECTIONS) if name.endswith("timings") for row in sections.get(name, [])):
        if "rates" in row:
            lines.append("measured: " + ", ".join(f"{name} {rate / 1e12:.2f} T/s" for name, rate in row["rates"].items()))
        elif "seconds" in row:
            lines.append(
                f"{row['shape']:30} {row['pass']:18} {row['impl']:16} {row['seconds'] * 1e6:10.1f} us  floor {row['floor'] * 1e6:8.1f} us "
                f"({row['bound']}) {row['share of floor']:6.1%}  memory {row['memory'] / 2**20:8.1f} MiB"
            )
        else:
            lines.append(f"{row.get('shape', ''):30} {row.get('pass', ''):18} {row.get('impl', ''):16} {row['problem']}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which of %(default)s, separated by commas")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results", help="folder of the JSON file")
    options = parser.parse_args(arguments)
    chosen = options.sections.split(",")
    if unknown := [name for name in chosen if name not in SECTIONS]:
        parser.error(f"unknown sections: {', '.join(unknown)}")
    if not torch.cuda.is_available():
        print("gpu_check: there is no GPU that torch can use", file=sys.stderr)
        return 2
    report: Row = {"machine": machine(), "sections": {}}
    name = re.sub(r"[^A-Za-z0-9]+", "-", report["machine"]["gpu"]).strip("-").lower()
    path = options.output / f"gpu_check_{name}_{report['machine']['date'][:10]}.json"
    options.output.mkdir(parents=True, exist_ok=True)
    for section in chosen:
        report["sections"][section] = run_section(section, "cuda", SECTIONS[section])
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{section}: {len(report['sections'][section])} rows in {path}", flush=True)
    print(table(report))
    return 0 if passed(report) else 1


if __name__ == "__main__":
    sys.exit(main())
