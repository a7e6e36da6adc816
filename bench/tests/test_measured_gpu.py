"""docs/measured_gpu.md and the README's GPU table are those of the newest committed check, and every row of the page is a case of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.report import measured_gpu
from bench.report.marks import put

STALE = "stale: python -m bench.report.measured_gpu"


def test_the_page_is_of_the_newest_check() -> None:
    text = measured_gpu.page(measured_gpu.newest())
    assert measured_gpu.PAGE.read_text() == text, STALE
    readme = measured_gpu.README.read_text()
    assert put(readme, measured_gpu.headline(text), measured_gpu.BEGIN, measured_gpu.END, "README.md") == readme, STALE


def test_every_row_was_timed() -> None:
    """A row without its figures would be left out, and nobody would miss it."""
    check = json.loads(measured_gpu.newest().read_text())
    places = set(measured_gpu.PLACE.findall(measured_gpu.TEMPLATE.read_text()))
    missing = places - measured_gpu.timed(check).keys() - measured_gpu.facts(check, "").keys()
    assert not missing


def _row(implementation: str, seconds: float, **other: Any) -> dict[str, Any]:
    return {"implementation": implementation, "seconds": [seconds] * 3, "extra_memory": 2**20, "result_memory": 0, **other}


def test_the_fastest_of_both_sides_are_compared() -> None:
    rows = [_row("triton", 2e-3, floor=1e-3, bound="memory"), _row("cuda", 3e-3), _row("triton, tf32", 1e-3), _row("reference", 1e-6)]
    peers = [_row("slow", 9e-3), _row("quick", 4e-3)]
    wrong = {"implementation": "hasty", "problem": "its result is wrong here"}
    assert measured_gpu.compared([*rows, *peers, wrong]) == "quick | 4 ms, +1.0 MiB | 2 ms, +1.0 MiB | **0.5** | 50% (memory)"
    assert measured_gpu.compared([*rows, wrong]) == "none was right | | 2 ms, +1.0 MiB | | 50% (memory)"
    assert measured_gpu.compared(rows) == "not timed | | 2 ms, +1.0 MiB | | 50% (memory)"
    assert measured_gpu.compared(peers) == ""


def test_peers_that_were_timed_earlier_are_marked(tmp_path: Path) -> None:
    """They stand in for no peer that was timed beside ours."""
    before = tmp_path / "before.json"
    rows = [_row(name, 8e-3, group=group, key=name) for group in ("alone", "beside") for name in ("triton", "old")]
    before.write_text(json.dumps({"sections": {"timings": {"rows": rows}}}))
    now = {"alone": [_row("triton", 2e-3)], "beside": [_row("triton", 2e-3), _row("new", 4e-3)]}
    found = measured_gpu.with_earlier(now, before)
    assert measured_gpu.compared(found["alone"]) == "old† | 8 ms, +1.0 MiB | 2 ms, +1.0 MiB | **0.25** | "
    assert measured_gpu.compared(found["beside"]).startswith("new |")
    assert measured_gpu.with_earlier(now, tmp_path / "absent.json") == now


def test_a_line_without_figures_is_left_out() -> None:
    assert measured_gpu.filled("| a | {absent} |", {}, {}) is None
    assert measured_gpu.filled("on {gpu}", {}, {"gpu": "one"}) == "on one"


@pytest.mark.parametrize("key, shown", [("case; triton", True), ("case; triton, not captured", False)])
def test_calls_from_python_are_not_shown(key: str, shown: bool) -> None:
    check = {"sections": {"timings": {"rows": [{"key": key, "group": "case", "seconds": [1.0] * 3}]}}}
    assert ("case" in measured_gpu.timed(check)) == shown
