"""docs/measured.md, the headline table of the README and the first plot: `python -m bench.report.measured [RUN.json]` writes them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cmab_kernels.measure import readable
from cmab_kernels.nystrom.costs import executed_on_average, paper_operations

from ..runs import BadRun, Row, Run, Spread, load
from . import plots

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "measured.md"
PLOT = ROOT / "docs" / "measured.png"
BEGIN, END = "<!-- headline table: begin -->", "<!-- headline table: end -->"
"""The marks in the README between which the headline table stands."""

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
    """The label of a step of 16 heads of 12 with 4 landmarks: it says how many times as many operations full attention takes."""
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
    """One table: its title on the page, what its rows have in common, the groups that it shows, and what its column for torch holds."""

    title: str
    heading: str
    labels: dict[str, str]
    """group -> what a reader calls it"""
    torch: str


TABLES = (
    Table(
        "Headline",
        "float32, on a CPU",
        HEADLINE,
        "the fastest way known to us to do the same in torch; in brackets are the quartiles of the ratio; memory is the peak beyond inputs "
        "and results",
    ),
    Table(
        "Latent cross-attention",
        "N = 100,000 keys, 128 queries, where not said otherwise",
        ATTENTION,
        "`scaled_dot_product_attention`, for the module `torch.nn.MultiheadAttention`, for one more key the update formula in eager torch",
    ),
    Table(
        "Intention",
        "float32, 64 wide, as many queries as keys",
        INTENTION,
        "its Cholesky factorisation and triangular solves, for a million keys the fastest form that was found (a few thousand keys at a "
        "time, gradients by hand), beside attention `scaled_dot_product_attention`, for one more key the update formula in eager torch",
    ),
    Table(
        "Nyström attention and continual attention",
        "float32, n = 64 tokens, m = 16 landmarks, 1 head of 64, where not said otherwise",
        NYSTROM,
        "for steps the papers' equations in eager torch, written for speed (in blocks, the faster of two ways); beside full attention "
        "the faster of `scaled_dot_product_attention` and softmax(QK')V of the whole window, for exact steps the faster of torch's "
        "attention over a ring and continual-inference 1.2.4, for whole windows the faster of nystrom-attention 0.0.14 and eager torch",
    ),
)

INTRODUCTION = """# Measured

This package beside torch and other packages. Each ratio is our time divided by theirs, so that less is better: medians of interleaved
rounds, with the quartiles of the ratio in brackets. Memory is the peak beyond inputs and results, to 0.3 MiB.

![A CMAB that has read N points takes in one more: with its state in constant memory and time, and by reading all again](measured.png)

`make bench` measures every operator on your machine in five minutes and writes `bench_report/report.html` (time, memory, FLOPs, error, and
the share of what the machine could do at best). `python -m cmab_kernels bench --compare OLD.json` says what changed beyond the noise, and
`python -m cmab_kernels bench latent_attention` measures one operator at all sizes. What the GPU kernels compile to, and the times that
this implies, is in [gpu_readiness.md](gpu_readiness.md).

This page and its plot are written by `python -m bench.report.measured` from the newest run in `bench/results`.
"""


def newest_run(results: Path = RESULTS) -> Run | None:
    """The committed full run of the latest date; None if there is none."""
    runs = []
    for path in results.glob("*.json"):
        with contextlib.suppress(BadRun):  # the record of another check
            runs.append(load(path))
    return max((run for run in runs if not run.quick), key=lambda run: run.when, default=None)


def page(run: Run) -> str:
    """The text of docs/measured.md."""
    tables = [f"## {shown.title}\n\n{found}\n" for shown in TABLES if (found := table(run, shown))]
    return "\n".join([INTRODUCTION, *tables])


def table(run: Run, shown: Table) -> str:
    """One table in Markdown, with a line that says where it was measured; empty if the run has none of its rows."""
    pairs = {label: pair for group, label in shown.labels.items() if (pair := _pair(run.groups.get(group, ())))}
    if not pairs:
        return ""
    rows = [f"| {label} | {_figures(theirs)} | {_figures(ours)} | {_ratios(ours.ratio)} |" for label, (ours, theirs) in pairs.items()]
    threads = sorted({ours.threads for ours, _ in pairs.values()})
    head = [f"| {shown.heading} | torch | cmab_kernels | time, of torch's |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, "", _where(run, shown, threads)])


def _pair(group: Sequence[Row]) -> tuple[Row, Row] | None:
    """Ours and the fastest baseline of a group."""
    ours = next((row for row in group if row.ours), None)
    theirs = next((row for row in group if ours and row.implementation == ours.baseline), None)
    return (ours, theirs) if ours and theirs else None


def _figures(row: Row) -> str:
    return f"{readable(row.seconds.median)}, {row.scratch / 2**20:+.1f} MiB"


def _ratios(ratio: Spread | None) -> str:
    assert ratio is not None
    return f"**{_ratio(ratio.median)}** ({_ratio(ratio.low)} to {_ratio(ratio.high)})"


def _ratio(ratio: float) -> str:
    """Two digits of what is small, two places of the rest; of what is tiny, how many times it is less."""
    if ratio < 0.001:
        return f"1 / {float(f'{1 / ratio:.2g}'):,.0f}"
    return f"{ratio:.2g}" if ratio < 0.1 else f"{ratio:.2f}"


def _where(run: Run, shown: Table, threads: Sequence[int]) -> str:
    count = f"{' or '.join(map(str, threads))} thread{'' if threads == [1] else 's'}"
    return (
        f"torch is {shown.torch}. {run.processor} ({run.machine['native_instruction_set']}), {count}, torch {run.versions['torch']}, "
        f"commit {run.revision[:7]}, {run.when[:10]}, `{run.path.name}`."
    )


def insert(text: str, new: str) -> str:
    """`text` with what stands between the two marks replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise SystemExit(f"README.md must hold one {BEGIN} and one {END} after it")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{new}\n{END}{rest.split(END)[1]}"


def main() -> None:
    run = load(Path(sys.argv[1])) if len(sys.argv) > 1 else newest_run()
    if run is None:
        raise SystemExit("there is no full run in bench/results: put the run.json of python -m cmab_kernels bench there")
    README.write_text(insert(README.read_text(), table(run, TABLES[0])))
    PAGE.write_text(page(run))
    plots.first_plot(run, PLOT)
    print(f"{', '.join(str(path.relative_to(ROOT)) for path in (README, PAGE, PLOT))}: from {run.path.name}")


if __name__ == "__main__":
    main()
