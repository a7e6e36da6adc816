"""Tests of the measurements: FLOPs, ratios, and that a wrong result has no speed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from bench import harness
from bench.floors import Rates
from bench.runs import Spread
from bench.scans import attention, continual
from bench.scans.attention import NAIVE, SDPA
from bench.scans.case import EAGER, Case
from cmab_kernels.measure import Peak

FORWARD = attention.attention(2, 8, keys=50, latents=4, batch=3)
BACKWARD = attention.attention(2, 8, keys=50, latents=4, backward=True, transposed=True)


# ---- time ------------------------------------------------------------------------------------------------------------


def test_a_ratio_is_of_medians_with_the_quartiles_within_rounds():
    assert harness.ratio([1.0, 2.0, 3.0, 100.0, 4.0], [2.0, 4.0, 6.0, 200.0, 16.0]) == Spread(0.5, 0.5, 0.5)
    assert harness.spread([4.0, 1.0, 2.0, 5.0, 3.0]) == Spread(3.0, 2.0, 4.0)


def test_calls_go_round_copies_of_the_inputs():
    seen = []
    call = harness.timed_call(seen.append, ["first", "second"])
    for _ in range(3):
        call()
    assert seen == ["first", "second", "first"]


# ---- what a row says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [FORWARD, BACKWARD], ids=str)
@pytest.mark.parametrize("name", [SDPA, NAIVE, "reference"])
def test_flops_of_peers_are_those_of_the_products(case: Case, name: str):
    backward = case.sizes["pass"] != "forward"
    # Torch's attention computes its scores again in the backward pass.
    products = (7 if name == SDPA else 6) if backward else 2
    scores = math.prod(case.sizes[letter] for letter in "BHLN")
    inputs = case.inputs(0)
    results, flops = harness.count_flops(lambda: case.implementations[name](inputs))
    assert flops == products * 2 * scores * case.sizes["D"]
    assert harness.relative_error(results, case.expected(inputs)[name]) < 1e-5


def test_flops_are_counted_through_a_module_that_is_given_a_parameter():
    """The gradients are measured too; torch's tracker of modules would fail for them."""
    inner = torch.nn.Linear(4, 3, bias=False)
    latents = torch.nn.Parameter(torch.randn(5, 4))

    def run():
        out = inner(latents)
        return out.detach(), *torch.autograd.grad(out.sum(), [latents, inner.weight])

    assert harness.count_flops(run)[1] == 3 * 2 * 5 * 4 * 3


def test_what_no_graph_may_capture_is_called(no_memory: None, monkeypatch: pytest.MonkeyPatch):
    """No implementation is captured if a call forbids it."""
    captured = []
    monkeypatch.setattr(
        harness,
        "timed_call",
        lambda implementation, copies, capture: captured.append(capture) or partial(implementation, copies[0]),
    )
    case = replace(FORWARD, uncaptured=(SDPA,))
    harness.measure(case, [SDPA, NAIVE], budget=0.01)
    harness.measure(case, [SDPA, NAIVE], budget=0.01, capture=False)
    assert captured == [False, True, False, False]


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured in another process."""
    monkeypatch.setattr(harness, "peak_memory", lambda *_, **__: Peak(0, 0))


@pytest.fixture
def clock(no_memory: None, monkeypatch: pytest.MonkeyPatch):
    """Says how long each implementation takes."""

    def take(took: dict[str, float]) -> None:
        monkeypatch.setattr(
            harness, "interleave", lambda calls, rounds, *_, **__: {name: [took[name]] * rounds for name in calls}
        )

    return take


def with_naive(case: Case, naive, name: str = NAIVE) -> Case:
    return replace(case, implementations={**case.implementations, name: lambda i: (naive(*i[:3]),)})


@pytest.mark.parametrize("name", [NAIVE, "native", "reference"])
@pytest.mark.parametrize("fault", ["scaled", "nan", "shape"])
def test_a_wrong_result_has_no_speed_and_is_a_fault_if_it_is_ours(fault: str, name: str, no_memory: None):
    def wrong(query, key, value):
        out = F.scaled_dot_product_attention(query, key, value)
        return {"scaled": out * 1.001, "nan": out.masked_fill(out == out.max(), math.nan), "shape": out[:, :1]}[fault]

    group = harness.measure(with_naive(FORWARD, wrong, name), [SDPA, name], budget=0.01)
    assert group.problems.keys() == {name} and group.at_fault(name) == (name != NAIVE)
    assert group.problems[name].startswith("its result is wrong here: relative" if name == NAIVE else "wrong: relative")
    assert group.rows.keys() == group.samples.keys() == {SDPA} and group.rows[SDPA].ratio.median == 1.0


def test_threads_are_those_of_the_case_while_it_is_measured(monkeypatch: pytest.MonkeyPatch):
    before, seen = torch.get_num_threads(), []

    def noticed(query, key, value):
        seen.append(torch.get_num_threads())
        return attention.naive_attention(query, key, value)

    monkeypatch.setattr(harness, "peak_memory", lambda *_, **__: seen.append(torch.get_num_threads()) or Peak(0, 0))
    group = harness.measure(replace(with_naive(FORWARD, noticed), threads=before + 1), [NAIVE], budget=0.01)
    assert set(seen) == {before + 1} == {group.rows[NAIVE].threads} and torch.get_num_threads() == before


@pytest.mark.parametrize(("others", "noisy"), [(None, False), (0.05, False), (0.06, True)])
def test_rows_that_were_timed_beside_other_programs_are_noisy(
    others: float | None, noisy: bool, clock, monkeypatch: pytest.MonkeyPatch
):
    clock({NAIVE: 3.0, SDPA: 1.0})
    monkeypatch.setattr(harness, "others_since", lambda before: others)
    rows = harness.measure(FORWARD, [NAIVE, SDPA], budget=0.01).rows.values()
    assert {(row.others, row.noisy) for row in rows} == {(others, noisy)}


def test_ratios_are_to_the_fastest_baseline_and_speed_ups_over_peers(clock):
    clock({NAIVE: 3.0, SDPA: 1.0, "native": 0.5})
    for baselines in ((NAIVE, SDPA), (SDPA, NAIVE)):
        rows = harness.measure(replace(FORWARD, baselines=baselines), ["native", NAIVE, SDPA], budget=0.01).rows
        found = {
            name: (row.baseline, row.ratio.median, row.speed_up and row.speed_up.median) for name, row in rows.items()
        }
        assert found == {"native": (SDPA, 0.5, None), NAIVE: (SDPA, 3.0, 6.0), SDPA: (SDPA, 1.0, 2.0)}
    alone = harness.measure(replace(FORWARD, baselines=("absent",)), [NAIVE], budget=0.01).rows[NAIVE]
    assert (alone.baseline, alone.ratio, alone.speed_up) == (None, None, None)


def test_a_number_that_is_none_is_an_error_wherever_it_is():
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert harness.relative_error([good, good], [good, good]) == 0.0
    assert (
        harness.relative_error([good, bad], [good, good])
        == harness.relative_error([bad, good], [good, good])
        == math.inf
    )


def test_a_row_says_how_near_it_is_to_the_floor(clock, monkeypatch: pytest.MonkeyPatch):
    clock({NAIVE: 1e9, SDPA: 1e9})
    monkeypatch.setattr(harness, "rates_of", lambda device: Rates(1.0, 1.0, {"float32": 1.0}, together=True))
    rows = harness.measure(replace(FORWARD, others=(NAIVE,)), [SDPA, NAIVE], budget=0.01).rows
    scores = 3 * 2 * 4 * 50
    assert rows[SDPA].floor == scores + 2 * scores * 16 and rows[SDPA].bound == "matrix" and rows[NAIVE].floor is None


def test_figures_are_of_a_step(clock):
    clock({EAGER: 12.0})
    one, many = (
        harness.measure(continual.step(16, 8, landmarks=3, calls=calls), [EAGER], budget=0.01).rows[EAGER]
        for calls in (1, 6)
    )
    assert one.seconds.median == 12.0 and many.seconds.median == 2.0 and one.flops == many.flops > 0
    assert many.gflops == pytest.approx(6 * one.gflops)


@pytest.mark.parametrize(("name", "wrong"), [(NAIVE, False), ("native", True), ("reference", True)])
def test_what_raises_is_a_fault_if_it_is_ours_and_a_reason_if_it_is_a_peer(
    name: str, wrong: bool, monkeypatch: pytest.MonkeyPatch
):
    def hang(*_, **__):
        raise TimeoutError("not done after 60 s")

    monkeypatch.setattr(harness, "peak_memory", hang)
    group = harness.measure(FORWARD, [name], budget=0.01)
    assert group.problems == {name: f"{'failed: ' if wrong else ''}not done after 60 s"}
    assert group.at_fault(name) == wrong and not group.rows and not group.samples
