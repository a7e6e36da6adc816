"""Sets of different sizes, packed into one row of keys by `cu_seqlens`: each has the same sums and the same regression
as alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cmab_kernels as ck
from cmab_kernels.intention.reference import gram_backward_reference

OFFSETS = torch.tensor([0, 5, 5, 12, 40])
SETS, HEADS, ROWS, WIDTH, COLUMNS = 4, 2, 43, 3, 2
"""The second set is empty, and three rows after the last set belong to no set."""


def _inputs(dtype: torch.dtype = torch.float64, rows: int = ROWS, sets: int = SETS) -> dict[str, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "query": torch.randn(sets, HEADS, 6, WIDTH, dtype=dtype),
        "key": torch.randn(1, HEADS, rows, WIDTH, dtype=dtype),
        "value": torch.randn(1, HEADS, rows, COLUMNS, dtype=dtype),
        "weights": torch.rand(1, HEADS, rows, dtype=wide),
        "alpha": torch.rand(sets, HEADS, dtype=torch.float64) + 0.1,
    }


def _every_set(offsets: Tensor, mask: Tensor | None, call: Callable[[int, dict[str, Tensor]], Any], **rows: Tensor):
    """Return the results of `call` for the number and the rows of each set, as one batch."""
    results = []
    for number, (first, end) in enumerate(pairwise(offsets.tolist())):
        alone = {name: t[:, :, first:end] for name, t in rows.items()}
        if mask is not None:
            alone["key_padding_mask"] = mask[:, first:end]
        results.append(call(number, alone))
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


def _both(impl: str, inputs: dict[str, Tensor], offsets: Tensor, mask: Tensor | None) -> tuple[list[Tensor], ...]:
    """Return state and predictions of packed sets, and of each set alone."""
    query, alpha, rows = inputs["query"], inputs["alpha"], {n: inputs[n] for n in ("key", "value", "weights")}
    packed: dict[str, Any] = {**rows, "key_padding_mask": mask, "cu_seqlens": offsets}
    ours = [*ck.ridge_state(**packed, impl=impl), ck.intention(query, alpha=alpha, **packed, impl=impl)]

    def alone(s: int, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        out = ck.intention(query[s : s + 1], **given, alpha=alpha[s : s + 1], form="primal", impl=impl)
        return *ck.ridge_state(**given, impl=impl), out

    return ours, _every_set(offsets, mask, alone, **rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "offsets", [OFFSETS, torch.tensor([0, 30, 12_000, 12_001, 12_700]), torch.tensor([0, 0, 9000])]
)
def test_bits_of_each_set_alone(offsets: Tensor, masked: bool, dtype: torch.dtype) -> None:
    """Sets are longer and shorter than a run and a piece. Gradients are compared too."""
    rows = int(offsets[-1]) + 3
    inputs = {n: t.requires_grad_() for n, t in _inputs(dtype, rows, len(offsets) - 1).items()}
    mask = torch.rand(1, rows) < 0.3 if masked else None
    ours, right = _both("native", inputs, offsets, mask)
    assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))
    slopes = [torch.randn_like(t) for t in right if t.is_floating_point()]
    grads = [
        torch.autograd.grad([t for t in results if t.is_floating_point()], list(inputs.values()), slopes)
        for results in (ours, right)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_sums_by_the_definition(impl: str, wide: torch.dtype) -> None:
    """The sums of every set, on top of a state that fades; offsets may have gaps in memory."""
    inputs, mask = _inputs(), torch.rand(1, ROWS) < 0.3
    key, value, weights = (inputs[n] for n in ("key", "value", "weights"))
    before = ck.ridge_state(torch.randn(SETS, HEADS, 7, WIDTH), torch.randn(SETS, HEADS, 7, COLUMNS))
    decay = torch.rand(SETS, HEADS) * 0.5 + 0.5
    offsets = torch.stack([OFFSETS, -OFFSETS], 1).to(wide)[:, 0]
    given = {"weights": weights, "key_padding_mask": mask, "cu_seqlens": offsets}
    state = ck.ridge_state(key, value, state=before, decay=decay, **given, impl=impl)
    fades = decay.double()[..., None, None]
    for s in range(SETS):
        kept = torch.arange(int(OFFSETS[s]), int(OFFSETS[s + 1]))
        kept = kept[~mask[0, kept]]
        weighted = (weights[0, :, kept, None] * key[0, :, kept]).mT
        for ours, other, old in ((state.gram, key, before.gram), (state.moment, value, before.moment)):
            right = fades[s] * old[s] + weighted @ other[0, :, kept]
            torch.testing.assert_close(ours[s], right, rtol=1e-12, atol=1e-12)
        assert state.count[s].tolist() == [7 + len(kept)] * HEADS


def test_predictions_by_the_definition(impl: str) -> None:
    """The query is shared, and there is one penalty. The empty set predicts 0. A set may have fewer keys than
    columns."""
    inputs = _inputs()
    query, key, value = (inputs[n] for n in ("query", "key", "value"))
    out = ck.intention(query[0], key, value, 0.3, cu_seqlens=OFFSETS, impl=impl)
    assert out.shape == (SETS, HEADS, 6, COLUMNS) and not out[1].any()
    for s in (0, 2, 3):
        k, v = (t[0, :, int(OFFSETS[s]) : int(OFFSETS[s + 1])] for t in (key, value))
        system = k.mT @ k + 0.3 * torch.eye(WIDTH, dtype=k.dtype)
        torch.testing.assert_close(out[s], query[0] @ torch.linalg.solve(system, k.mT @ v), rtol=1e-12, atol=1e-12)
    few = ck.intention(query[:2], key, value, 0.3, cu_seqlens=torch.tensor([0, 1, 3]), impl=impl)
    dual = ck.intention(query[1:2], key[:, :, 1:3], value[:, :, 1:3], 0.3, form="dual", impl=impl)
    torch.testing.assert_close(few[1:], dual, rtol=1e-12, atol=1e-12)


def test_small_buffers(impl: str) -> None:
    """The primal form solves even if all sets together have fewer keys than columns: the dual form supports only one
    set."""
    query, key, value = torch.randn(2, 1, 4, 9), torch.randn(1, 1, 5, 9), torch.randn(1, 1, 5, 2)
    out = ck.intention(query, key, value, 0.3, cu_seqlens=torch.tensor([0, 2, 5]), impl=impl)
    for s, rows in enumerate((slice(0, 2), slice(2, 5))):
        alone = ck.intention(query[s : s + 1], key[:, :, rows], value[:, :, rows], 0.3, form="primal", impl=impl)
        torch.testing.assert_close(out[s : s + 1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nothing_passes_from_set_to_set(impl: str, poison: float) -> None:
    """A bad key affects only its set, and no set if it is masked or after the last set. A bad gradient affects only its
    set."""
    inputs = {n: t for n, t in _inputs().items() if n in ("key", "value", "weights")}
    mask = torch.zeros(1, ROWS, dtype=torch.bool)
    mask[:, 20] = True

    def results(slopes: Tensor) -> tuple[Tensor, ...]:
        leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
        state = ck.ridge_state(**leaves, key_padding_mask=mask, cu_seqlens=OFFSETS, impl=impl)
        gram, moment = state.gram, state.moment
        return gram, moment, *torch.autograd.grad((gram, moment), list(leaves.values()), (slopes, slopes[..., :2]))

    slopes = torch.randn(SETS, HEADS, WIDTH, WIDTH, dtype=torch.float64)
    clean = results(slopes)
    inputs["key"][:, :, [3, 20, 41]] = poison
    slopes[2] = poison
    bad = results(slopes)
    for ours, right in zip(bad[:2], clean[:2], strict=True):
        assert torch.equal(ours[1:], right[1:]) and not ours[0].isfinite().any()
    for ours, right in zip(bad[2:], clean[2:], strict=True):
        assert torch.equal(ours[:, :, 12:], right[:, :, 12:]) and not ours[:, :, 40:].any() and not ours[:, :, 20].any()


@pytest.mark.parametrize("poison", [1.0, math.nan])
def test_the_formula_of_the_gradient(poison: float) -> None:
    """The formula serves second derivatives: each set has the same gradient as alone, and a bad incoming gradient
    affects only its set."""
    inputs, mask = _inputs(), torch.rand(1, ROWS) < 0.3
    rows = {n: inputs[n] for n in ("key", "value", "weights")}
    dgram, dmoment = (torch.randn(SETS, HEADS, WIDTH, n, dtype=torch.float64) for n in (WIDTH, COLUMNS))
    dgram[2] *= poison
    ours = gram_backward_reference(dgram, dmoment, *rows.values(), mask, True, OFFSETS)
    for s, (first, end) in enumerate(pairwise(OFFSETS.tolist())):
        alone, hidden = (t[:, :, first:end] for t in rows.values()), mask[:, first:end]
        right = gram_backward_reference(dgram[s : s + 1], dmoment[s : s + 1], *alone, hidden, True)
        for grad, wanted in zip(ours, right, strict=True):
            wanted[hidden[:, None].expand(1, HEADS, -1)] = 0.0  # NaN times a row of 0 is NaN
            torch.testing.assert_close(grad[:, :, first:end], wanted, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert not any(grad[:, :, 40:].any() for grad in ours)


def test_no_sets(impl: str) -> None:
    """One offset packs no set: results have batch 0, and every row gets a gradient of 0."""
    inputs = _inputs(sets=0)
    key, value = (inputs[n].requires_grad_() for n in ("key", "value"))
    for offsets in (torch.tensor([0]), torch.tensor([0], dtype=torch.int32)):
        out = ck.intention(inputs["query"], key, value, 0.3, cu_seqlens=offsets, impl=impl)
        state = ck.ridge_state(key, value, cu_seqlens=offsets, impl=impl)
        assert out.shape == (0, HEADS, 6, COLUMNS) and state.moment.shape == (0, HEADS, WIDTH, COLUMNS)
        assert state.count.shape == (0, HEADS)
        grads = torch.autograd.grad(out.sum() + state.gram.sum(), (key, value))
        assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, (key, value), strict=True))


def test_no_rows(impl: str) -> None:
    key = torch.randn(1, HEADS, 0, WIDTH, requires_grad=True)
    state = ck.ridge_state(key, key, cu_seqlens=torch.tensor([0, 0, 0]), impl=impl)
    assert state.gram.shape == (2, HEADS, WIDTH, WIDTH) and not state.gram.any() and not state.count.any()
    assert torch.autograd.grad(state.gram.sum(), key)[0].shape == key.shape


def test_any_number_of_threads() -> None:
    inputs, threads = _inputs(torch.float32, 12_700), torch.get_num_threads()
    offsets = torch.tensor([0, 30, 12_000, 12_001, 12_700])
    rows = {n: inputs[n].requires_grad_() for n in ("key", "value", "weights")}
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            state = ck.ridge_state(**rows, cu_seqlens=offsets, impl="native")
            grads = torch.autograd.grad(state.gram.square().sum() + state.moment.sum(), list(rows.values()))
            results.append((state.gram, state.moment, *grads))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compiled_and_exported(impl: str) -> None:
    """The call has other offsets than the trace."""
    inputs = _inputs()

    def both(key: Tensor, value: Tensor, query: Tensor, offsets: Tensor) -> Tensor:
        state = ck.ridge_state(key, value, cu_seqlens=offsets, impl=impl)
        out = ck.intention(query, key, value, 0.3, cu_seqlens=offsets, impl=impl)
        return out.square().sum() + state.gram.sum() + state.count.sum()

    class Model(torch.nn.Module):
        def forward(self, key: Tensor, value: Tensor, query: Tensor, offsets: Tensor) -> Tensor:
            return both(key, value, query, offsets)

    rows = [inputs[n].requires_grad_() for n in ("key", "value", "query")]
    others = torch.tensor([0, 9, 14, 14, 43])
    for program in (
        torch.compile(both, fullgraph=True, backend="aot_eager"),
        torch.export.export(Model(), (*rows, OFFSETS)).module(),
    ):
        program(*rows, OFFSETS)
        ours, right = program(*rows, others), both(*rows, others)
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
        slopes = [torch.autograd.grad(result, rows) for result in (ours, right)]
        torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)
        if impl == "native":
            with pytest.raises(ValueError, match=r"^cu_seqlens: got \[0, 9, 5"):
                program(*rows, torch.tensor([0, 9, 5, 14, 43]))


def test_flops() -> None:
    """Every row is in one sum, however many sets there are."""
    inputs = _inputs()
    key, value = (inputs[n].requires_grad_() for n in ("key", "value"))
    with FlopCounterMode(display=False) as forward:
        state = ck.ridge_state(key, value, cu_seqlens=OFFSETS, impl="native")
    assert forward.get_total_flops() == HEADS * ROWS * (WIDTH * (WIDTH + 1) + 2 * WIDTH * COLUMNS)
    with FlopCounterMode(display=False) as backward:
        (state.gram.sum() + state.moment.sum()).backward()
    assert backward.get_total_flops() == 2 * HEADS * ROWS * WIDTH * (WIDTH + 2 * COLUMNS)


BAD: dict[str, tuple[type[Exception], str, Any]] = {
    "falling": (ValueError, r"^cu_seqlens: got \[0, 5, 3, 9\].*N = 43", torch.tensor([0, 5, 3, 9])),
    "long": (ValueError, r"^cu_seqlens: got \[0, 5, 6, 44\].*at most N = 43", torch.tensor([0, 5, 6, 44])),
    "late": (ValueError, r"^cu_seqlens: got \[1, 5, 6, 9\]", torch.tensor([1, 5, 6, 9])),
    "negative": (ValueError, r"^cu_seqlens: got \[0, -5, 6, 9\]", torch.tensor([0, -5, 6, 9])),
    "many": (ValueError, r"^cu_seqlens: got \[0, 1, 2, 3, '...', 8, 9, 0\]", torch.tensor([*range(10), 0])),
    "a matrix": (ValueError, r"^cu_seqlens: got shape \(1, 4\)", torch.tensor([[0, 5, 6, 9]])),
    "nothing": (ValueError, r"^cu_seqlens: got shape \(0,\)", torch.tensor([], dtype=torch.int64)),
    "a list": (TypeError, r"^cu_seqlens: got a list", [0, 5, 6, 9]),
    "sparse": (TypeError, r"^cu_seqlens: got torch.sparse_coo", torch.tensor([0, 5, 6, 9]).to_sparse()),
    "floats": (TypeError, r"^cu_seqlens: got torch.float32", torch.tensor([0.0, 5.0, 6.0, 9.0])),
    "elsewhere": (ValueError, r"^cu_seqlens: got device meta", torch.tensor([0, 5, 6, 9], device="meta")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_offsets(impl: str, case: str) -> None:
    error, message, offsets = BAD[case]
    inputs = _inputs()
    query, key, value = (inputs[n] for n in ("query", "key", "value"))
    with pytest.raises(error, match=message):
        ck.intention(query[0], key, value, 0.1, cu_seqlens=offsets, impl=impl)
    with pytest.raises(error, match=message):
        ck.ridge_state(key, value, cu_seqlens=offsets, impl=impl)


def test_arguments_that_do_not_fit() -> None:
    inputs = _inputs()
    query, key, value = (inputs[n] for n in ("query", "key", "value"))
    twice = key.expand(2, -1, -1, -1), value.expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match=r"^key: got batch 2.*batch 1"):
        ck.ridge_state(*twice, cu_seqlens=OFFSETS)
    with pytest.raises(ValueError, match=r"^query: got shape \(3, 2, 6, 3\).*\(4, 2, L, 3\)"):
        ck.intention(query[1:], key, value, 0.1, cu_seqlens=OFFSETS)
    with pytest.raises(ValueError, match=r"^alpha: got shape \(3, 2\).*\(4, 2\)"):
        ck.intention(query, key, value, torch.ones(3, 2), cu_seqlens=OFFSETS)
    with pytest.raises(ValueError, match=r"^form: got 'dual', expected auto or primal, as cu_seqlens packs"):
        ck.intention(query, key, value, 0.1, form="dual", cu_seqlens=OFFSETS)
    with pytest.raises(ValueError, match=r"^state.moment: got shape|^state.gram: got shape"):
        ck.ridge_state(key, value, state=ck.empty_ridge(1, HEADS, WIDTH, COLUMNS), cu_seqlens=OFFSETS)
    with pytest.raises(ValueError, match=r"^decay: got shape \(3, 2\).*\(4, 2\)"):
        ck.ridge_state(key, value, decay=torch.ones(3, 2), cu_seqlens=OFFSETS)
