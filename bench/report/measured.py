"""docs/measured.md, its plots, the headline table of the README, and the table of docs/when_not.md: `python -m
bench.report.measured` writes them.

The page is measured.md, beside this file; each {group} in it is replaced by the figures of that group. All figures come
from runs in bench/results: `page.json` has the figures of measured.md, `short.json` has the short calls of when_not.md,
and `avx2.json` and `short_avx2.json` have the headline and the short calls with both sides held to AVX2. `python -m
bench.report.measured RUN` measures one of these runs again, from a commit.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from cmab_kernels.measure import readable

from .. import provenance, session
from ..provenance import ROOT
from ..runs import Row, Run, Spread, beyond_results, load, save
from ..scans.attention import short_cases
from . import plots
from .marks import Marks
from .page import clearly_slower

RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "measured.md"
PLOTS = {plots.FIRST: ROOT / "docs" / "measured.png", "prefix_attention_states": ROOT / "docs" / "prefixes.png"}
"""Operators whose curves are drawn -> the plot of each."""
WHOLE, NARROW = RESULTS / "page.json", RESULTS / "avx2.json"
"""The run of all shown figures, and the run for the headline's ratios with both sides held to AVX2."""
SHORT, NARROW_SHORT = RESULTS / "short.json", RESULTS / "short_avx2.json"
"""Short calls, for when_not.md, which shows where we are slower; and the same calls held to AVX2."""
HEADLINE, LOSSES = Marks(ROOT / "README.md", "headline table"), Marks(ROOT / "docs" / "when_not.md", "short calls")

INTRODUCTION, *TABLES = re.split(r"(?m)^(?=## )", Path(__file__).with_suffix(".md").read_text(encoding="utf-8"))
"""The text of the page: the part before the first heading, and a table under each.

The first is the README's headline.
"""

PLACE = re.compile(r"\{([^}]+)\}")


def shown(tables: Sequence[str]) -> set[str]:
    """The groups with figures in these tables."""
    return {
        place
        for table in tables
        for place in PLACE.findall(table)
        if place != "narrow" and not place.startswith("where")
    }


def measure(path: Path) -> None:
    """Measure one of the runs again; published figures must come from a commit."""
    if provenance.dirty():
        raise SystemExit("the checkout has uncommitted changes: commit them, then measure")
    held = {side: str(provenance.machine()[f"{side}_instruction_set"]).lower() for side in ("native", "torch")}
    if path in (NARROW, NARROW_SHORT) and set(held.values()) != {"avx2"}:
        raise SystemExit(f"{held}, where both must be avx2: set CMAB_KERNELS_ISA=avx2 and ATEN_CPU_CAPABILITY=avx2")
    if path == WHOLE:
        save(session.measured(scans=PLOTS, groups=shown(TABLES)), path)
    else:
        save(
            session.measured(groups=shown(TABLES[:1]) if path == NARROW else {case.name for case in short_cases()}),
            path,
        )


def page(run: Run, narrow: Run) -> str:
    """The text of docs/measured.md."""
    return INTRODUCTION + "\n".join(filter(None, (filled(table, run, narrow) for table in TABLES)))


def headline(run: Run, narrow: Run) -> str:
    """The table of the README, without its heading."""
    return filled(TABLES[0], run, narrow).partition("\n")[2].strip()


def filled(table: str, run: Run, narrow: Run | None = None) -> str:
    """A table with its figures and a line that says where it was measured. Rows that the run does not have are left
    out; if it has none, the result is empty.

    {narrow} in a row is replaced by the ratio of the run `narrow`, and {where narrow} by the place of that run. If
    torch was faster in that run, a row shows torch's time from that run and our ratio to it, because we compare with
    the fastest torch on this machine.
    """
    lines, threads = [], set()
    for line in table.rstrip().split("\n"):
        place = PLACE.search(line)
        if place and not place[1].startswith("where"):
            pair = _pair(run.groups.get(place[1], ()))
            if pair is None:
                continue
            ours, theirs = pair
            threads.add(ours.threads)
            held = _pair(narrow.groups.get(place[1], ())) if narrow else None
            line = line.replace(place[0], _cells(ours, theirs, held[1] if held else None))
            line = line.replace("{narrow}", _ratio(held[0].ratio.median) if held and held[0].ratio else "")
        line = line.replace("{where}", _where(run, sorted(threads)))
        lines.append(line if narrow is None else line.replace("{where narrow}", _where(narrow, sorted(threads))))
    return "\n".join(lines) + "\n" if threads else ""


def _pair(group: Sequence[Row]) -> tuple[Row, Row] | None:
    """Our row and the fastest baseline of a group."""
    ours = next((row for row in group if row.ours), None)
    theirs = next((row for row in group if ours and row.implementation == ours.baseline), None)
    return (ours, theirs) if ours and theirs else None


FASTER = 0.95
"""torch held to AVX2 counts as faster only if it takes less than this share of its time without this limit. Times of
two runs differ by more than times in one run."""


def _cells(ours: Row, theirs: Row, held: Row | None) -> str:
    """The cells of torch's figures, of our figures and of the ratio; `held` are torch's figures held to AVX2."""
    if held is None or held.seconds.median >= FASTER * theirs.seconds.median:
        return f"{_figures(theirs)} | {_figures(ours)} | {_ratios(ours.ratio)}{', noisy' if ours.noisy else ''}"
    ratio = ours.seconds.median / held.seconds.median
    assert ours.ratio is not None
    return f"{_figures(held)}, held to AVX2 | {_figures(ours)} | **{_ratio(ratio)}** (else {_ratio(ours.ratio.median)})"


def _figures(row: Row) -> str:
    return f"{readable(row.seconds.median)}, {beyond_results(row)}"


def _ratios(ratio: Spread | None) -> str:
    assert ratio is not None
    return f"**{_ratio(ratio.median)}** ({_ratio(ratio.low)} to {_ratio(ratio.high)})"


def _ratio(ratio: float) -> str:
    """Small numbers get two digits, and other numbers two decimal places. A tiny number is shown as 1 divided by a
    number."""
    if ratio < 0.001:
        return f"1 / {float(f'{1 / ratio:.2g}'):,.0f}"
    return f"{ratio:.2g}" if ratio < 0.1 else f"{ratio:.2f}"


def _where(run: Run, threads: Sequence[int]) -> str:
    """The machine and the day; the file contains the commit."""
    count = f"{' or '.join(map(str, threads))} thread{'' if threads == [1] else 's'}"
    family = run.machine.get("cpu", {}).get("family")
    processor = f"{run.processor}, family {family}" if family else run.processor
    machine = f"{processor} ({run.machine['native_instruction_set']}), {count}, torch {run.versions['torch']}"
    dirty = " **with uncommitted changes**" if run.dirty else ""
    return f"{machine}, {run.when[:10]}, commit {run.commit[:10]}{dirty}, `{run.path.name}`."


def short_calls(run: Run, narrow: Run) -> str:
    """The table of when_not.md: ratios of short calls by queries and keys. Ratios where we are slower are bold, by the
    rule of the benchmark's report."""
    found: dict[tuple[int, ...], dict[tuple[str, int], str]] = {}
    for source, rows in (("", run.rows), ("AVX2", narrow.rows)):
        for row in rows:
            if row.ours and row.ratio and not row.noisy:
                shape, width = tuple(int(row.parameters[letter]) for letter in "LNB"), int(row.parameters["D"])
                text = f"{row.ratio.median:.2f}"
                found.setdefault(shape, {})[source, width] = f"**{text}**" if clearly_slower(row) else text
    columns = [(source, width) for source in ("", "AVX2") for width in (16, 64)]
    head = " | ".join(f"4 heads of {width}{f', {source}' if source else ''}" for source, width in columns)
    lines = [f"| queries over keys | {head} |", "|---|" + "---|" * len(columns)]
    for (latents, keys, batch), cells in sorted(found.items()):
        alone = " (a batch of 1)" if batch == 1 else ""
        lines.append(
            f"| {latents:,} over {keys:,}{alone} | {' | '.join(cells.get(column, 'noisy') for column in columns)} |"
        )
    return "\n".join([*lines, "", f"{_where(run, [1])} Held to AVX2: {_where(narrow, [1])}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report.measured", description="Writes docs/measured.md, its plots and the headline."
    )
    every = {path.stem: path for path in (WHOLE, NARROW, SHORT, NARROW_SHORT)}
    parser.add_argument("run", nargs="?", choices=every, help="measure this run again, and write no page")
    if name := parser.parse_args().run:
        measure(every[name])
        return
    run, narrow = load(WHOLE), load(NARROW)
    HEADLINE.write(headline(run, narrow))
    PAGE.write_text(page(run, narrow))
    LOSSES.write(short_calls(load(SHORT), load(NARROW_SHORT)))
    for operator, plot in PLOTS.items():
        plots.picture(run, operator, plot)
    written = (HEADLINE.page, PAGE, LOSSES.page, *PLOTS.values())
    print(
        f"{', '.join(str(path.relative_to(ROOT)) for path in written)}: from "
        f"{', '.join(path.name for path in every.values())}"
    )


if __name__ == "__main__":
    main()
