"""What measures measures, and family A's cases are what they say."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import cmab_kernels
from bench import harness
from bench.conftest import CLOCK
from bench.floors import Rates
from bench.report import measured
from bench.scans import CASES, attention, attention_state, module, scans
from cmab_kernels.measure import Peak, available_memory, interleave, peak_memory, readable, seconds

from .axes import check_scan, points
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
    assert harness.relative_error(results, case.oracle(case.inputs(0))[name]) < 1e-5


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


def test_threads_are_those_of_the_case_while_it_is_measured(monkeypatch):
    before, seen = torch.get_num_threads(), []

    def noticed(query, key, value):
        seen.append(torch.get_num_threads())
        return attention.naive_attention(query, key, value)

    monkeypatch.setitem(attention.ATTENTION, "naive", noticed)
    monkeypatch.setattr(harness, "peak_memory", lambda *_, **__: seen.append(torch.get_num_threads()) or Peak(0, 0))
    rows = harness.measure(replace(SHAPES[0], threads=before + 1), ["naive"], budget=0.01)
    assert set(seen) == {before + 1} == {rows["naive"].info["threads"]}
    assert torch.get_num_threads() == before


def test_ratios_are_to_the_fastest_baseline(monkeypatch):
    took = {"naive": 3.0, attention.SDPA: 1.0}
    monkeypatch.setattr(harness, "interleave", lambda calls, rounds, *_, **__: {name: [took[name]] * rounds for name in calls})
    monkeypatch.setattr(harness, "peak_memory", lambda *_, **__: Peak(0, 0))
    for baselines in (("naive", attention.SDPA), (attention.SDPA, "naive")):
        rows = harness.measure(replace(SHAPES[0], baselines=baselines), took, budget=0.01)
        assert {name: (row.info["baseline"], row.info["ratio"]) for name, row in rows.items()} == {
            "naive": (attention.SDPA, 3.0),
            attention.SDPA: (attention.SDPA, 1.0),
        }
    rows = harness.measure(replace(SHAPES[0], baselines=("absent",)), ["naive"], budget=0.01)
    assert rows["naive"].samples and "ratio" not in rows["naive"].info


def test_a_number_that_is_none_is_an_error_wherever_it_is():
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert harness.relative_error([good, good], [good, good]) == 0.0
    assert harness.relative_error([good, bad], [good, good]) == math.inf
    assert harness.relative_error([bad, good], [good, good]) == math.inf


SMALL = [
    attention.Attention(2, 8, keys=50, latents=4, batch=3),
    attention.Attention(2, 8, keys=50, latents=4, backward=True, every_peer=True),
    attention.Attention(2, 8, keys=50, latents=4, dtype=torch.float64),
    attention_state.Update(keys=40),
    attention_state.Update(keys=40, new=7),
    attention_state.Update(keys=40, new=3, removes=True),
    attention_state.Update(keys=40, new=3, dtype=torch.float64),
    attention_state.Merge(3, batch=2),
    module.Module(keys=40),
    module.Module(keys=40, backward=True),
    module.Block(keys=40),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_implementations_of_a_case_agree(case):
    inputs = case.inputs(seed=1)
    expected = case.oracle(inputs)
    assert set(expected) == set(case.implementations)
    for name, run in case.implementations.items():
        if case.refusal(name) is None:
            assert harness.relative_error(run(inputs), expected[name]) < 4e-6, name


def test_cases_have_names_of_their_own():
    names = [str(case) for case in CASES]
    assert len(set(names)) == len(names)
    assert {label for table in measured.TABLES for label in table.labels} <= set(names)


# ---- scans -----------------------------------------------------------------------------------------------------------------------------

WITHOUT_WORK = {"empty_ridge", "empty_state", "explain", "move_state", "use_impl"}
"""Public functions that compute nothing."""


def test_every_public_operator_is_scanned_and_a_quick_run_knows_it():
    operators = {name for name in cmab_kernels.__all__ if name[0].islower()} - WITHOUT_WORK
    assert operators <= scans().keys()
    assert all(any(case.quick for case in cases) for cases in scans().values())


AXES = {
    "latent_attention": {"N": 5, "L": 4, "H": 4, "D": 5, "dtype": 4, "B": 3, "threads": 2, "layout": 2, "pass": 2},
    "attention_state": {"N": 4, "t": 5, "L": 4, "dtype": 3, "threads": 2},
    "remove_from_state": {"N": 4, "t": 4},
    "merge_states": {"states": 3, "B": 3},
    "nn.MultiheadAttention": {"N": 4, "H": 4, "pass": 2},
    "nn.CMAB": {"N": 4},
}


@pytest.mark.parametrize("scan", AXES)
def test_an_axis_is_one_parameter_that_varies_alone(scan):
    with harness.threads(2):
        check_scan(scans()[scan])
        assert {axis: points(scans()[scan], axis) for axis in AXES[scan]} == AXES[scan]


def test_a_row_says_how_near_it_is_to_the_floor(monkeypatch):
    monkeypatch.setattr(harness, "peak_memory", lambda *_, **__: Peak(0, 0))
    monkeypatch.setattr(harness, "rates_of", lambda device: Rates(1.0, 1.0, {"float32": 1.0}, together=True))
    monkeypatch.setattr(harness, "interleave", lambda calls, rounds, *_, **__: {name: [1e9] * rounds for name in calls})
    monkeypatch.setattr(attention.Attention, "others", ("naive",))
    rows = harness.measure(SHAPES[0], [attention.SDPA, "naive"], budget=0.01)
    scores = 3 * 2 * 4 * 50
    assert rows[attention.SDPA].info["floor"] == scores + 2 * scores * 16 and rows[attention.SDPA].info["bound"] == "matrix"
    assert rows[attention.SDPA].info["share"] == rows[attention.SDPA].info["floor"] / 1e9
    assert "share" not in rows["naive"].info


@pytest.mark.parametrize(("name", "wrong"), [("naive", False), ("native", True), ("reference", True)])
def test_what_raises_is_a_fault_if_it_is_ours_and_a_reason_if_it_is_a_peer(name, wrong, monkeypatch):
    def hang(*_, **__):
        raise TimeoutError("not done after 60 s")

    monkeypatch.setattr(harness, "peak_memory", hang)
    row = harness.measure(SHAPES[0], [name], budget=0.01)[name]
    assert (row.problem, row.wrong, row.samples) == (f"{'failed: ' if wrong else ''}not done after 60 s", wrong, [])
