"""Family C's cases measure what they say: right results, peers that are peers, axes, and floors that count what must be done."""

from __future__ import annotations

import importlib
import pickle

import pytest
import torch

from bench import harness
from bench.scans import intention
from bench.scans.attention import SDPA
from bench.scans.intention_layer import CHUNKED, Layer, LayerInputs, SigmaLayer, chunked
from bench.scans.intention_module import IntentionModule
from bench.scans.intention_peers import ALPHA, CHUNK
from bench.scans.intention_solve import CHOLESKY, INVERSE, Inverse, Solve, SolveState
from bench.scans.intention_state import RUNS, TORCH, TORCH_SINGLE, Merge, Removal, Sums, Update, errors_of_additions
from bench.scans.operators import DTYPES, EAGER, kernels
from bench.scans.self_attention import THEIRS

from .axes import alike, beside_an_axis, by_scan, check_scan, points

SMALL = [
    Layer(100, heads=2, width=8),
    Layer(100, heads=2, width=8, batch=3, backward=True),
    Layer(CHUNK + 3, heads=2, width=8, backward=True),
    *(Layer(100, heads=2, width=8, backward=True, dtype=dtype) for dtype in DTYPES),
    SigmaLayer(100, 10, heads=2, width=8),
    SigmaLayer(100, 10, heads=2, width=8, batch=3, backward=True),
    *(SigmaLayer(100, 10, heads=2, width=8, dtype=dtype) for dtype in DTYPES),
    Sums(100, 8, heads=2),
    Sums(100, 8, heads=2, batch=3, backward=True),
    *(Sums(100, 8, dtype=dtype) for dtype in DTYPES),
    Removal(100, 8, heads=2),
    Update(2, 8, keys=100),
    Update(2, 8, keys=100, tokens=7),
    Merge(2, 3, 8),
    Merge(5, 3, 8),
    Solve(8, 8, 5),
    Solve(8, 1, 5),
    Solve(8, 3, 5, backward=True),
    *(Solve(8, 8, 5, dtype=dtype) for dtype in DTYPES),
    SolveState(8, 8, 5),
    Inverse(8, 5),
    Inverse(8, 5, dtype=torch.float64),
    IntentionModule(100, 2, 16),
    IntentionModule(100, 2, 16, batch=3, backward=True),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_implementations_of_a_case_agree(case):
    inputs = case.inputs(seed=1)
    expected = case.oracle(inputs)
    assert set(expected) == set(case.implementations)
    bound = 4e-6 if case.dtype == torch.float32 else harness.ERROR_BOUND[case.dtype] / 4
    for name, run in case.implementations.items():
        if case.refusal(name) is None:
            assert harness.relative_error(run(inputs), expected[name]) < bound, name
    pickle.dumps(case)  # for the process that measures memory, with whatever it has built


SCANS = by_scan(intention.CASES)


def test_every_operator_of_the_family_has_a_scan():
    public = importlib.import_module("cmab_kernels.intention").__all__
    operators = {name for name in public if name[0].islower()} - {"variants", "empty_ridge"}
    assert operators | {"nn.MultiheadIntention"} == SCANS.keys()


@pytest.mark.parametrize("scan", SCANS)
def test_a_scan_has_axes_and_something_quick(scan):
    check_scan(SCANS[scan])


def test_groups_without_an_axis_are_seen():
    assert points([Layer(100), Layer(200), Layer(300, heads=2)], "N") == 2
    assert beside_an_axis([Layer(100), Layer(200), Layer(300, heads=2)]) == [str(Layer(300, heads=2))]
    assert alike([Layer(100), Layer(200), Layer(100, quick=True)]) == [(str(Layer(100)),) * 2]


@pytest.mark.parametrize(
    ("operator", "names"),
    [("intention", ("triton", "cuda")), ("ridge_state", ("triton", "cuda")), ("regularised_solve", ("cuda",))],
)
def test_on_a_gpu_its_kernels_are_measured(operator, names, monkeypatch):
    monkeypatch.setattr(harness, "_device", "cuda")
    assert set(kernels(operator)) == {*names, "reference"}
    for case in intention.CASES:
        assert not any(name.startswith("native") for name in case.implementations)
        assert any(map(harness.is_ours, case.implementations))


# ---- floors ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "name", "symmetric"),
    [
        (Layer(100, 2, 8, batch=3), CHUNKED, 6 * 100 * 64),
        (Layer(100, 2, 8, batch=3, backward=True), CHUNKED, 6 * 100 * 64),
        (SigmaLayer(100, 10, 2, 8), EAGER, 2 * 100 * 64),
        (Sums(100, 8, 2), TORCH, 2 * 100 * 64),
        (Sums(100, 8, 2, backward=True), TORCH, 2 * 100 * 64),
        (Removal(100, 8, 2), TORCH, 2 * 100 * 64),
        (Solve(6, 4, 5), CHOLESKY, 0),
        (Solve(6, 4, 5, backward=True), CHOLESKY, 0),
        (SolveState(6, 4, 5), CHOLESKY, 0),
        (IntentionModule(100, 2, 16), EAGER, 2 * 100 * 64),
    ],
    ids=str,
)
def test_work_is_what_torch_counts_less_half_of_what_is_symmetric(case, name, symmetric):
    inputs = case.inputs(0)
    _, flops = harness.count_flops(lambda: case.implementations[name](inputs))
    assert flops == pytest.approx(case.work.products + symmetric, abs=10)  # torch's counter rounds a third of a cube


def test_work_without_products_is_what_is_moved():
    assert Merge(2, 3, 8).work is None  # a cache would hold them
    for states in (2, 5):
        case = Merge(states, 2**14, 8)
        inputs = case.inputs(0)
        assert case.work.products == 0
        assert case.work.bytes == sum(part.nbytes for part in (*inputs, *case.implementations[EAGER](inputs)))


def test_attention_beside_intention_has_no_share_of_its_floor():
    for case in (Layer(100), SigmaLayer(100)):
        assert SDPA in case.implementations and case.others == (SDPA,)
    assert THEIRS in IntentionModule.others and not {TORCH_SINGLE, RUNS} - set(Sums.others)


# ---- peers -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 3])
def test_gradients_by_hand_are_those_of_autograd(length):
    case = Layer(length, heads=2, width=4, backward=True)
    query, key, value, dout = (part.detach().double() for part in case.inputs(0))
    inputs = [part.requires_grad_() for part in (query, key, value)]
    system = key.mT @ key + ALPHA * torch.eye(4, dtype=torch.float64)
    out = query @ torch.linalg.solve_ex(system, key.mT @ value)[0]
    expected = out.detach(), *torch.autograd.grad(out, inputs, dout)
    assert harness.relative_error(chunked(LayerInputs(query, key, value, dout)), expected) < 1e-12
    assert harness.relative_error(chunked(LayerInputs(query, key, value, dout[:0, 0, 0, 0])), expected[:1]) < 1e-12


@pytest.mark.parametrize(("width", "columns", "batch"), [(6, 6, 5), (9, 1, 3)])
def test_operations_of_a_solve_are_counted(width, columns, batch):
    case = Solve(width, columns, batch)
    inputs = case.inputs(0)
    _, flops = harness.count_flops(lambda: case.implementations[CHOLESKY](inputs))
    assert flops == batch * (width**3 // 3 + 2 * width**2 * columns)


def test_the_long_layer_has_its_peer_and_the_short_ones_have_attention():
    million, short = Layer(1_000_000), Layer(16_384)
    assert million.baselines == (CHUNKED,) and SDPA not in million.implementations
    assert short.baselines == (SDPA,) and SDPA in short.implementations
    assert "reference" in short.implementations and "reference" not in million.implementations


def test_inverses_are_no_baseline_where_systems_are_solved():
    assert INVERSE not in Solve.baselines and INVERSE in Inverse.baselines


def test_float64_sums_stay_exact_where_float32_sums_do_not():
    errors = errors_of_additions(3000)
    assert errors["ridge_state"] < 1e-14 < 1e-7 < errors["float32 sums in torch"]
