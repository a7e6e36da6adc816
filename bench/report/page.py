"""A run as one self-contained page: what was measured, a summary, figures, every row, and how each number was
computed."""

from __future__ import annotations

import statistics
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path

from cmab_kernels.measure import readable
from cmab_kernels.nystrom.costs import (
    SCHEMES,
    attention_state_elements,
    executed_on_average,
    paper_memory,
    paper_operations,
    state_elements,
)

from ..runs import Row, Run, beyond_results, fastest
from . import compare, plots
from .compare import Change, Comparison
from .drawing import Panel, sheet, svg, times
from .series import labels, words

MIB = 2**20


def write(run: Run, folder: Path, comparison: Comparison | None = None) -> list[Path]:
    """report.html and a PNG for each operator."""
    sheets = {scan: plots.panels(run, scan) for scan in run.scans}
    page = folder / "report.html"
    page.write_text(html(run, comparison, sheets), encoding="utf-8")
    overview = plots.overview(run)
    pictures = {
        name: panels for name, panels in ({"overview": [overview] if overview else []} | sheets).items() if panels
    }
    for name, panels in sorted(pictures.items()):
        sheet(panels, folder / f"{plots.slug(name)}.png")
    return [page, *(folder / f"{plots.slug(name)}.png" for name in sorted(pictures))]


def html(run: Run, comparison: Comparison | None, sheets: Mapping[str, Sequence[Panel]]) -> str:
    """Everything from a run is escaped."""
    sections = {
        "run": ("What was measured", _machine(run)),
        "summary": ("Summary", _summary(run)),
        "changes": ("What changed", _changes(comparison) if comparison else ""),
        "figures": ("Figures", _figures(run, sheets)),
        "counts": ("Operation counts", _counts()),
        "rows": ("Every row", _rows(run)),
        "missing": ("What was not measured", _missing(run)),
        "definitions": ("How each figure is defined", _definitions(run)),
    }
    shown = {name: section for name, section in sections.items() if section[1]}
    body = "\n".join(
        f'<section id="{name}"><h2>{title}</h2>\n{content}\n</section>' for name, (title, content) in shown.items()
    )
    return string.Template(_text("page.html")).substitute(
        kind="A quick run" if run.quick else "A full run",
        processor=escape(run.processor),
        when=escape(run.when),
        file=escape(run.path.name),
        contents="".join(_link(run, name, title) for name, (title, _) in shown.items()),
        body=body,
    )


def _text(name: str) -> str:
    """A file in the folder of this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _link(run: Run, name: str, title: str) -> str:
    within = (
        "".join(f'<li><a href="#{_anchor("figures", scan)}">{escape(scan)}</a></li>' for scan in run.scans)
        if name == "figures"
        else ""
    )
    return f'<li><a href="#{name}">{title}</a>{f"<ul>{within}</ul>" if within else ""}</li>'


def _anchor(section: str, scan: str) -> str:
    return plots.slug(section, scan)


def _pairs(pairs: Mapping[str, str]) -> str:
    """A list of names and their meanings, which are HTML already."""
    return (
        "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in pairs.items() if value) + "</dl>"
    )


def _table(label: str, head: Sequence[str], rows: Iterable[str]) -> str:
    """A table in a box that can be scrolled if a window is too narrow; `rows` are HTML already."""
    cells = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "\n".join(rows)
    return (
        '<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(label)}"><table><thead><tr>{cells}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _line(head: Sequence[str], cells: Sequence[str], kind: str = "") -> str:
    """The first cell is the name of the row. The other cells contain their heading, because on a phone each cell shows
    its heading itself."""
    row = f' class="{kind}"' if kind else ""
    rest = (f'<td data-label="{name}">{cell}</td>' for name, cell in zip(head[1:], cells[1:], strict=True))
    return f'<tr{row}><th scope="row">{cells[0]}</th>{"".join(rest)}</tr>'


# ---- what was measured, and the summary -------------------------------------------------------------------------


def _machine(run: Run) -> str:
    machine = run.machine
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)
    sets = [
        f"{name} {machine[key]}"
        for name, key in (("native", "native_instruction_set"), ("torch", "torch_instruction_set"))
        if machine.get(key)
    ]
    told = {
        "processor": run.processor,
        "cores": str(machine.get("cores", "")),
        "device": {"cpu": "CPU", "cuda": "GPU"}.get(run.device, run.device),
        "instructions": ", ".join(sets),
        "threads": f"{run.threads}, unless a row says otherwise",
        "versions": versions,
        "commit": run.revision,
        "date": run.when,
        "notes": " ".join(run.notes),
        "extent": f"{'quick' if run.quick else 'full'}: {len(run.scans)} operators, {len(run.groups)} groups, "
        f"{len(run.rows)} rows",
        "file": run.path.name,
    }
    found = {name: escape(value) for name, value in told.items()}
    if run.dirty:
        found["commit"] += ", <strong>with uncommitted changes</strong>"
    return _pairs(found)


def _summary(run: Run) -> str:
    gains = {scan: found for scan in run.scans if (found := plots.gains(run, scan))}
    if not gains:
        return f"{_wrong(run)}<p>No group has both a kernel of ours and a peer.</p>"
    every = [pair for found in gains.values() for pair in found]
    judged = [pair for pair in every if not pair[0].noisy]
    slower = [pair for pair in judged if clearly_slower(pair[0])]
    even = [pair for pair in judged if _even(pair[0])]
    overview = plots.overview(run)
    assert overview is not None
    return f"""{_wrong(run)}
<p>In {len(judged) - len(slower) - len(even)} of {len(judged)} groups with a peer, cmab_kernels is faster
than the fastest peer; in {len(even)} the quartiles do not decide;
in {len(slower)} it is slower.{_ends(judged)}{_noisy(len(every) - len(judged))}</p>
<div class="beside"><figure>{svg(overview)}</figure>
{_table("Speed-up of each operator", SUMMARY, _summary_rows(gains))}</div>
<h3>Where cmab_kernels is slower</h3>
{_slower([row for row, _ in slower], [row for row, gain in even if gain < 1])}"""


def _ends(judged: Sequence[tuple[Row, float]]) -> str:
    """The largest gain and the smallest gain."""
    if not judged:
        return ""
    best, worst = max(judged, key=lambda pair: pair[1]), min(judged, key=lambda pair: pair[1])
    return f""" It gains most, {times(best[1])}, in {_where(best[0])}, and
least, {times(worst[1])}, in {_where(worst[0])}."""


def _noisy(count: int) -> str:
    """State how many groups do not count."""
    return f" <strong>{count} more groups are noisy</strong>, and count neither as gain nor as loss." if count else ""


SUMMARY = ("operator", "groups", "least", "median", "most", "beside")


def _where(row: Row) -> str:
    return f"<code>{escape(row.scan)}</code> ({escape(words(row.parameters))})"


def _summary_rows(gains: Mapping[str, Sequence[tuple[Row, float]]]) -> Iterator[str]:
    for scan, found in gains.items():
        values = [gain for _, gain in found]
        peers = "; ".join(dict.fromkeys(str(row.baseline) for row, _ in found))
        ends = [_gain(value) for value in (min(values), statistics.median(values), max(values))]
        yield _line(
            SUMMARY,
            (f'<a href="#{_anchor("figures", scan)}">{escape(scan)}</a>', str(len(found)), *ends, escape(peers)),
        )


def _gain(value: float) -> str:
    return f'<span class="slower">{times(value)}</span>' if value < 1 else times(value)


def _even(row: Row) -> bool:
    return row.ratio is not None and row.ratio.low <= 1 <= row.ratio.high


def clearly_slower(row: Row) -> bool:
    """A loss: we are slower than the fastest peer, also by the quartiles."""
    return row.ratio is not None and row.ratio.median > 1 and not _even(row)


def _slower(surely: Sequence[Row], perhaps: Sequence[Row]) -> str:
    """The list of groups in which we are slower, the worst first."""
    lines = [
        f'<li>{_where(row)}: <span class="slower">{row.ratio.median:.3g} times the time</span> of '
        f"{escape(str(row.baseline))} "
        f"({_quartiles(row)})</li>"
        for row in sorted(surely, key=lambda row: -row.ratio.median)
    ]
    lines += [
        f"<li>{_where(row)}: perhaps, {row.ratio.median:.3g} ({_quartiles(row)}) times the time of "
        f"{escape(str(row.baseline))}</li>"
        for row in perhaps
    ]
    return f'<ul class="columns">{"".join(lines)}</ul>' if lines else "<p>In no group of this run.</p>"


def _quartiles(row: Row) -> str:
    """The quartiles of the ratio."""
    return f"{row.ratio.low:.3g} to {row.ratio.high:.3g}" if row.ratio else ""


def _wrong(run: Run) -> str:
    """The wrong rows, which come before all other rows."""
    if not run.wrong:
        return ""
    lines = "".join(f"<li><code>{escape(name)}</code>: {escape(why)}</li>" for name, why in run.wrong.items())
    return (
        f'<p class="bad">These rows have a wrong result, so their speed is not shown:</p><ul class="bad">{lines}</ul>'
    )


# ---- figures ---------------------------------------------------------------------------------------------------------


def _figures(run: Run, sheets: Mapping[str, Sequence[Panel]]) -> str:
    parts = ["<p class='note'>Bands are quartiles. Axes are logarithmic.</p>"]
    for scan in run.scans:
        drawn = _drawn(sheets[scan]) or "<p class='note'>Fewer than three points along any axis: see the rows.</p>"
        parts.append(f'<h3 id="{_anchor("figures", scan)}">{escape(scan)}</h3>\n{drawn}')
    return "\n".join(parts)


def _drawn(panels: Sequence[Panel]) -> str:
    return (
        f'<div class="figures">{"".join(f"<figure>{svg(panel)}</figure>" for panel in panels)}</div>' if panels else ""
    )


AT = {"n": 120, "m": 4, "d": 192}
"""The places where the paper on continual Nyström attention counts."""

CALLED = {
    "full": "full attention",
    "nystrom": "Nyström attention",
    "retroactive": "continual, retroactive",
    "single": "continual, single output",
    "continual retroactive": "continual landmarks, retroactive",
    "continual single": "continual landmarks, single",
    "fixed retroactive": "fixed landmarks, retroactive",
    "fixed single": "fixed landmarks, single",
}
"""Schemes in words for a reader."""


@cache
def _counts() -> str:
    head = (
        f"a step at {escape(words(AT))}",
        "operations, paper",
        "here",
        "kept elements, paper",
        "here",
        "at most, paper",
    )
    rows = (
        _line(head, (escape(CALLED[scheme]), *(f"{count:,.0f}" if count else "&ndash;" for count in counts(scheme))))
        for scheme in SCHEMES
    )
    return f"""
<p>These counts come from formulas, and not from a run. They are means over a stream, for one head and one token. The
counts of the paper on continual Nyström attention are those of its figure 4. The counts of this package have two
operations for each multiply-add of a product. The paper counts differently: a multiply-add counts two in full
attention, and one in Nyström attention.</p>
{_table("Counts of a step", head, rows)}
<p class="note">The states of this package keep the window of keys, values and queries for all landmarks, because a
token that leaves the window is subtracted. The paper's counts for fixed landmarks leave the window out.</p>"""


def counts(scheme: str) -> tuple[float, ...]:
    """The operations that the paper counts and the operations that are executed; and the elements of a head that are
    kept between steps, in the paper and here.

    The last figure is the largest number of elements that the paper holds at a time. Figures are 0 if a scheme keeps
    nothing.
    """
    n, m, d = AT.values()
    operations = paper_operations(scheme, n, m, d), executed_on_average(scheme, n, m, d)
    if scheme in SCHEMES[:2]:
        return *operations, 0, 0, 0
    here = state_elements(n, m, d, d) if " " in scheme else attention_state_elements(n, d, d, scheme == "retroactive")
    memory = paper_memory(scheme, n, m, d)
    return *operations, memory.between, here, memory.peak


# ---- rows ------------------------------------------------------------------------------------------------------------

HEAD = (
    "implementation",
    "time",
    "spread",
    "ratio (quartiles)",
    "extra memory",
    "beyond results",
    "GFLOP/s",
    "share of floor",
    "error",
)


def _rows(run: Run) -> str:
    parts = [
        "<p class='note'>Our rows are coloured. Ratios are to the fastest baseline of the group, whose ratio is 1.</p>"
    ]
    for scan, rows in run.scans.items():
        groups = {name: members for name, members in run.groups.items() if members[0].scan == scan}
        once, each = labels(rows)
        lines = [line for name, members in groups.items() for line in _group(each[name], members)]
        about = f'<p class="note">{escape(once[:1].upper() + once[1:])}.</p>' if once else ""
        parts.append(
            f'<h3 id="{_anchor("rows", scan)}">{escape(scan)}</h3>\n{about}\n{_table(f"Rows of {scan}", HEAD, lines)}'
        )
    return "\n".join(parts)


def _group(label: str, members: Sequence[Row]) -> Iterator[str]:
    title = f"{escape(label)} <code>{escape(members[0].group)}</code>"
    if members[0].noisy:
        title += f" <strong>noisy: other programs took {members[0].others:.0%} of the processors</strong>"
    yield f'<tr><th class="group" colspan="{len(HEAD)}" scope="rowgroup"><span>{title}</span></th></tr>'
    best = fastest(members)
    for row in members:
        yield _line(HEAD, _cells(row), "ours" if row is best else "")


def _cells(row: Row) -> Sequence[str]:
    return (
        escape(row.implementation),
        readable(row.seconds.median),
        f"{row.spread:.1%}",
        f"{row.ratio.median:.3g} ({_quartiles(row)})" if row.ratio else "&ndash;",
        f"{row.extra_memory / MIB:.1f} MiB",
        beyond_results(row),
        f"{row.gflops:,.3g}",
        f"{row.share:.1%} ({escape(str(row.bound))})" if row.share else "&ndash;",
        f"{row.error:.0e}",
    )


def _missing(run: Run) -> str:
    quick = (
        "<p>A quick run leaves out most sizes, and the definition that the kernels are tested against.</p>"
        if run.quick
        else ""
    )
    if not run.not_measured:
        return quick + "<p>Everything that was requested was measured.</p>"
    rows = (
        f'<tr><th scope="row"><code>{escape(name)}</code></th><td class="words">{escape(why)}</td></tr>'
        for name, why in run.not_measured.items()
    )
    return quick + _table("What was not measured, and why", ("row", "why"), rows)


# ---- two runs --------------------------------------------------------------------------------------------------------


CHANGES = ("row", "verdict", "change", "noise", "old", "new")


def _changes(comparison: Comparison) -> str:
    counts = (
        ", ".join(f"{count} {verdict}" for verdict, count in comparison.counts.most_common())
        or "no row of ours is in both runs"
    )
    basis = "".join(f"<li>{escape(line)}</li>" for line in compare.basis(comparison))
    told = [_change(change, comparison) for change in compare.ordered(comparison) if change.notable]
    quiet = [_change(change, comparison) for change in compare.ordered(comparison) if not change.notable]
    first = (
        _table("Changes beyond the noise", CHANGES, told) if told else "<p>Nothing changed by more than the noise.</p>"
    )
    rest = (
        f"<details><summary>{len(quiet)} rows without a "
        f"change</summary>{_table('The others', CHANGES, quiet)}</details>"
        if quiet
        else ""
    )
    return f"<p>{escape(counts)}.</p><ul>{basis}</ul>{first}{rest}"


def _change(change: Change, comparison: Comparison) -> str:
    kind = {"slower": "slower", "gone": "slower", "faster": "faster"}.get(change.verdict, "")
    kind = "bad" if change.wrong or change.less_exact or change.memory == "more" else kind
    old, new = (compare.shown(row, comparison.by) for row in (change.old, change.new))
    verdict = f'<span class="{kind}">{escape(compare.spoken(change))}</span>'
    name = f"{escape(change.implementation)}<br><code>{escape(change.group)}</code>"
    return _line(CHANGES, (name, verdict, compare.percent(change.change), f"&plusmn;{_noise(change)}", old, new))


def _noise(change: Change) -> str:
    return compare.percent(change.noise).lstrip("+")


# ---- definitions -----------------------------------------------------------------------------------------------------


def _definitions(run: Run) -> str:
    figures = _pairs({name: f"{value:.1e}" for name, value in run.figures.items()})
    single = f"<h3>Single figures</h3>{figures}" if run.figures else ""
    return f"{_text('definitions.html')}\n{_rates(run)}\n{single}"


def _rates(run: Run) -> str:
    """The rates from which floors are computed."""
    rates = run.rates
    if not rates:
        return ""
    dtypes = list(dict.fromkeys(dtype for rate in rates.values() for dtype in rate["matrix"]))
    head = ("threads" if run.device == "cpu" else "device", "exponentials", "memory", *map(escape, dtypes))
    rows = (
        _line(
            head,
            (
                escape(name),
                f"{rate['exponentials'] / 1e9:,.3g} G/s",
                f"{rate['memory'] / 1e9:,.3g} GB/s",
                *(
                    f"{rate['matrix'][dtype] / 1e9:,.4g} GFLOP/s" if dtype in rate["matrix"] else "&ndash;"
                    for dtype in dtypes
                ),
            ),
        )
        for name, rate in rates.items()
    )
    return f"<h3>Rates of this machine</h3>{_table('Rates that floors are computed with', head, rows)}"
