"""The README's table of figures: `python bench/readme_table.py [RUN.json]` writes it, from a committed run, between two marks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cmab_kernels.measure import readable

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SCRATCH = "latest.json"

OURS = ("native", "cmab_kernels.nn.MultiheadAttention")
LABELS = {
    "forward-float32-B1-8x8-L128-N100000": "forward, float32, 8 heads of 8",
    "forward-float32-B1-4x16-L128-N100000": "forward, float32, 4 heads of 16",
    "forward-float32-B1-1x64-L128-N100000": "forward, float32, 1 head of 64",
    "forward-bfloat16-B1-4x16-L128-N100000": "forward, bfloat16, 4 heads of 16",
    "forward-bfloat16-B1-1x64-L128-N100000": "forward, bfloat16, 1 head of 64",
    "forward+backward-float32-B1-8x8-L128-N100000": "forward and backward, float32, 8 heads of 8",
    "forward+backward-float32-B1-4x16-L128-N100000": "forward and backward, float32, 4 heads of 16",
    "forward+backward-float32-B1-1x64-L128-N100000": "forward and backward, float32, 1 head of 64",
    "forward+backward-float32-B100-4x16-L128-N197": "forward and backward, batch 100, N = 197, 4 heads of 16",
    "forward-float32-B1-4x16-L128-N1000000": "forward, N = 1,000,000, 4 heads of 16",
    "forward+backward-float32-B1-4x16-L128-N1000000": "forward and backward, N = 1,000,000, 4 heads of 16",
    "module-float32-4-heads-C64-L128-N100000": "`nn.MultiheadAttention`, projections and all, 4 heads of 16",
    "update-float32-4x16-L128-one-key-after-100000": "one more key, 4 heads of 16",
}
"""group -> what a reader calls it"""


def newest_run(results: Path = RESULTS) -> Path | None:
    """The committed run of the latest date; None if there is none."""
    runs = {path: json.loads(path.read_text()) for path in results.glob("*.json") if path.name != SCRATCH}
    dates = {path: run["datetime"] for path, run in runs.items() if "benchmarks" in run}
    return max(dates, key=lambda path: dates[path], default=None)


def table(path: Path) -> str:
    """The run as a table in Markdown, with a line that says where it was measured."""
    run = json.loads(path.read_text())
    lines = ["| N = 100,000 keys, 128 queries, where not said otherwise | torch | cmab_kernels | time, of torch's |", "|---|---|---|---|"]
    for group, label in LABELS.items():
        rows = {row["extra_info"]["implementation"]: row for row in run["benchmarks"] if row["group"] == group}
        ours = next((rows[name] for name in OURS if name in rows), None)
        theirs = rows.get(ours["extra_info"].get("baseline")) if ours else None
        if ours and theirs:
            low, high = ours["extra_info"]["ratio_quartiles"]
            lines.append(
                f"| {label} | {_figures(theirs)} | {_figures(ours)} | **{ours['extra_info']['ratio']:.2f}** ({low:.2f} to {high:.2f}) |"
            )
    return "\n".join([*lines, "", _where(path, run)])


def _figures(row: dict[str, Any]) -> str:
    memory = (row["extra_info"]["extra_memory"] - row["extra_info"]["result_memory"]) / 2**20
    return f"{readable(row['stats']['median'])}, {memory:+.1f} MiB"


def _where(path: Path, run: dict[str, Any]) -> str:
    machine = run["machine_info"]
    return (
        "Medians of interleaved rounds, with the quartiles of the ratio; memory is the peak beyond inputs and results, to 0.3 MiB. torch "
        "is `scaled_dot_product_attention`, for the module `torch.nn.MultiheadAttention`, for one more key the update formula in "
        f"eager torch. {machine['cpu']['brand_raw']} ({machine['native_instruction_set']}), {run['threads']} threads, "
        f"torch {machine['versions']['torch']}, commit {run['commit_info']['id'][:7]}, {run['datetime'][:10]}, "
        f"[{path.name}](bench/results/{path.name})."
    )


def insert(text: str, new: str) -> str:
    """`text` with what stands between the two marks replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise SystemExit(f"README.md must hold one {BEGIN} and one {END} after it")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{new}\n{END}{rest.split(END)[1]}"


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else newest_run()
    if path is None:
        raise SystemExit("no run in bench/results: pytest bench --save NAME")
    readme = ROOT / "README.md"
    readme.write_text(insert(readme.read_text(), table(path)))
    print(f"README.md: table of {path.name}")


if __name__ == "__main__":
    main()
