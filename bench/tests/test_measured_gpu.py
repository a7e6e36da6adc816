"""docs/measured_gpu.md and the README's GPU table are those of the newest committed check, and every row of the page is
a case of this check."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from bench import provenance
from bench.floors import Rates, floors
from bench.report import measured_gpu, measured_gpu_facts
from bench.scans import attention, intention
from bench.scans.case import Case

STALE = "stale: python -m bench.report.measured_gpu"
NEWEST = json.loads(measured_gpu.newest().read_text())
RATES = {
    "exponentials": 4e12,
    "memory": 3e12,
    "matrix": {"float64": 6e13, "float32": 1e14, "tf32": 4e14, "bfloat16": 8e14, "float16": 8e14},
}


@pytest.fixture(scope="module")
def text() -> str:
    """The page; git must know the commit that the check names."""
    if provenance.output("git", "-C", str(provenance.ROOT), "cat-file", "-t", NEWEST["machine"]["commit"]) != "commit":
        pytest.skip("git does not know the commit of the check here")
    return measured_gpu.page(measured_gpu.newest())


def test_the_page_is_of_the_newest_check(text: str) -> None:
    assert measured_gpu.PAGE.read_text() == text, STALE
    assert measured_gpu.HEADLINE.have(measured_gpu.headline(text)), STALE


def test_page_and_readme_say_what_was_run(text: str) -> None:
    """The commit, the number of tests that were run, and the kernels that have changed since."""
    for told in (text.split("\n## ")[0], measured_gpu.headline(text)):
        assert f"commit {NEWEST['machine']['commit'][:7]}" in told and re.search(
            r"[\d,]+ of [\d,]+ GPU tests were run, \d+ failed", told
        )
        assert re.search(r"\d+ of the \d+ files of kernels for GPUs have changed since that commit", told)


def test_every_row_was_timed(text: str) -> None:
    """A row without figures would be left out without an error."""
    rows = [line for line in measured_gpu.TEMPLATE.read_text().splitlines() if line.startswith("| ")]
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == len(rows) > 60
    table = measured_gpu.Table(NEWEST, None, measured_gpu.cases())
    assert table.groups.keys() <= table.cases.keys(), "each group that was timed is a case"


# ---- a row


GROUP = "forward-float32-B1-4x16-L128-N1000"


def _row(implementation: str, seconds: float | None, **other: Any) -> dict[str, Any]:
    timed = {"problem": "too slow"} if seconds is None else {"seconds": [seconds] * 3}
    named = {
        "implementation": implementation,
        "group": GROUP,
        "scan": "latent_attention",
        "key": f"{GROUP}; {implementation}",
    }
    return {**named, **timed, "extra_memory": 2**20, "result_memory": 0, **other}


def _cells(*rows: Any, case: Case | None = None, before: Any = None, place: str = GROUP) -> str:
    run = {"sections": {"timings": {"rows": [{"key": "rates", "rates": RATES}, *rows]}}}
    earlier = {"sections": {"timings": {"rows": before}}} if before else None
    return measured_gpu.Table(run, earlier, {GROUP: case or attention.attention(keys=0)}).cells(place)


NAIVE = _row("naive", 9e-3)


def test_what_auto_takes_is_compared() -> None:
    """Our row is the row of "auto", not the fastest row; the peer is the fastest peer with a right result."""
    rows = [
        _row("triton", 2e-3),
        _row("cuda", 3e-3),
        _row("auto", 4e-3),
        _row("reference", 1e-6),
        NAIVE,
        _row("quick", 4e-3),
    ]
    wrong = {"implementation": "hasty", "group": GROUP, "key": "hasty", "problem": "its result is wrong here"}
    assert _cells(*rows, wrong) == "quick | 4 ms, +1.0 MiB | 4 ms, +1.0 MiB | **1** | "
    assert _cells(rows[0], _row("naive", None), wrong) == "none was right | | 2 ms, +1.0 MiB |  | "
    assert _cells(rows[0], _row("naive", None), _row("quick", 4e-3)).startswith("quick | ")
    assert _cells(NAIVE) == "" and _cells(_row("triton", None), NAIVE) == "not compared | | too slow | | "


def test_no_ratio_without_plain_torch_in_float32() -> None:
    """Plain torch is the peer if no library has a fast kernel; otherwise the others are compared."""
    rows = [_row("triton", 2e-3), _row("scaled_dot_product_attention", 9e-2)]
    assert _cells(*rows) == "no fair peer measured | | 2 ms, +1.0 MiB |  | "
    assert _cells(*rows, NAIVE).startswith("naive | 9 ms")
    other = [{**row, "scan": "intention"} for row in rows]
    assert _cells(*other).startswith("scaled_dot_product_attention | 90 ms")


def test_tf32_is_compared_with_tf32() -> None:
    rows = [_row("triton", 2e-3), _row("triton, tf32", 1e-3), NAIVE, _row("naive, tf32", 4e-3)]
    assert _cells(*rows).startswith("naive | 9 ms, +1.0 MiB | 2 ms")
    assert _cells(*rows, place=f"{GROUP}; tf32").startswith("naive, tf32 | 4 ms, +1.0 MiB | 1 ms")


def test_a_peer_of_another_formula_is_said_to_be_one() -> None:
    rows = [_row("triton", 2e-3, scan="intention"), _row("scaled_dot_product_attention", 4e-3)]
    assert _cells(*rows, case=intention.layer(8)).startswith(
        "scaled_dot_product_attention (computes something else) | 4 ms"
    )


def test_peers_of_an_earlier_run_are_marked() -> None:
    """Peers of an earlier run do not replace a peer that was timed together with our kernel."""
    before = [_row("triton", 8e-3), {**NAIVE, "implementation": "naive"}]
    assert _cells(_row("triton", 2e-3), before=before).startswith("naive† | 9 ms, +1.0 MiB | 2 ms")
    assert _cells(_row("triton", 2e-3), _row("naive", 4e-3), before=before).startswith("naive | 4 ms")


def test_the_share_is_of_the_floor_of_the_passes_one_after_the_other() -> None:
    """The floor uses the rates of the run."""
    case = attention.attention(keys=10**6, backward=True)
    least = floors(case.work, Rates(**RATES))
    assert len(case.work) == 2 and _cells(_row("triton", 2 * least.seconds), NAIVE, case=case).endswith(
        f" | 50% ({least.bound})"
    )


def test_a_line_without_figures_is_left_out() -> None:
    table = measured_gpu.Table({"sections": {"timings": {"rows": [{"key": "rates", "rates": RATES}]}}}, None, {})
    assert measured_gpu.filled("| a | {absent} |", table, {}) is None
    assert measured_gpu.filled("on {gpu}{empty}", table, {"gpu": "one", "empty": ""}) == "on one"


@pytest.mark.parametrize("key, shown", [("case; triton", True), ("case; triton, not captured", False)])
def test_calls_from_python_are_not_shown(key: str, shown: bool) -> None:
    check = {"sections": {"timings": {"rows": [{"key": key, "group": "case", "seconds": [1.0] * 3}]}}}
    assert ("case" in measured_gpu.timed(check)) == shown


# ---- the run


KERNELS = {
    "csrc/solve/solve.cu": b"1",
    "cmab_kernels/attention/triton/forward.py": b"1",
    "cmab_kernels/attention/triton/gone.py": b"1",
}


def _facts(monkeypatch: pytest.MonkeyPatch, now: dict[str, bytes], **machine: Any) -> dict[str, str]:
    monkeypatch.setattr(provenance, "sources_of", lambda commit: KERNELS)
    monkeypatch.setattr(provenance, "sources", lambda: now)
    known = {
        "gpu": "one",
        "driver_version": "1",
        "date": "2026-01-01",
        "commit": 40 * "a",
        "versions": {"torch": "2", "triton": "3"},
        "kernels": provenance.kernel_digests(KERNELS),
    }
    rows = [
        {"key": "a", "ok": True},
        {"key": "tests/b", "ok": False},
        {"key": "c", "ok": True, "passed over": "Skipped: one GPU"},
    ]
    suite = {"rows": rows, "listed": 1005, "complete": False, "problem": "stopped after 5 s"}
    timings = {"rows": [{"key": "rates", "rates": RATES}], "complete": True, "problem": ""}
    check = {
        "machine": known | {"sources": provenance.digest(KERNELS)} | machine,
        "sections": {"suite": suite, "timings": timings},
    }
    return measured_gpu_facts.facts(check, "file")


def test_coverage_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = _facts(monkeypatch, KERNELS)
    assert told["ran"] == "3 of 1,005 GPU tests were run, 1 failed" and told["wrong"] == "\n- `b`"
    assert told["suite"] == "1 of 1,005 passed, 1 failed, 1 skipped (one GPU), 1,002 not run (stopped after 5 s)"
    assert told["sections"].startswith(
        "finished: timings; begun and not finished: suite (stopped after 5 s); not begun: ridge_timings"
    )


def test_kernels_that_have_changed_are_told_by_their_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests are those that the run recorded. Files that are not kernels do not count."""
    now = KERNELS | {"csrc/solve/solve.cu": b"2", "csrc/solve/new.cuh": b"1", "cmab_kernels/api.py": b"2"}
    del now["cmab_kernels/attention/triton/gone.py"]
    expected = "2 of the 3 files of kernels for GPUs have changed since that commit or are new, and 1 are gone"
    told = _facts(monkeypatch, now)
    assert told["changed"] == expected
    assert (
        told["changed files"] == "\n- `csrc/solve`: new.cuh, solve.cu\n- gone: `cmab_kernels/attention/triton/gone.py`"
    )
    before = {name.replace("/triton/", "/kernels/"): value for name, value in provenance.kernel_digests(now).items()}
    for same in (provenance.kernel_digests(now), before):
        assert _facts(monkeypatch, now, kernels=same)["changed"].startswith("0 of the 3 files")


@pytest.mark.parametrize(
    ("name", "code", "changed"),
    [
        ("cmab_kernels/intention/solve/cuda.py", 'import os\n\ndef f(x):\n    return "#" if x else "a"\n', '"a"'),
        ("csrc/solve/solve.cu", 'const char* f(int x) {\n  return x / 2 ? "//" : "a";\n}\n', '"a"'),
    ],
)
def test_comments_and_line_breaks_change_no_digest(name: str, code: str, changed: str) -> None:
    def digest(text: str) -> str:
        return provenance.kernel_digests({name: text.encode()})[name]

    python = name.endswith(".py")
    told = [
        code.replace("{\n", "{  // one {\n  /* two\n  three */\n"),
        code.replace("(x):\n", '(x):  # one "\n    """Two.\n\n    # Three.\n    """\n'),
    ]
    assert told[python] != code and digest(told[python]) == digest(code)
    assert digest(code.replace(changed, '"b"')) != digest(code) and digest(
        code.replace('"#"' if python else '"//"', '""')
    ) != digest(code)


def test_a_dirty_tree_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _facts(monkeypatch, KERNELS)["commit"] == "commit aaaaaaa"
    assert _facts(monkeypatch, KERNELS, sources="other")["commit"].startswith("a tree with uncommitted changes")
