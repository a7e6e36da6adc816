"""The README's tables and plot are those of the newest committed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from bench.report import plots, readme
from bench.report.runs import load
from bench.scans.attention import SDPA

from .cases import MIB


@pytest.mark.parametrize("shown", readme.TABLES, ids=lambda shown: shown.mark)
def test_readme_shows_the_newest_committed_run(shown):
    path = readme.newest_run(shown)
    if path is None:
        pytest.skip(f"no run in bench/results has rows of the {shown.mark}")
    text = (readme.ROOT / "README.md").read_text()
    assert readme.insert(text, readme.table(path, shown), shown) == text, "stale: python -m bench.report.readme"


def test_the_plot_is_of_the_newest_committed_run():
    path = readme.newest_run(readme.PLOTTED)
    if path is None:
        pytest.skip("no run in bench/results has what the plot shows")
    with Image.open(readme.PLOT) as plot:
        assert (plot.text["Run"], plot.text["Digest"]) == (path.stem, plots.digest(load(path))), "stale: python -m bench.report.readme"


HEADLINE, ATTENTION, INTENTION, NYSTROM = readme.TABLES


def run_of(date: str, median: float, shown: readme.Table = ATTENTION, **more: object) -> dict:
    def row(name: str, seconds: float) -> dict:
        info = {
            "implementation": name,
            "ours": name == "native",
            "extra_memory": 3 * MIB,
            "result_memory": 2 * MIB,
            "baseline": SDPA,
        }
        info |= {"ratio": 0.25, "ratio_quartiles": [0.2, 0.3]} | more
        return {"group": next(iter(shown.labels)), "extra_info": info, "stats": {"median": seconds}}

    machine = {"cpu": {"brand_raw": "a processor"}, "native_instruction_set": "avx2", "versions": {"torch": "2"}}
    rows = [row("native", median), row(SDPA, 4 * median)]
    return {"datetime": date, "benchmarks": rows, "machine_info": machine, "threads": 2, "commit_info": {"id": "0123456789"}}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    runs = {
        "old": run_of("2026-01-01", 0.5),
        "new": run_of("2026-01-02", 0.025),
        "other": run_of("2026-01-03", 0.001, INTENTION, threads=1),
        "latest": run_of("2027-01-01", 9.0),
        "gpu": {"datetime": "2028-01-01"},
    }
    for name, run in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    return tmp_path


def test_a_table_is_of_the_newest_run_that_has_its_rows(runs: Path):
    assert readme.newest_run(ATTENTION, runs) == runs / "new.json"
    assert readme.newest_run(INTENTION, runs) == runs / "other.json"
    (runs / "other.json").unlink()
    assert readme.newest_run(INTENTION, runs) is None


def test_tables_say_what_they_show(runs: Path):
    table = readme.table(runs / "new.json", ATTENTION)
    assert "| forward, float32, 8 heads of 8 | 100 ms, +1.0 MiB | 25 ms, +1.0 MiB | **0.25** (0.20 to 0.30) |" in table
    assert "2 threads" in table and "nn.MultiheadAttention" in table
    table = readme.table(runs / "other.json", INTENTION)
    assert "| solve, 1,024 systems, 16 x 16 | 4 ms, +1.0 MiB | 1 ms, +1.0 MiB | **0.25** (0.20 to 0.30) |" in table
    assert "1 thread," in table and "Cholesky" in table
    (runs / "steps.json").write_text(json.dumps(run_of("2026-01-04", 2e-6, NYSTROM, ratio=1 / 4321, ratio_quartiles=[0.0009, 0.001])))
    table = readme.table(runs / "steps.json", NYSTROM)
    assert "| one token, fixed landmarks | 8 us, +1.0 MiB | 2 us, +1.0 MiB | **1 / 4,300** (1 / 1,100 to 0.001) |" in table


def test_drift_of_a_table_is_seen_and_the_other_is_left_alone():
    text = "before\n" + "".join(f"{shown.begin}\nold {shown.mark}\n{shown.end}\nafter\n" for shown in readme.TABLES)
    for shown in readme.TABLES:
        once = readme.insert(text, "25 ms", shown)
        assert once == text.replace(f"old {shown.mark}\n", "25 ms\n")
        assert readme.insert(once, "25 ms", shown) == once
        assert readme.insert(once, "24 ms", shown) != once


@pytest.mark.parametrize("shown", readme.TABLES, ids=lambda shown: shown.mark)
@pytest.mark.parametrize("text", ["", "{begin}", "{end}{begin}", "{begin}{end}{begin}{end}"])
def test_a_readme_without_its_marks_is_refused(text, shown):
    with pytest.raises(SystemExit, match=r"README\.md must hold"):
        readme.insert(text.format(begin=shown.begin, end=shown.end), "table", shown)
