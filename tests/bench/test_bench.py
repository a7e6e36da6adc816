"""The measuring helpers measure, and the README says what was measured."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench import attention, harness, readme_table
from bench.conftest import CLOCK
from cmab_kernels.measure import Peak, available_memory, interleave, peak_memory, readable, seconds

from .cases import MIB, failing, planted

TOLERANCE = MIB // 2


# ---- memory ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 3 * MIB, 100 * MIB])
def test_memory_probe_sees_what_was_held(size):
    assert abs(peak_memory(planted, size, warm_up=(MIB,)).extra - size) < TOLERANCE


def test_memory_probe_tells_results_from_the_rest():
    peak = peak_memory(planted, 8 * MIB, 2 * MIB, warm_up=(MIB,))
    assert peak.results == 2 * MIB
    assert abs(peak.extra - 10 * MIB) < TOLERANCE


def test_freed_memory_of_the_preparation_hides_nothing():
    assert abs(peak_memory(planted, 8 * MIB, 4, 32 * MIB, warm_up=(MIB,)).extra - 8 * MIB) < TOLERANCE


def test_peak_is_of_the_task_not_of_an_earlier_one():
    assert abs(peak_memory(planted, 2 * MIB, warm_up=(64 * MIB,)).extra - 2 * MIB) < TOLERANCE


@pytest.mark.parametrize(("kind", "error"), [("hangs", TimeoutError), ("dies", RuntimeError), ("raises", RuntimeError)])
def test_memory_probe_says_what_went_wrong(kind, error):
    with pytest.raises(error, match={"hangs": "not done after", "dies": "exit code 3", "raises": "ValueError: what went wrong"}[kind]):
        peak_memory(failing, kind, warm_up=("nothing",), limit=2.0 if kind == "hangs" else 60.0)


def test_available_memory_is_positive():
    assert available_memory() > 0


# ---- time ------------------------------------------------------------------------------------------------------------------------------


def test_calls_take_turns_and_take_turns_in_going_first():
    order = []
    samples = interleave({name: lambda name=name: order.append(name) for name in "abc"}, rounds=3)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert {name: len(times) for name, times in samples.items()} == {"a": 3, "b": 3, "c": 3}
    order.clear()
    interleave({name: lambda name=name: order.append(name) for name in "ab"}, rounds=2, repeats={"b": 2})
    assert "".join(order) == "abb" + "bba"


def test_a_sample_is_the_mean_of_its_repeats():
    took = seconds(lambda: time.sleep(0.01), repeats=5)
    assert 0.01 <= took < 0.03


@pytest.mark.parametrize(("value", "text"), [(2.5, "2.5 s"), (0.01234, "12.3 ms"), (3.456e-6, "3.46 us"), (1e-8, "0.01 us")])
def test_readable(value, text):
    assert readable(value) == text


def test_ratio_is_of_medians_with_the_quartiles_within_rounds():
    figures = harness.ratio([1.0, 2.0, 3.0, 100.0, 4.0], [2.0, 4.0, 6.0, 200.0, 16.0])
    assert figures == {"ratio": 0.5, "ratio_quartiles": [0.5, 0.5]}


def test_clock_replays_a_sample_exactly():
    CLOCK.reset()
    before = CLOCK()
    CLOCK.advance(1.25e-6)
    assert CLOCK() - before == 1.25e-6


def test_calls_go_round_copies_of_the_inputs():
    seen = []
    call = harness._rotating(seen.append, ["first", "second"])
    for _ in range(3):
        call()
    assert seen == ["first", "second", "first"]


# ---- what a row says -------------------------------------------------------------------------------------------------------------------

SHAPES = [
    attention.Attention(2, 8, keys=50, latents=4, batch=3),
    attention.Attention(2, 8, keys=50, latents=4, backward=True, transposed=True),
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("name", [attention.SDPA, "naive", "reference"])
def test_flops_of_peers_are_those_of_the_products(case, name):
    products = (7 if name == attention.SDPA else 6) if case.backward else 2  # torch's attention computes its scores again for the backward
    results, flops = harness.count_flops(lambda: case.implementations[name](case.inputs(0)))
    assert flops == products * 2 * case._scores() * case.width
    assert harness.relative_error(results, case.oracle(case.inputs(0))) < 1e-5


@pytest.mark.parametrize("fault", ["scaled", "nan", "shape"])
def test_a_wrong_result_has_no_speed(fault, monkeypatch):
    def wrong(query, key, value):
        out = F.scaled_dot_product_attention(query, key, value)
        return {"scaled": out * 1.001, "nan": out.masked_fill(out == out.max(), math.nan), "shape": out[:, :1]}[fault]

    monkeypatch.setitem(attention.ATTENTION, "naive", wrong)
    monkeypatch.setattr(harness, "peak_memory", lambda *_, **__: Peak(0, 0))
    rows = harness.measure(SHAPES[0], [attention.SDPA, "naive"], budget=0.01)
    assert rows["naive"].wrong and not rows["naive"].samples and "wrong" in rows["naive"].problem
    assert rows[attention.SDPA].samples and rows[attention.SDPA].info["ratio"] == 1.0


def test_a_number_that_is_none_is_an_error_wherever_it_is():
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert harness.relative_error([good, good], [good, good]) == 0.0
    assert harness.relative_error([good, bad], [good, good]) == math.inf
    assert harness.relative_error([bad, good], [good, good]) == math.inf


@pytest.mark.parametrize("case", [attention.Update(keys=40), attention.Module(keys=40)], ids=str)
def test_implementations_of_a_case_agree(case):
    inputs = case.inputs(seed=1)
    for name, run in case.implementations.items():
        if case.refusal(name) is None:
            assert harness.relative_error(run(inputs), case.oracle(inputs)) < 2e-6, name


def test_cases_have_names_of_their_own():
    names = [str(case) for case in attention.CASES]
    assert len(set(names)) == len(names)
    assert set(readme_table.LABELS) <= set(names)


# ---- the README ------------------------------------------------------------------------------------------------------------------------


def test_readme_shows_the_newest_committed_run():
    path = readme_table.newest_run()
    if path is None:
        pytest.skip("no run is committed in bench/results")
    text = (readme_table.ROOT / "README.md").read_text()
    assert readme_table.insert(text, readme_table.table(path)) == text, "stale: python bench/readme_table.py"


def run_of(date: str, median: float) -> dict:
    def row(name: str, seconds: float) -> dict:
        info = {"implementation": name, "extra_memory": 3 * MIB, "result_memory": 2 * MIB, "baseline": attention.SDPA}
        info |= {"ratio": 0.25, "ratio_quartiles": [0.2, 0.3]}
        return {"group": next(iter(readme_table.LABELS)), "extra_info": info, "stats": {"median": seconds}}

    machine = {"cpu": {"brand_raw": "a processor"}, "native_instruction_set": "avx2", "versions": {"torch": "2"}}
    rows = [row("native", median), row(attention.SDPA, 4 * median)]
    return {"datetime": date, "benchmarks": rows, "machine_info": machine, "threads": 2, "commit_info": {"id": "0123456789"}}


def test_table_is_of_the_newest_run_and_drift_is_seen(tmp_path: Path):
    for name, run in {"old": run_of("2026-01-01", 0.5), "new": run_of("2026-01-02", 0.025), "latest": run_of("2027-01-01", 9.0)}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    (tmp_path / "gpu.json").write_text(json.dumps({"datetime": "2028-01-01"}))
    path = readme_table.newest_run(tmp_path)
    assert path == tmp_path / "new.json"
    table = readme_table.table(path)
    assert "| forward, float32, 8 heads of 8 | 100 ms, +1.0 MiB | 25 ms, +1.0 MiB | **0.25** (0.20 to 0.30) |" in table
    readme = f"before\n{readme_table.BEGIN}\nold\n{readme_table.END}\nafter\n"
    once = readme_table.insert(readme, table)
    assert once == f"before\n{readme_table.BEGIN}\n{table}\n{readme_table.END}\nafter\n"
    assert readme_table.insert(once, table) == once
    assert readme_table.insert(once, table.replace("25 ms", "24 ms")) != once


@pytest.mark.parametrize(
    "readme", ["", readme_table.BEGIN, f"{readme_table.END}{readme_table.BEGIN}", 2 * f"{readme_table.BEGIN}{readme_table.END}"]
)
def test_a_readme_without_its_marks_is_refused(readme):
    with pytest.raises(SystemExit, match=r"README\.md must hold"):
        readme_table.insert(readme, "table")


def test_no_run_is_newest_of_none(tmp_path: Path):
    assert readme_table.newest_run(tmp_path) is None
