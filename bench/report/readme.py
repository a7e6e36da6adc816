"""The README's tables of figures, each between two marks, and its plot: `python -m bench.report.readme [RUN.json]` writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from cmab_kernels.measure import readable
from cmab_kernels.nystrom.costs import executed_on_average, paper_operations

from . import plots
from .runs import load

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
SCRATCH = "latest.json"

HEADLINE = {
    "forward-float32-B1-4x16-L128-N100000": "`latent_attention`, 128 queries over 100,000 keys, 4 heads of 16",
    "forward+backward-float32-B1-4x16-L128-N100000": "the same with its gradients",
    "module-float32-4-heads-C64-L128-N100000": "`nn.MultiheadAttention` over 100,000 rows, swapped for ours",
    "cmab-one-point-after-100000-float32-4-heads-C64-L128": "one more point for a CMAB that has read 100,000, beside reading all again",
    "intention-forward-float32-1x64-N1000000": "`intention`, a regression on 1,000,000 points of 64",
    "solve-float32-D64-E64-B1024": "`regularised_solve`, 1,024 systems of 64",
    "nystrom-step-fixed-float32-16x12-n1024-m4-beside-full": "one token of a stream, Nyström attention, n = 1,024, beside the full one",
}
ATTENTION = {
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
SOLVE = {f"solve-float32-D{width}-E{width}-B1024": f"solve, 1,024 systems, {width} x {width}" for width in (16, 32, 64, 128)}
VECTOR = {f"solve-float32-D{width}-E1-B1024": f"the same, one right-hand side, {width} x {width}" for width in (16, 64)}
INTENTION = (
    SOLVE
    | VECTOR
    | {
        "intention-forward-float32-1x64-N1000000": "`intention`, N = 1,000,000, forward",
        "intention-forward+backward-float32-1x64-N1000000": "`intention`, N = 1,000,000, forward and backward",
    }
    | {f"intention-forward-float32-1x64-N{n}": f"`intention`, N = {n:,}, forward, beside attention" for n in (256, 1024, 4096, 16_384)}
    | {
        "intention-forward+backward-float32-1x64-N4096": "`intention`, N = 4,096, forward and backward, beside attention",
        "intention-update-float32-4x16-one-key-after-100000": "one more key and the regression anew, 4 heads of 16",
        "intention-update-float32-1x64-one-key-after-100000": "one more key and the regression anew, 1 head of 64",
    }
)


def _beside_full(window: int, landmarks: str) -> str:
    """A step of 16 heads of 12 with 4 landmarks, and how many times as many operations full attention takes."""
    full, step = "full", f"{landmarks} single"
    paper = paper_operations(full, window, 4, 192) / paper_operations(step, window, 4, 192)
    executed = executed_on_average(full, window, 4, 12) / executed_on_average(step, window, 4, 12)
    return (
        f"one token, {landmarks} landmarks, 16 heads of 12, m = 4, n = {window:,}, beside full attention: "
        f"1 / {paper:,.0f} of its operations by the paper's count, 1 / {executed:,.0f} of those executed"
    )


def _layer(length: int) -> str:
    return f"`nystrom_attention`, N = {length:,}, 4 heads of 64, m = 64"


NYSTROM = (
    {
        "nystrom-step-fixed-float32-1x64-n64-m16": "one token, fixed landmarks",
        "nystrom-step-continual-float32-1x64-n64-m16": "one token, continual landmarks, in the mean",
        "nystrom-step-fixed-float32-1x64-n64-m16-blocks-of-64": "a token in blocks of 64, fixed landmarks",
        "nystrom-step-continual-float32-1x64-n64-m16-blocks-of-64": "a token in blocks of 64, continual landmarks",
        "nystrom-step-fixed-float32-1024x64-n64-m16-2-threads": "one token for 1,024 heads, fixed landmarks",
        "nystrom-step-continual-float32-1024x64-n64-m16-2-threads": "one token for 1,024 heads, continual landmarks, in the mean",
        "iterative-pinv-float32-m16-B1": "`iterative_pinv`, one matrix",
    }
    | {
        f"nystrom-step-{landmarks}-float32-16x12-n{window}-m4-beside-full": _beside_full(window, landmarks)
        for window in (120, 1024, 4096)
        for landmarks in ("fixed", "continual")
    }
    | {
        "exact-step-single-float32-16x12-n120": "`continual_attention_step`, 16 heads of 12, n = 120",
        "exact-step-retroactive-float32-16x12-n120": "the same, retroactive",
        "exact-step-single-float32-16x12-n1024": "the same, single, n = 1,024",
    }
    | {f"nystrom-forward-float32-4x64-N{n}-m64": f"{_layer(n)}, forward" for n in (1024, 4096, 16_384)}
    | {f"nystrom-forward+backward-float32-4x64-N{n}-m64": f"{_layer(n)}, forward and backward" for n in (1024, 4096)}
)


class Table(NamedTuple):
    """One of the README's: what a reader calls each group, and what torch is."""

    mark: str
    heading: str
    labels: dict[str, str]
    """group -> row"""
    torch: str

    @property
    def begin(self) -> str:
        return f"<!-- {self.mark}: begin -->"

    @property
    def end(self) -> str:
        return f"<!-- {self.mark}: end -->"


TABLES = (
    Table(
        "headline table",
        "float32, on a CPU",
        HEADLINE,
        "the fastest way known to us to do the same in torch: the tables below say which",
    ),
    Table(
        "table",
        "N = 100,000 keys, 128 queries, where not said otherwise",
        ATTENTION,
        "`scaled_dot_product_attention`, for the module `torch.nn.MultiheadAttention`, for one more key the update formula in eager torch",
    ),
    Table(
        "intention table",
        "float32, 64 wide, as many queries as keys",
        INTENTION,
        "its Cholesky factorisation and triangular solves, for a million keys the fastest form that was found (a few thousand keys at a "
        "time, gradients by hand), beside attention `scaled_dot_product_attention`, for one more key the update formula in eager torch",
    ),
    Table(
        "nystrom table",
        "float32, n = 64 tokens, m = 16 landmarks, 1 head of 64, where not said otherwise",
        NYSTROM,
        "for steps the papers' equations in eager torch, written for speed (in blocks, the faster of two ways); beside full attention "
        "the faster of `scaled_dot_product_attention` and softmax(QK')V of the whole window, for exact steps the faster of torch's "
        "attention over a ring and continual-inference 1.2.4, for whole windows the faster of nystrom-attention 0.0.14 and eager torch",
    ),
)


def newest_run(shown: Table, results: Path = RESULTS) -> Path | None:
    """The committed run of the latest date that has rows of this table; None if there is none."""
    runs = {path: json.loads(path.read_text()) for path in results.glob("*.json") if path.name != SCRATCH}
    dates = {path: run["datetime"] for path, run in runs.items() if has_rows(run, shown)}
    return max(dates, key=lambda path: dates[path], default=None)


def has_rows(run: dict[str, Any], shown: Table) -> bool:
    return any(row["group"] in shown.labels for row in run.get("benchmarks", ()))


def table(path: Path, shown: Table) -> str:
    """The run as a table in Markdown, with a line that says where it was measured."""
    run = json.loads(path.read_text())
    lines = [f"| {shown.heading} | torch | cmab_kernels | time, of torch's |", "|---|---|---|---|"]
    threads = set()
    for group, label in shown.labels.items():
        rows = {row["extra_info"]["implementation"]: row for row in run["benchmarks"] if row["group"] == group}
        ours = next((row for row in rows.values() if row["extra_info"]["ours"]), None)
        theirs = rows.get(ours["extra_info"].get("baseline")) if ours else None
        if ours and theirs:
            low, high = ours["extra_info"]["ratio_quartiles"]
            ratio = f"**{_ratio(ours['extra_info']['ratio'])}** ({_ratio(low)} to {_ratio(high)})"
            lines.append(f"| {label} | {_figures(theirs)} | {_figures(ours)} | {ratio} |")
            threads.add(ours["extra_info"].get("threads", run["threads"]))
    return "\n".join([*lines, "", _where(path, run, shown, " or ".join(map(str, sorted(threads))))])


def _ratio(ratio: float) -> str:
    """Two digits of what is small, two places of the rest; of what is tiny, how many times it is less."""
    if ratio < 0.001:
        return f"1 / {float(f'{1 / ratio:.2g}'):,.0f}"
    return f"{ratio:.2g}" if ratio < 0.1 else f"{ratio:.2f}"


def _figures(row: dict[str, Any]) -> str:
    memory = (row["extra_info"]["extra_memory"] - row["extra_info"]["result_memory"]) / 2**20
    return f"{readable(row['stats']['median'])}, {memory:+.1f} MiB"


def _where(path: Path, run: dict[str, Any], shown: Table, threads: str) -> str:
    machine = run["machine_info"]
    return (
        "Medians of interleaved rounds, with the quartiles of the ratio; memory is the peak beyond inputs and results, to 0.3 MiB. torch "
        f"is {shown.torch}. {machine['cpu']['brand_raw']} ({machine['native_instruction_set']}), {threads} "
        f"thread{'' if threads == '1' else 's'}, torch {machine['versions']['torch']}, commit {run['commit_info']['id'][:7]}, "
        f"{run['datetime'][:10]}, [{path.name}](bench/results/{path.name})."
    )


def insert(text: str, new: str, shown: Table) -> str:
    """`text` with what stands between the two marks of the table replaced."""
    begin, end = shown.begin, shown.end
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise SystemExit(f"README.md must hold one {begin} and one {end} after it")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{new}\n{end}{rest.split(end)[1]}"


PLOT = ROOT / "docs" / "measured.png"
PLOTTED = TABLES[1]
"""The table from whose run the plot is."""


def main() -> None:
    if len(sys.argv) > 1:
        given = Path(sys.argv[1])
        runs = [(shown, given) for shown in TABLES if has_rows(json.loads(given.read_text()), shown)]
    else:
        runs = [(shown, path) for shown in TABLES if (path := newest_run(shown))]
    if not runs:
        raise SystemExit("no run with rows of a table: pytest bench --save NAME")
    readme = ROOT / "README.md"
    for shown, path in runs:
        readme.write_text(insert(readme.read_text(), table(path, shown), shown))
        print(f"README.md: {shown.mark} of {path.name}")
        if shown == PLOTTED:
            plots.readme_plot(load(path), PLOT)
            print(f"{PLOT.relative_to(ROOT)}: of {path.name}")


if __name__ == "__main__":
    main()
