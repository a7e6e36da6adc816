"""Family B's cases measure what they say: right results, peers that are peers, axes, figures of a step, floors of what must be done."""

from __future__ import annotations

import importlib
import pickle
from dataclasses import replace

import pytest
import torch

from bench import harness
from bench.report import measured
from bench.scans import nystrom, operators
from bench.scans.attention import SDPA
from bench.scans.nystrom_eager import EagerBlocks, EagerExact, EagerExactBlocks, EagerNystrom, EagerRetroactive, Ring, eager_pinv
from bench.scans.nystrom_layer import NystromLayer, Pinv, iterated
from bench.scans.nystrom_module import OURS_EXACT, ExactModuleStep, NystromModule, NystromModuleStep
from bench.scans.nystrom_start import ExactStart, NystromStart
from bench.scans.nystrom_step import EXACT, EXPLICIT, BesideFull, ExactStep, NystromStep, banded
from bench.scans.operators import CONTINUAL_INFERENCE, DTYPES, EAGER, PACKAGE, kernels
from cmab_kernels import continual_nystrom_init, continual_nystrom_step
from cmab_kernels.measure import Peak
from cmab_kernels.nystrom.reference import iterative_pinv_reference

from .axes import by_scan, check_scan

pytestmark = pytest.mark.filterwarnings("ignore:cmab_kernels runs its PyTorch reference")

TINY = NystromStep(16, 8, landmarks=3, calls=40)

SMALL = [
    TINY,
    replace(TINY, fixed=False),
    replace(TINY, heads=3, calls=20, fixed=False),
    replace(TINY, block=5, calls=6),
    replace(TINY, block=5, calls=6, heads=3),
    replace(TINY, block=20, calls=2, fixed=False),
    replace(TINY, retroactive=True),
    replace(TINY, retroactive=True, heads=3),
    *(replace(TINY, dtype=dtype) for dtype in DTYPES),
    BesideFull(20, calls=30),
    BesideFull(20, calls=30, fixed=False),
    ExactStep(10, calls=25),
    ExactStep(10, calls=25, retroactive=True),
    ExactStep(10, block=4, calls=5),
    *(ExactStep(10, calls=25, dtype=dtype) for dtype in DTYPES),
    NystromStart(20, 8, 2, landmarks=3),
    NystromStart(20, 8, 2, landmarks=3, fixed=True),
    *(NystromStart(20, 8, 2, landmarks=3, dtype=dtype) for dtype in DTYPES),
    ExactStart(20, 8, 2),
    NystromLayer(64, 2, 8, 8),
    NystromLayer(64, 2, 8, 8, batch=3, backward=True),
    *(NystromLayer(64, 2, 8, 8, dtype=dtype) for dtype in DTYPES),
    Pinv(8),
    Pinv(8, 5),
    Pinv(8, 5, backward=True),
    Pinv(8, 5, dtype=torch.float64),
    NystromModule(64, 2, 16, landmarks=8),
    NystromModule(64, 2, 16, batch=3, backward=True, landmarks=8),
    NystromModuleStep(16, 8, landmarks=3, calls=20),
    NystromModuleStep(16, 8, landmarks=3, calls=20, heads=1),
    NystromModuleStep(16, 8, landmarks=3, calls=20, batch=3),
    ExactModuleStep(16, 8, calls=20, batch=3),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_implementations_of_a_case_agree(case):
    inputs = case.inputs(seed=0)
    expected = case.oracle(inputs)
    assert set(expected) <= set(case.implementations)
    bound = 1e-5 if case.dtype == torch.float32 else harness.ERROR_BOUND[case.dtype] / 2
    for name, run in case.implementations.items():
        if case.refusal(name) is None:
            assert harness.relative_error(run(inputs), expected[name]) < bound, name
    pickle.dumps(case)  # for the process that measures memory, with whatever it has built


SCANS = by_scan(nystrom.CASES)


def test_every_operator_of_the_family_has_a_scan():
    public = importlib.import_module("cmab_kernels.nystrom").__all__
    operators = {name for name in public if name[0].islower()} - {"move_state"}
    assert operators | {"nn.NystromAttention", "nn.ContinualNystromAttention", "nn.ContinualAttention"} == SCANS.keys()


@pytest.mark.parametrize("scan", SCANS)
def test_a_scan_has_axes_and_something_quick(scan):
    check_scan(SCANS[scan])


@pytest.mark.parametrize(("operator", "names"), [("nystrom_attention", {"triton"}), ("continual_attention_step", {"cuda"})])
def test_on_a_gpu_its_kernels_are_measured(operator, names, monkeypatch):
    monkeypatch.setattr(harness, "_device", "cuda")
    assert set(kernels(operator)) == {*names, "reference"}
    for case in nystrom.CASES:
        assert "native" not in case.implementations
        assert any(map(harness.is_ours, case.implementations))


# ---- floors ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "name", "more"),
    [
        (NystromLayer(64, 2, 16, 8, batch=3), EAGER, 0),
        (Pinv(8, 5), EAGER, 0),
        (ExactStep(10, calls=25), EAGER, 0),
        (NystromStart(20, 8, 2, landmarks=3), EAGER, 2 * 2 * 3 * 3 * 8),  # the landmarks' own scores
        (NystromModule(64, 2, 16, landmarks=8), EAGER, 0),
        (ExactModuleStep(16, 8, calls=20, batch=3), OURS_EXACT, 0),
    ],
    ids=str,
)
def test_work_is_what_torch_counts(case, name, more):
    inputs = case.inputs(0)
    _, flops = harness.count_flops(lambda: case.implementations[name](inputs))
    assert flops == harness.steps_of(case, name) * case.work.products + more


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("retroactive", [True, False])
def test_work_of_a_step_is_the_mean_of_what_is_counted(fixed, retroactive):
    case = replace(TINY, fixed=fixed, retroactive=retroactive, calls=160)  # ten times round the window
    inputs = case.inputs(0)
    _, flops = harness.count_flops(lambda: case.implementations["native"](inputs))
    assert flops / 160 == pytest.approx(case.work.products, rel=0.02)  # but for the rows that are recomputed every 1,024 tokens


def test_a_window_is_read_and_written():
    assert ExactStart(20, 8, 2).work is None  # a cache would hold them
    case = ExactStart(10_000, 8, 20)
    inputs = case.inputs(0)
    moved = sum(part.nbytes for part in (*inputs, *case.implementations[EAGER](inputs)))
    assert case.work.bytes == moved - 3 * 20 * 8 * 4  # the spare row
    assert case.work.bytes == NystromStart(10_000, 8, 20).work.bytes


def test_backward_is_more_work():
    forward, both = (NystromLayer(64, 2, 16, 8, backward=backward).work for backward in (False, True))
    assert both.exponentials == forward.exponentials + 2 * (2 * 64 * 8)
    assert both.products == forward.products + 2 * (2 * 64 * 8 * 2 * 5 * 16)


# ---- peers -----------------------------------------------------------------------------------------------------------------------------


def test_the_eager_stream_is_the_definition_however_long():
    """In float64, over several windows and with segments of two lengths."""
    n, m, width, heads = 11, 4, 6, 2
    tokens = torch.randn(3, 1, heads, 5 * n, width, dtype=torch.float64)
    first, after = [part[:, :, :n] for part in tokens], [part[:, :, n:] for part in tokens]
    given = (torch.randn(heads, m, width, dtype=torch.float64), torch.randn(heads, m, width, dtype=torch.float64))
    for landmarks in (None, given):
        state = continual_nystrom_init(*first, None if landmarks else m, landmarks=landmarks, scale=0.3)
        expected = continual_nystrom_step(state, *after, impl="reference").out[0]
        eager = EagerNystrom(*(part[0] for part in first), 0.3, m, landmarks, iterations=6)
        outs = [eager.step(*token) for token in zip(*(part[0].split(1, dim=1) for part in after), strict=True)]
        assert torch.allclose(torch.cat(outs, dim=1), expected, rtol=1e-12, atol=1e-12)
    eager = EagerRetroactive(*(part[0] for part in first), 0.3, m, given, 6)
    whole = [eager.step(*token) for token in zip(*(part[0].split(1, dim=1) for part in after), strict=True)][-1]
    state = continual_nystrom_init(*first, landmarks=given, scale=0.3)
    retroactive = continual_nystrom_step(state, *after, output="retroactive", impl="reference").out[0]
    assert torch.allclose(whole, retroactive, rtol=1e-12, atol=1e-12)
    blocks = EagerBlocks(*(part[0] for part in first), 0.3, given, iterations=6, block=4)
    outs = [blocks.step(*block) for block in zip(*(part[0].split(4, dim=1) for part in after), strict=True)]
    assert torch.allclose(torch.cat(outs, dim=1), expected, rtol=1e-12, atol=1e-12)


def test_a_ring_gives_a_token_with_the_one_that_it_evicts():
    keys = torch.arange(20.0).view(1, 20, 1)
    ring = Ring(keys[:, :3], 10 * keys[:, :3])
    for place in range(3, 20):
        pair, values = ring.push(keys[0, place : place + 1], 10 * keys[0, place : place + 1])
        assert pair.tolist() == [[place, place - 3]] and values.tolist() == [[10 * place, 1], [10 * (place - 3), 1]]
        rows, _, evicted = ring.window()
        assert rows[evicted].item() == place - 3 and sorted(rows.flatten().tolist()) == list(range(place - 3, place + 1))


@pytest.mark.parametrize("shape", [(5, 5), (3, 5, 5)])
def test_the_eager_inverse_is_the_iteration(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    assert torch.allclose(eager_pinv(matrix, 6), iterative_pinv_reference(matrix, 6), rtol=1e-12)
    assert torch.allclose(iterated(matrix), iterative_pinv_reference(matrix, 6), rtol=1e-9)


def test_the_eager_exact_stream_forgets():
    tokens = torch.randn(3, 1, 2, 9, 4)
    stream = EagerExact(*(part[:, :, :4] for part in tokens[1:]))
    outs = [stream.step(*token) for token in zip(*(part[:, :, 4:].split(1, dim=2) for part in tokens), strict=True)]
    expected = banded(tokens[0][:, :, 4:], tokens[1], tokens[2], window=4)
    assert torch.allclose(torch.cat(outs, dim=2).double(), expected, atol=1e-6)
    blocks = EagerExactBlocks(*(part[:, :, :4] for part in tokens[1:]), block=3)
    outs = [blocks.step(*block) for block in zip(*(part[:, :, 4:].split(3, dim=2) for part in tokens[:, :, :, :7]), strict=True)]
    assert torch.allclose(torch.cat(outs, dim=2).double(), expected[:, :, :3], atol=1e-6)


def test_streams_go_on_from_call_to_call():
    case = replace(TINY, calls=4)
    inputs = case.inputs(0)
    first, second = (case.implementations[EAGER](inputs) for _ in range(2))
    assert len(first) == 4 and not torch.allclose(first[0], second[0])
    assert torch.equal(first[0], case.implementations[EAGER](case.inputs(0))[0])


def test_figures_are_of_a_step(monkeypatch):
    monkeypatch.setattr(harness, "peak_memory", lambda *_, **__: Peak(0, 0))
    monkeypatch.setattr(harness, "interleave", lambda calls, rounds, *_: {name: [12.0] * rounds for name in calls})
    one, many = (replace(TINY, calls=calls) for calls in (1, 6))
    rows = [harness.measure(case, [EAGER], budget=0.01)[EAGER] for case in (one, many)]
    assert rows[0].samples[0] == 12.0 and rows[1].samples[0] == 2.0
    assert rows[0].info["flops"] == rows[1].info["flops"] > 0
    assert rows[1].info["gflops"] == pytest.approx(6 * rows[0].info["gflops"])


def test_full_attention_is_computed_once_a_call():
    assert BesideFull(20, calls=30).steps == {"native": 30, EXACT: 30, SDPA: 1, EXPLICIT: 1}


def test_the_package_is_ours_where_there_is_a_single_head():
    """Several share its initial norms, and so their results."""
    pytest.importorskip("nystrom_attention")
    for heads, alike in ((1, True), (2, False)):
        case = NystromLayer(64, heads, 8, 8)
        expected = case.oracle(case.inputs(0))
        theirs = expected[PACKAGE][0].unflatten(-1, (heads, 8)).transpose(1, 2)
        assert torch.allclose(theirs, expected["native"][0], atol=1e-9) == alike


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (ExactStep(10), CONTINUAL_INFERENCE),
        (NystromLayer(64, 2, 8, 8), PACKAGE),
        (NystromModule(64, 2, 16, landmarks=8), PACKAGE),
        (NystromModuleStep(16, 8, landmarks=3, calls=20), CONTINUAL_INFERENCE),
    ],
    ids=str,
)
def test_a_missing_package_is_said(case, name, monkeypatch):
    monkeypatch.setattr(operators.importlib.util, "find_spec", lambda name: None)
    row = harness.measure(case, [name], budget=0.01)[name]
    assert "pip install" in row.problem and not row.wrong and not row.samples
    assert name not in getattr(case.inputs(0), "calls", {})


def test_labels_say_what_is_saved():
    label = measured.NYSTROM["nystrom-step-fixed-float32-16x12-n120-m4-beside-full"]
    assert "1 / 1,788 of its operations by the paper" in label and "1 / 1,096 of those executed" in label
