"""docs/measured.md, the README's headline table and the plot are those of the newest committed run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from bench.report import measured, plots
from bench.runs import Run, beyond_results
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
def newest() -> Run:
    run = measured.newest_run()
    assert run is not None
    return run


def test_the_page_is_of_the_newest_committed_run(newest: Run):
    assert measured.PAGE.read_text() == measured.page(newest, measured.runs_alone(), measured.load(measured.NARROW)), STALE


def test_the_readme_has_the_headline_of_the_newest_committed_run(newest: Run):
    text = measured.README.read_text()
    assert measured.insert(text, measured.headline(newest, measured.load(measured.NARROW))) == text, STALE


def test_the_plot_is_of_the_newest_committed_run(newest: Run):
    with Image.open(measured.PLOT) as plot:
        assert (plot.text["Run"], plot.text["Digest"]) == (newest.name, plots.digest(newest, plots.FIRST)), STALE


@pytest.mark.parametrize("operator, path", measured.ALONE.items())
def test_the_plot_of_an_operator_is_of_its_own_run(operator: str, path: Path):
    (run,) = (run for run in measured.runs_alone() if run.name == operator)
    with Image.open(path) as plot:
        assert (plot.text["Run"], plot.text["Digest"]) == (run.name, plots.digest(run, operator)), STALE


def test_every_row_of_a_table_is_in_a_committed_run(newest: Run):
    text = measured.page(newest, measured.runs_alone(), measured.load(measured.NARROW))
    assert text.count("\n| ") == "".join(measured.TABLES).count("\n| ") > 50


def test_labels_say_how_many_operations_are_saved():
    """The texts of the steps beside full attention, of 16 heads of 12 with 4 landmarks."""
    found = re.findall(r"1 / ([\d,]+) of its.*?1 / ([\d,]+) of those executed \| \{nystrom-step-(\w+)-.*-n(\d+)-", "".join(measured.TABLES))
    assert len(found) == 6
    for paper, executed, landmarks, window in found:
        step, n = f"{landmarks} single", int(window)
        assert paper == f"{paper_operations('full', n, 4, 192) / paper_operations(step, n, 4, 192):,.0f}"
        assert executed == f"{executed_on_average('full', n, 4, 12) / executed_on_average(step, n, 4, 12):,.0f}"


def saved(folder: Path, name: str, **changes: object) -> Run:
    return synthetic.written(folder, synthetic.run(**{"quick": False} | changes), name)


def test_the_newest_full_run_is_taken(tmp_path: Path):
    assert measured.newest_run(tmp_path) is None
    saved(tmp_path, "old", date="2026-01-01T00:00:00")
    saved(tmp_path, "new", date="2026-01-02T00:00:00")
    saved(tmp_path, "quick", date="2027-01-01T00:00:00", quick=True)
    (tmp_path / "gpu.json").write_text('{"gpu_check": 2}')
    found = measured.newest_run(tmp_path)
    assert found is not None and found.name == "new"


def test_a_table_says_what_it_shows(tmp_path: Path):
    run = saved(tmp_path, "some")
    ours, theirs = (next(row for row in run.groups[GROUP] if row.implementation == name) for name in ("native", synthetic.SDPA))
    assert ours.ratio
    heading, _, head, _, *rows, _, caption = measured.filled(TABLE, run).splitlines()
    assert (heading, head) == ("## Some", "| all float32 | torch |")
    times = [f"{row.seconds.median * 1e6:.3g} us, {scratch} MiB" for row, scratch in ((theirs, "+0.1"), (ours, "+0.6"))]
    assert rows == [
        f"| attention | {times[0]} | {times[1]} | **{ours.ratio.median:.2f}** ({ours.ratio.low:.2f} to {ours.ratio.high:.2f}) |"
    ]
    assert caption == "torch is its attention. A processor <of 2 cores> (avx2), 2 threads, torch 2.13.0, 2026-01-02, `some.json`."
    assert measured.filled(TABLE.replace(GROUP, "absent"), run) == ""


def test_a_column_of_another_run(tmp_path: Path):
    """Its ratio stands beside that of the run that the table is of, and where it was measured."""
    run, narrow = saved(tmp_path, "some"), saved(tmp_path, "narrow", quick=True)
    (ours,) = (row for row in narrow.groups[GROUP] if row.ours)
    assert ours.ratio
    table = TABLE.replace(f"{{{GROUP}}} |", f"{{{GROUP}}} | {{narrow}} |").replace("{where}", "{where narrow}")
    *_, row, _, caption = measured.filled(table, run, narrow).splitlines()
    assert row.endswith(f" | {ours.ratio.median:.2f} |")
    assert caption.endswith("`narrow.json`.")


@pytest.mark.parametrize(
    ("scratch", "text"), [(-1000, "0.0 MiB"), (0, "0.0 MiB"), (1000, "0.0 MiB"), (-(2**20), "-1.0 MiB"), (2**20, "+1.0 MiB")]
)
def test_a_little_less_than_no_memory_is_none(run: Run, scratch: int, text: str):
    assert beyond_results(replace(run.rows[0], extra_memory=run.rows[0].result_memory + scratch)) == text


@pytest.mark.parametrize(("ratio", "text"), [(1.234, "1.23"), (0.0812, "0.081"), (1 / 4321, "1 / 4,300"), (0.0009, "1 / 1,100")])
def test_ratios_have_two_digits(ratio: float, text: str):
    assert measured._ratio(ratio) == text


def test_drift_between_the_marks_is_seen():
    text = f"before\n{measured.BEGIN}\nold\n{measured.END}\nafter\n"
    once = measured.insert(text, "25 ms")
    assert once == text.replace("old\n", "25 ms\n") and measured.insert(once, "25 ms") == once != measured.insert(once, "24 ms")


@pytest.mark.parametrize("text", ["", "{begin}", "{end}{begin}", "{begin}{end}{begin}{end}"])
def test_a_readme_without_its_marks_is_refused(text: str):
    with pytest.raises(SystemExit, match=r"README\.md must hold"):
        measured.insert(text.format(begin=measured.BEGIN, end=measured.END), "table")
