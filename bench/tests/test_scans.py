"""The cases measure what they say: right results, axes with one varying parameter, floors that count necessary work."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

import cmab_kernels
from bench import devices, harness
from bench.floors import passes_of
from bench.report import measured
from bench.runs import is_ours
from bench.scans import (
    all_cases,
    attention,
    continual,
    continual_layers,
    continual_modules,
    intention,
    intention_state,
    layers,
    modules,
    nystrom,
    projected,
    scans,
)
from bench.scans.attention import NAIVE, SDPA
from bench.scans.case import DTYPES, EAGER, MODULES, PACKAGE, Case, kernels
from bench.scans.intention import CHOLESKY, CHUNKED, INVERSE
from bench.scans.intention_peers import CHUNK
from bench.scans.intention_state import RUNS, TORCH, TORCH_SINGLE
from bench.scans.modules import THEIRS

pytestmark = pytest.mark.filterwarnings("ignore:cmab_kernels runs its PyTorch reference")

SCANS = scans()
CASES = [case for found in SCANS.values() for case in found]


def of_dtypes(case: Case, dtypes: Sequence[torch.dtype] = DTYPES) -> list[Case]:
    return [case, *(case.varied(dtype=dtype) for dtype in dtypes)]


TINY = continual.step(16, 8, landmarks=3, calls=40)
SMALL = [
    *of_dtypes(attention.attention(2, 8, keys=50, latents=4, batch=3), DTYPES[:1]),
    attention.attention(2, 8, keys=50, latents=4, backward=True, every_peer=True),
    attention.attention(2, 8, keys=50, latents=4, backward=True, transposed=True),
    attention.update(keys=40),
    attention.update(keys=40, new=7),
    *of_dtypes(attention.update(keys=40, new=3), DTYPES[:1]),
    attention.update(keys=40, new=3, removes=True),
    attention.merge(3, batch=2),
    projected.projected(2, 2, 16, 40, 5),
    projected.projected(2, 2, 16, 40, 5, backward=True),
    modules.cross_attention(keys=40),
    modules.cross_attention(keys=40, backward=True),
    modules.block(keys=40),
    layers.feed_forward(5, 8),
    layers.feed_forward(5, 8, backward=True),
    layers.attention_layer(4, 8, 2, keys=6, batch=3),
    layers.attention_layer(4, 8, 2, keys=6, batch=3, backward=True),
    layers.stack(4, 8, 2, depth=2, batch=2, points=6, backward=False),
    layers.stack(4, 8, 2, depth=2, batch=2, points=6),
    modules.intention_module(100, 2, 16),
    modules.intention_module(100, 2, 16, batch=3, backward=True),
    modules.nystrom_module(64, 2, 16, landmarks=8),
    modules.nystrom_module(64, 2, 16, batch=3, backward=True, landmarks=8),
    *of_dtypes(intention.layer(100, heads=2, width=8, backward=True)),
    intention.layer(100, heads=2, width=8),
    intention.layer(CHUNK + 3, heads=2, width=8, backward=True),
    *of_dtypes(intention.sigma_layer(100, 10, heads=2, width=8)),
    intention.sigma_layer(100, 10, heads=2, width=8, batch=3, backward=True),
    *of_dtypes(intention.solve(8, 8, 5)),
    intention.solve(8, 1, 5),
    intention.solve(8, 3, 5, backward=True),
    intention.solve_state(8, 8, 5),
    *of_dtypes(intention.inverse(8, 5), DTYPES[:1]),
    *of_dtypes(intention_state.sums(100, 8)),
    intention_state.sums(100, 8, heads=2, batch=3, backward=True),
    intention_state.removal(100, 8, heads=2),
    intention_state.update(2, 8, keys=100),
    intention_state.update(2, 8, keys=100, tokens=7),
    intention_state.merge(5, 3, 8),
    *of_dtypes(nystrom.layer(64, 2, 8, 8)),
    nystrom.layer(64, 2, 8, 8, batch=3, backward=True),
    *of_dtypes(nystrom.pinv(8, 5), DTYPES[:1]),
    nystrom.pinv(8),
    nystrom.pinv(8, 5, backward=True),
    *of_dtypes(nystrom.start(20, 8, 2, landmarks=3)),
    nystrom.start(20, 8, 2, landmarks=3, fixed=True),
    nystrom.exact_start(20, 8, 2),
    *of_dtypes(TINY),
    TINY.varied(heads=3, calls=20, fixed=False),
    TINY.varied(block=5, calls=6),
    TINY.varied(block=5, calls=6, heads=3),
    TINY.varied(block=20, calls=2, fixed=False),
    TINY.varied(retroactive=True),
    TINY.varied(retroactive=True, heads=3),
    continual.beside_full(20, calls=30),
    continual.beside_full(20, calls=30, fixed=False),
    *of_dtypes(continual.exact_step(10, calls=25)),
    continual.exact_step(10, calls=25, retroactive=True),
    continual.exact_step(10, block=4, calls=5),
    continual_modules.module_step(16, 8, landmarks=3, calls=20),
    continual_modules.module_step(16, 8, landmarks=3, calls=20, heads=1),
    continual_modules.module_step(16, 8, landmarks=3, calls=20, batch=3),
    continual_modules.exact_module_step(16, 8, calls=20, batch=3),
    continual_layers.layer_step(16, 8, landmarks=3, calls=40),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_implementations_of_a_case_agree(case: Case):
    torch.compiler.reset()  # compiled versions of other cases count toward the limit of eight
    inputs = case.inputs(0)
    expected = case.expected(inputs)
    assert expected.keys() == case.implementations.keys()
    bound = 1e-5 if case.dtype == torch.float32 else harness.ERROR_BOUND[case.dtype] / 2
    for name, run in case.implementations.items():
        if case.refusal(name) is None:
            assert harness.relative_error(run(inputs), expected[name]) < bound, name


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_another_process_makes_the_same_case(case: Case):
    """The process that measures memory, to which the case is sent with everything that it has built."""
    again = pickle.loads(pickle.dumps(case))
    assert (again.name, again.parameters, again.implementations.keys()) == (
        case.name,
        case.parameters,
        case.implementations.keys(),
    )
    assert again.small().scan == case.scan and (again.threads, again.quick) == (case.threads, case.quick)


# ---- axes ------------------------------------------------------------------------------------------------------------


def differing(first: Case, second: Case) -> list[str] | None:
    """The parameters in which two groups differ; None if they do not have the same parameters."""
    mine, theirs = first.parameters, second.parameters
    return None if mine.keys() != theirs.keys() else [key for key in mine if mine[key] != theirs[key]]


def beside_an_axis(cases: Sequence[Case]) -> list[str]:
    """Groups from which no other differs in exactly one parameter."""
    return [str(case) for case in cases if not any(len(differing(case, other) or ()) == 1 for other in cases)]


def alike(cases: Sequence[Case]) -> list[tuple[str, str]]:
    """Pairs of groups that a plot could not tell apart."""
    return [(str(a), str(b)) for i, a in enumerate(cases) for b in cases[:i] if differing(a, b) == []]


def points(cases: Sequence[Case], axis: str) -> int:
    """The number of points of the longest axis along a parameter."""
    along = (case.parameters for case in cases if axis in case.parameters)
    lines = Counter(frozenset(one.items() - {(axis, one[axis])}) for one in along)
    return max(lines.values(), default=0)


@pytest.mark.parametrize("scan", SCANS)
def test_a_scan_has_axes_and_something_quick(scan: str):
    cases = SCANS[scan]
    with devices.threads(2):  # as many as a run has
        assert not beside_an_axis(cases) and not alike(cases)
        for axis in ("N", "n"):
            assert points(cases, axis) == 0 or points(cases, axis) >= 4, axis
    assert any(case.quick for case in cases)
    assert all(set(case.baselines) & case.implementations.keys() for case in cases)


# ---- what is there ---------------------------------------------------------------------------------------------------

WITHOUT_WORK = {
    "empty_ridge",
    "empty_state",
    "explain",
    "move_state",
    "state_from_tensors",
    "state_to_tensors",
    "use_impl",
}
"""Public functions that compute nothing."""
MODULE_SCANS = {
    "MultiheadAttention",
    "CMAB",
    "CMABStack",
    "MultiheadIntention",
    "NystromAttention",
    "ContinualNystromAttention",
    "ContinualAttention",
    "ContinualEncoderLayer",
}


def test_every_public_operator_is_scanned():
    operators = {name for name in cmab_kernels.__all__ if name[0].islower()} - WITHOUT_WORK
    assert operators | {f"nn.{name}" for name in MODULE_SCANS} == SCANS.keys()


def test_cases_have_names_of_their_own_and_tables_know_them():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) > 300
    assert set(measured.PLACE.findall("".join(measured.TABLES))) <= {*names, "where", "narrow", "where narrow"}


@pytest.mark.usefixtures("on_a_gpu")
def test_on_a_gpu_its_kernels_are_measured():
    expected = {
        "intention": ("triton",),
        "ridge_state": ("triton",),
        "regularised_solve": ("triton", "cuda"),
    }
    expected |= {"nystrom_attention": ("triton",), "continual_attention_step": ("triton", "cuda")}
    for operator, names in expected.items():
        auto = {"auto"} if len(names) > 1 else set()  # what a user gets if there is a choice
        assert set(kernels(operator)) == {*names, "reference"} | auto
    for case in all_cases():
        assert not any(name.startswith("native") for name in case.implementations)
        assert any(map(is_ours, case.implementations)), case


@pytest.mark.parametrize(
    "case",
    [continual.exact_step(10), nystrom.layer(64, 2, 8, 8), modules.nystrom_module(64, 2, 16, landmarks=8)],
    ids=str,
)
def test_a_missing_package_is_said(case: Case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (name,) = case.implementations.keys() & MODULES.keys()
    group = harness.measure(case, [name], budget=0.01)
    assert "pip install" in group.problems[name] and not group.at_fault(name) and not group.rows
    assert name not in getattr(case.inputs(0), "calls", {})


def test_peers_are_peers():
    """Implementations that compute something else have no share of the floor; a baseline is as accurate as our kernel,
    and is the fastest known."""
    million, short = intention.layer(1_000_000), intention.layer(16_384)
    assert (
        million.baselines == (CHUNKED,)
        and SDPA not in million.implementations
        and "reference" not in million.implementations
    )
    assert short.baselines == (CHUNKED,) and short.others == (SDPA,) and "reference" in short.implementations
    assert INVERSE not in intention.solve(8, 8, 5).baselines and INVERSE in intention.inverse(8, 5).baselines
    assert all(
        THEIRS in module.others and THEIRS not in module.baselines
        for module in (modules.intention_module(), modules.nystrom_module())
    )
    assert attention.attention(every_peer=True).baselines == (
        SDPA,
        NAIVE,
        f"{SDPA}, math",
        NAIVE + attention.COMPILED,
        attention.FLEX,
    )
    assert set(intention_state.sums().others) == {TORCH_SINGLE, RUNS}
    steps = continual.beside_full(20, calls=30).steps
    assert steps == {"native": 30, continual.EXACT: 30, SDPA: 1, continual.EXPLICIT: 1}


# ---- floors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "name", "more"),
    [
        (attention.attention(3, 8, keys=50, latents=5, batch=2), NAIVE, 0),
        # It keeps its scores.
        (
            attention.attention(3, 8, keys=50, latents=5, batch=2, backward=True),
            NAIVE,
            -2 * (2 * 3 * 5 * 50) * 8,
        ),
        (intention.layer(100, 2, 8, batch=3), CHUNKED, 6 * 100 * 64),
        (intention.layer(100, 2, 8, batch=3, backward=True), CHUNKED, 6 * 100 * 64),
        (intention.sigma_layer(100, 10, 2, 8), EAGER, 2 * 100 * 64),
        (intention_state.sums(100, 8, 2), TORCH, 2 * 100 * 64),
        (intention_state.sums(100, 8, 2, backward=True), TORCH, 2 * 100 * 64),
        (intention_state.removal(100, 8, 2), TORCH, 2 * 100 * 64),
        (intention.solve(6, 4, 5), CHOLESKY, 0),
        (intention.solve(6, 4, 5, backward=True), CHOLESKY, 0),
        (intention.solve_state(6, 4, 5), CHOLESKY, 0),
        (layers.feed_forward(5, 8), EAGER, 0),
        (layers.attention_layer(4, 8, 2, keys=6, batch=3), EAGER, 0),
        (modules.intention_module(100, 2, 16), EAGER, 2 * 100 * 64),
        (nystrom.layer(64, 2, 16, 8, batch=3), EAGER, 0),
        (nystrom.pinv(8, 5), EAGER, 0),
        (continual.exact_step(10, calls=25), EAGER, 0),
        (nystrom.start(20, 8, 2, landmarks=3), EAGER, 2 * 2 * 3 * 3 * 8),  # the landmarks' own scores
        (modules.nystrom_module(64, 2, 16, landmarks=8), EAGER, 0),
        (continual_modules.exact_module_step(16, 8, calls=20, batch=3), continual_modules.OURS_EXACT, 0),
    ],
    ids=str,
)
def test_work_is_what_torch_counts(case: Case, name: str, more: int):
    """An exception is `more`: the half of symmetric sums that need not be computed, at most."""
    inputs = case.inputs(0)
    _, flops = harness.count_flops(lambda: case.implementations[name](inputs))
    products = sum(work.products for work in passes_of(case.work))
    # Torch's counter rounds a third of a cube.
    assert flops == pytest.approx(case.steps.get(name, 1) * products + more, abs=10)


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("retroactive", [True, False])
def test_work_of_a_step_is_the_mean_of_what_is_counted(fixed: bool, retroactive: bool):
    case = TINY.varied(fixed=fixed, retroactive=retroactive, calls=160)  # ten times the length of the window
    inputs = case.inputs(0)
    _, flops = harness.count_flops(lambda: case.implementations["native"](inputs))
    # Except for the rows that are recomputed every 1,024 tokens.
    assert flops / 160 == pytest.approx(case.work.products, rel=0.02)


@pytest.mark.parametrize("case", [intention_state.merge(5, 2**14, 8), nystrom.exact_start(10_000, 8, 20)], ids=str)
def test_work_without_products_is_what_is_moved(case: Case):
    inputs = case.inputs(0)
    moved = sum(part.nbytes for part in (*inputs, *case.implementations[EAGER](inputs)))
    spare = 3 * 20 * 8 * 4 if case.scan == "continual_attention_init" else 0  # one row of each ring buffer
    assert case.work.products == 0 and case.work.bytes == moved - spare
    assert case.varied(heads=1).work is None or case.varied(heads=1, window=20).work is None, "a cache would hold them"


def test_backward_is_more_work():
    (forward,), (first, backward) = (nystrom.layer(64, 2, 16, 8, backward=backward).work for backward in (False, True))
    assert first == forward and backward.exponentials == 2 * (2 * 64 * 8)
    assert backward.products == 2 * (2 * 64 * 8 * 2 * 5 * 16)


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_streams_go_on_from_call_to_call():
    case = TINY.varied(calls=4)
    inputs = case.inputs(0)
    first, second = (case.implementations[EAGER](inputs) for _ in range(2))
    assert len(first) == 4 and not torch.allclose(first[0], second[0])
    assert torch.equal(first[0], case.implementations[EAGER](case.inputs(0))[0])


def test_the_package_is_ours_where_there_is_a_single_head():
    """Several heads share the initial norms of the pseudo-inverse, and so their results."""
    pytest.importorskip("nystrom_attention")
    for heads, same in ((1, True), (2, False)):
        case = nystrom.layer(64, heads, 8, 8)
        expected = case.expected(case.inputs(0))
        theirs = expected[PACKAGE][0].unflatten(-1, (heads, 8)).transpose(1, 2)
        assert torch.allclose(theirs, expected["native"][0], atol=1e-9) == same
