"""docs/measured.md, the README's headline table and the plot are those of the newest committed run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench.report import measured, plots
from bench.runs import Run, Spread, beyond_results, load
from bench.scans import all_cases
from bench.scans.attention import short_cases
from cmab_kernels.nystrom.costs import executed_on_average, paper_operations

from . import synthetic

STALE = "stale: python -m bench.report.measured"
GROUP = "latent-forward-float32-D16-N1000"
TABLE = f"""## Some

| all float32 | torch |
|---|---|
| attention | {{{GROUP}}} |
| nothing | {{absent}} |

torch is its attention. {{where}}
"""


@pytest.fixture(scope="module")
def whole() -> Run:
    return load(measured.WHOLE)


@pytest.fixture(scope="module")
def narrow() -> Run:
    return load(measured.NARROW)


def test_the_page_is_of_the_committed_runs(whole: Run, narrow: Run):
    assert measured.PAGE.read_text() == measured.page(whole, narrow), STALE


def test_the_readme_has_the_headline_of_the_committed_runs(whole: Run, narrow: Run):
    assert measured.HEADLINE.have(measured.headline(whole, narrow)), STALE


def test_the_page_of_losses_has_the_short_calls_of_the_committed_runs():
    assert measured.LOSSES.have(measured.short_calls(load(measured.SHORT), load(measured.NARROW_SHORT))), STALE


@pytest.mark.parametrize(("operator", "path"), measured.PLOTS.items())
def test_plots_are_of_the_committed_run(operator: str, path: Path, whole: Run):
    with Image.open(path) as plot:
        assert (plot.text["Run"], plot.text["Digest"]) == (whole.name, plots.digest(whole, operator)), STALE


def test_every_row_of_a_table_is_in_the_committed_runs(whole: Run, narrow: Run):
    text = measured.page(whole, narrow)
    assert text.count("\n| ") == "".join(measured.TABLES).count("\n| ") > 50
    narrowed = [line for line in measured.TABLES[0].splitlines() if "{narrow}" in line]
    assert (
        whole.groups.keys() >= measured.shown(measured.TABLES)
        and narrow.groups.keys() >= measured.shown(narrowed)
        and len(narrowed) == 7
    )


def test_a_run_of_the_page_measures_what_is_shown(monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, Any]] = []
    sets = {"native_instruction_set": "avx2", "torch_instruction_set": "AVX512"}
    monkeypatch.setattr(measured.session, "measured", lambda **what: asked.append(what))
    monkeypatch.setattr(measured, "save", lambda run, path: asked[-1].update(path=path.name))
    monkeypatch.setattr(measured.provenance, "machine", lambda: sets)
    monkeypatch.setattr(measured.provenance, "dirty", lambda: True)
    with pytest.raises(SystemExit, match="uncommitted changes"):
        measured.measure(measured.WHOLE)
    monkeypatch.setattr(measured.provenance, "dirty", lambda: False)
    for path in (measured.NARROW, measured.NARROW_SHORT):
        with pytest.raises(SystemExit, match=r"torch': 'avx512'.* CMAB_KERNELS_ISA=avx2 and ATEN_CPU_CAPABILITY=avx2"):
            measured.measure(path)
    sets["torch_instruction_set"] = "AVX2"
    for path in (measured.NARROW, measured.WHOLE, measured.SHORT, measured.NARROW_SHORT):
        measured.measure(path)
    narrow, page, short, narrow_short = asked
    assert [what["path"] for what in asked] == ["avx2.json", "page.json", "short.json", "short_avx2.json"]
    assert narrow["groups"] < page["groups"] <= {case.name for case in all_cases()} and set(page["scans"]) == set(
        plots.TITLES
    )
    assert short["groups"] == narrow_short["groups"] == {case.name for case in short_cases()}


def test_labels_say_how_many_operations_are_saved():
    """The texts of the steps that are compared with full attention, for 16 heads of 12 with 4 landmarks."""
    found = re.findall(
        r"1 / ([\d,]+) of its.*?1 / ([\d,]+) of those executed \| \{nystrom-step-(\w+)-.*-n(\d+)-",
        "".join(measured.TABLES),
    )
    assert len(found) == 6
    for paper, executed, landmarks, window in found:
        step, n = f"{landmarks} single", int(window)
        assert paper == f"{paper_operations('full', n, 4, 192) / paper_operations(step, n, 4, 192):,.0f}"
        assert executed == f"{executed_on_average('full', n, 4, 12) / executed_on_average(step, n, 4, 12):,.0f}"


def saved(folder: Path, name: str, **changes: object) -> Run:
    return synthetic.written(folder, synthetic.run(**{"quick": False} | changes), name)


def test_a_table_says_what_it_shows(tmp_path: Path):
    run = saved(tmp_path, "some")
    ours, theirs = (
        next(row for row in run.groups[GROUP] if row.implementation == name) for name in ("native", synthetic.SDPA)
    )
    assert ours.ratio
    heading, _, head, _, *rows, _, caption = measured.filled(TABLE, run).splitlines()
    assert (heading, head) == ("## Some", "| all float32 | torch |")
    times = [f"{row.seconds.median * 1e6:.3g} us, {scratch} MiB" for row, scratch in ((theirs, "+0.1"), (ours, "+0.6"))]
    assert rows == [
        f"| attention | {times[0]} | {times[1]} | **{ours.ratio.median:.2f}** ({ours.ratio.low:.2f} to "
        f"{ours.ratio.high:.2f}) |"
    ]
    assert (
        caption
        == "torch is its attention. A processor <of 2 cores> (avx2), 2 threads, torch 2.13.0, 2026-01-02, commit "
        "0123456789, `some.json`."
    )
    assert "commit 0123456789 **with uncommitted changes**, `" in measured.filled(TABLE, replace(run, dirty=True))
    assert (
        measured.filled(TABLE, replace(run, rows=tuple(replace(row, others=0.5) for row in run.rows))).count(
            "), noisy |\n"
        )
        == 1
    )
    assert measured.filled(TABLE.replace(GROUP, "absent"), run) == ""


def test_short_calls_tell_losses_by_the_rule_of_the_report(whole: Run):
    """A loss is bold; a ratio whose quartiles are on both sides of 1 is not; a noisy row has no figure."""

    def made(*ratios: tuple[float, float, float], others: float = 0.0) -> Run:
        case, row = next(short_cases()), next(row for row in whole.rows if row.implementation == "native")
        parameters = [{**case.parameters, "D": width} for width in (16, 64)]
        rows = [
            replace(row, ratio=Spread(*ratio), parameters=each, others=others)
            for ratio, each in zip(ratios, parameters, strict=True)
        ]
        return replace(whole, rows=tuple(rows))

    text = measured.short_calls(made((0.9, 0.8, 0.95), (1.2, 1.1, 1.3)), made((1.04, 0.98, 1.1), (1.3, 1.2, 1.4)))
    assert "\n| 1 over 128 | 0.90 | **1.20** | 1.04 | **1.30** |\n" in text
    assert "| noisy | noisy |" in measured.short_calls(
        made((0.9, 0.8, 0.95), (1.2, 1.1, 1.3)), made((1, 1, 1), (1, 1, 1), others=0.3)
    )


def test_a_column_of_another_run(tmp_path: Path):
    """The table shows the ratio of another run next to its own, and says where it was measured."""
    run, narrow = saved(tmp_path, "some"), saved(tmp_path, "narrow", quick=True)
    (ours,) = (row for row in narrow.groups[GROUP] if row.ours)
    assert ours.ratio
    table = TABLE.replace(f"{{{GROUP}}} |", f"{{{GROUP}}} | {{narrow}} |").replace("{where}", "{where narrow}")
    *_, row, _, caption = measured.filled(table, run, narrow).splitlines()
    assert row.endswith(f" | {ours.ratio.median:.2f} |")
    assert caption.endswith("`narrow.json`.")


@pytest.mark.parametrize(
    ("scratch", "text"),
    [(-1000, "0.0 MiB"), (0, "0.0 MiB"), (1000, "0.0 MiB"), (-(2**20), "-1.0 MiB"), (2**20, "+1.0 MiB")],
)
def test_a_little_less_than_no_memory_is_none(run: Run, scratch: int, text: str):
    assert beyond_results(replace(run.rows[0], extra_memory=run.rows[0].result_memory + scratch)) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.234, "1.23"), (0.0812, "0.081"), (1 / 4321, "1 / 4,300"), (0.0009, "1 / 1,100")]
)
def test_ratios_have_two_digits(ratio: float, text: str):
    assert measured._ratio(ratio) == text


BEGIN, END = (f"<!-- headline table: {which} -->" for which in ("begin", "end"))


def test_drift_between_the_marks_is_seen():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = measured.HEADLINE.within(text, "25 ms")
    assert once == text.replace("old\n", "25 ms\n") and measured.HEADLINE.within(once, "25 ms") == once


@pytest.mark.parametrize("text", ["", BEGIN, END + BEGIN, 2 * (BEGIN + END)])
def test_a_page_without_its_marks_is_refused(text: str):
    with pytest.raises(SystemExit, match=r"README\.md must hold"):
        measured.HEADLINE.within(text, "table")
