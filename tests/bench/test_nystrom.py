"""Family B's cases measure what they say: right results, peers that are peers, figures of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import harness, nystrom, nystrom_layer, readme_table
from bench.attention import SDPA
from bench.nystrom_eager import EagerBlocks, EagerExact, EagerNystrom, Ring, eager_pinv
from cmab_kernels import continual_nystrom_init, continual_nystrom_step
from cmab_kernels.measure import Peak
from cmab_kernels.nystrom.reference import iterative_pinv_reference

pytestmark = pytest.mark.filterwarnings("ignore:cmab_kernels runs its PyTorch reference")

SMALL = [
    nystrom.NystromStep(16, 3, 8, calls=40),
    nystrom.NystromStep(16, 3, 8, calls=40, fixed=False),
    nystrom.NystromStep(16, 3, 8, heads=3, calls=20, fixed=False),
    nystrom.NystromStep(16, 3, 8, block=5, calls=6),
    nystrom.NystromStep(16, 3, 8, block=5, calls=6, heads=3),
    nystrom.NystromStep(16, 3, 8, block=20, calls=2, fixed=False),
    nystrom.BesideFull(20, calls=30),
    nystrom.BesideFull(20, calls=30, fixed=False),
    nystrom.ExactStep(10, tokens=25),
    nystrom.ExactStep(10, tokens=25, retroactive=True),
    nystrom_layer.NystromLayer(64, 2, 8, 8),
    nystrom_layer.NystromLayer(64, 2, 8, 8, backward=True),
    nystrom_layer.Pinv(8),
    nystrom_layer.Pinv(8, 5),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_implementations_of_a_case_agree(case):
    inputs = case.inputs(seed=0)
    expected = case.oracle(inputs)
    assert set(expected) <= set(case.implementations)
    for name, run in case.implementations.items():
        if case.refusal(name) is None:
            assert harness.relative_error(run(inputs), expected[name]) < 1e-5, name


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
    norms = matrix.abs().sum(-2).amax(-1) * matrix.abs().sum(-1).amax(-1)
    assert torch.allclose(nystrom_layer.iterated(matrix, norms), iterative_pinv_reference(matrix, 6), rtol=1e-9)


def test_the_eager_exact_stream_forgets():
    tokens = torch.randn(3, 1, 2, 9, 4)
    stream = EagerExact(*(part[:, :, :4] for part in tokens[1:]))
    outs = [stream.step(*token) for token in zip(*(part[:, :, 4:].split(1, dim=2) for part in tokens), strict=True)]
    expected = nystrom.banded(tokens[0][:, :, 4:], tokens[1], tokens[2], window=4)
    assert torch.allclose(torch.cat(outs, dim=2).double(), expected, atol=1e-6)


def test_streams_go_on_from_call_to_call():
    case = nystrom.NystromStep(16, 3, 8, calls=4)
    inputs = case.inputs(0)
    first, second = (case.implementations[nystrom.EAGER](inputs) for _ in range(2))
    assert len(first) == 4 and not torch.allclose(first[0], second[0])
    assert torch.equal(first[0], case.implementations[nystrom.EAGER](case.inputs(0))[0])


def test_figures_are_of_a_step(monkeypatch):
    monkeypatch.setattr(harness, "peak_memory", lambda *_, **__: Peak(0, 0))
    monkeypatch.setattr(harness, "interleave", lambda calls, rounds, **_: {name: [12.0] * rounds for name in calls})
    one, many = (replace(SMALL[0], calls=calls) for calls in (1, 6))
    rows = [harness.measure(case, [nystrom.EAGER], budget=0.01)[nystrom.EAGER] for case in (one, many)]
    assert rows[0].samples[0] == 12.0 and rows[1].samples[0] == 2.0
    assert rows[0].info["flops"] == rows[1].info["flops"] > 0
    assert rows[1].info["gflops"] == pytest.approx(6 * rows[0].info["gflops"])


def test_full_attention_is_computed_once_a_call():
    assert nystrom.BesideFull(20, calls=30).steps == {"native": 30, "reference": 30, nystrom.EXACT: 30, SDPA: 1, nystrom.EXPLICIT: 1}


def test_the_package_is_ours_where_there_is_a_single_head():
    """Several share its initial norms, and so their results."""
    pytest.importorskip("nystrom_attention")
    for heads, alike in ((1, True), (2, False)):
        case = nystrom_layer.NystromLayer(64, heads, 8, 8)
        expected = case.oracle(case.inputs(0))
        theirs = expected[nystrom_layer.PACKAGE][0].unflatten(-1, (heads, 8)).transpose(1, 2)
        assert torch.allclose(theirs, expected["native"][0], atol=1e-9) == alike


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setattr(nystrom_layer.importlib.util, "find_spec", lambda name: None)
    for case, name in (
        (nystrom.ExactStep(10), nystrom_layer.CONTINUAL_INFERENCE),
        (nystrom_layer.NystromLayer(64, 2, 8, 8), nystrom_layer.PACKAGE),
    ):
        reason = case.refusal(name)
        assert reason is not None and "pip install" in reason
        assert name not in getattr(case.inputs(0), "calls", {})
        assert name not in case.oracle(case.inputs(0)) or isinstance(case, nystrom.ExactStep)


def test_labels_say_what_is_saved():
    label = readme_table.NYSTROM["nystrom-step-fixed-float32-16x12-n120-m4-beside-full"]
    assert "1 / 1,788 of its operations by the paper" in label and "1 / 1,096 of those executed" in label
