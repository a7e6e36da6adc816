"""Steps in which some rows of a batch have no token: these rows keep their states, and the others step as without
them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.nystrom.continual import native
from tests.nystrom.continual.step_cases import start, tokens

BATCH, HEADS, WINDOW, WIDTH, VALUES = 5, 2, 70, 6, 7
KINDS: dict[str, Any] = {"exact": (None, False), "continual": (9, False), "fixed": (5, True)}


DTYPES = [
    torch.float64,
    torch.bfloat16,
    *(pytest.param(dtype, marks=pytest.mark.thorough) for dtype in (torch.float32, torch.float16)),
]


def step(state: Any, token: Any, output: str, impl: str, mask: Tensor | None = None) -> Any:
    take = ck.continual_attention_step if isinstance(state, ck.ContinualAttentionState) else ck.continual_nystrom_step
    return take(state, *token, output=output, impl=impl, key_padding_mask=mask)


def rows_of(state: Any, rows: Any) -> Any:
    """Return the state of some rows of the batch, as a separate state."""
    fields = ck.state_to_tensors(state)
    kept = {name: field[rows] if field.dim() else field for name, field in fields.items()}
    return ck.state_from_tensors(type(state), kept)


@pytest.mark.parametrize("impl", ["native", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("output", ["single", "retroactive"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_each_row_is_a_stream_of_its_own(kind: str, output: str, dtype: torch.dtype, impl: str) -> None:
    """Every row has the bits of a stream that is stepped alone, whatever the other rows do; entries without a token are
    not read.

    torch's products, which the definition uses, may round a row of a batch differently from the row alone.
    """
    error = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    agree: Any = torch.equal if impl == "native" else partial(torch.allclose, rtol=error, atol=error)
    steps = 15 if impl == "reference" else 100
    first = tokens(BATCH, HEADS, WINDOW, WIDTH, VALUES, dtype)
    state = start(first, *KINDS[kind])
    alone = [rows_of(state, slice(row, row + 1)) for row in range(BATCH)]
    made = []
    for at in range(steps):
        absent = torch.rand(BATCH) < (0.5 if at % 7 else 0.0 if at % 2 else 1.0)
        new = tokens(BATCH, HEADS, 3 if at % 5 == 0 else 1, WIDTH, VALUES, dtype)
        for each in new:
            each[absent] = torch.nan
        if at % 3 == 0:
            made.append((state, ck.state_to_tensors(state)))  # kept, so the step must write to other memory
        before = ck.state_to_tensors(state)
        out, state = step(state, new, output, impl, absent)
        after = ck.state_to_tensors(state)
        assert out[absent].isnan().all() and out[~absent].isfinite().all()
        for row in range(BATCH):
            if absent[row]:
                same = [name for name in before if before[name].shape == after[name].shape and before[name].dim()]
                assert "position" in same and all(torch.equal(before[name][row], after[name][row]) for name in same)
            else:
                wanted, alone[row] = step(alone[row], [each[row : row + 1] for each in new], output, impl)
                assert agree(out[row], wanted[0])
                theirs = ck.state_to_tensors(alone[row])
                assert all(agree(after[name][row], theirs[name][0]) for name in theirs if theirs[name].dim())
    for kept, entries in made:
        assert all(torch.equal(entry, entries[name]) for name, entry in ck.state_to_tensors(kept).items())


@pytest.mark.parametrize("output", ["single", "retroactive"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_masked_step_reuses_the_memory_of_its_state(kind: str, output: str) -> None:
    absent = torch.tensor([True, False, True, False, False])
    state = start(tokens(BATCH, HEADS, WINDOW, WIDTH, VALUES), *KINDS[kind])
    _, state = step(state, tokens(BATCH, HEADS, 1, WIDTH, VALUES), output, "auto", absent)
    rings = {state.keys.data_ptr()}
    for _ in range(20):
        _, state = step(state, tokens(BATCH, HEADS, 1, WIDTH, VALUES), output, "auto", absent)
        rings.add(state.keys.data_ptr())
    assert len(rings) == 1


@torch.no_grad()
def test_a_first_retroactive_step_may_be_masked() -> None:
    """Rows without a token have no sums yet; their first own step computes the sums, as without the mask."""
    first, one, two = (tokens(BATCH, HEADS, length, WIDTH, VALUES) for length in (WINDOW, 1, 1))
    absent = torch.tensor([True, False, True, False, True])
    _, state = step(start(first, None), one, "retroactive", "auto", absent)
    _, other = step(start(first, None), one, "retroactive", "auto")
    both, alone = step(state, two, "retroactive", "auto").out, step(other, two, "retroactive", "auto").out
    fresh = step(start(first, None), two, "retroactive", "auto").out
    assert torch.equal(both[~absent], alone[~absent]) and torch.equal(both[absent], fresh[absent])
    huge = tuple(300 * t for t in first)  # logits whose sums a kernel recomputes
    _, state = step(start(huge, None), one, "retroactive", "auto", absent)
    fresh = step(start(huge, None), two, "retroactive", "auto").out
    assert torch.equal(step(state, two, "retroactive", "auto").out[absent], fresh[absent])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_the_rows_with_a_token_alone(kind: str) -> None:
    first, new = (
        tokens(BATCH, HEADS, 8, WIDTH, VALUES, torch.float64),
        tokens(BATCH, HEADS, 1, WIDTH, VALUES, torch.float64),
    )
    absent = torch.tensor([True, False, True, False, False])
    for each in (*first, *new):
        each.requires_grad_()
    landmarks, fixed = KINDS[kind]
    state = start(first, None if landmarks is None else 4, fixed)
    out = step(state, new, "single", "auto", absent).out
    out[~absent].sum().backward()
    for each in (*first, *new):
        if kind == "exact" and each is first[0]:
            assert each.grad is None  # single outputs of exact attention do not depend on older queries
        else:
            assert each.grad.isfinite().all() and each.grad[~absent].any() and not each.grad[absent].any()


def test_masked_steps_compile() -> None:
    state, absent = start(tokens(BATCH, HEADS, 8, WIDTH, VALUES), 4), torch.tensor([True, False, True, False, False])

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def run(state: Any, query: Tensor, key: Tensor, value: Tensor, absent: Tensor) -> Any:
        return ck.continual_nystrom_step(state, query, key, value, key_padding_mask=absent)

    with torch.no_grad():
        other = state
        for _ in range(10):
            new = tokens(BATCH, HEADS, 1, WIDTH, VALUES)
            (out, state), (wanted, other) = run(state, *new, absent), step(other, new, "single", "auto", absent)
            assert torch.equal(out, wanted) or torch.equal(out.nan_to_num(9.0), wanted.nan_to_num(9.0))
            assert torch.equal(state.position, other.position)


REFUSED: dict[str, tuple[Any, str]] = {
    "a list": ([True] * BATCH, "key_padding_mask: got a list, expected a torch.Tensor or None"),
    "numbers": (torch.zeros(BATCH), r"key_padding_mask: got torch.float32 \(5,\), expected torch.bool \(B,\) = \(5,\)"),
    "another batch": (
        torch.zeros(2, dtype=torch.bool),
        r"key_padding_mask: got torch.bool \(2,\), expected torch.bool \(B,\) = \(5,\)",
    ),
    "a mask of tokens": (torch.zeros(BATCH, 1, dtype=torch.bool), r"key_padding_mask: got torch.bool \(5, 1\)"),
    "another device": (
        torch.zeros(BATCH, dtype=torch.bool, device="meta"),
        "key_padding_mask: got device meta, expected cpu",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_what_is_no_mask_is_named(name: str) -> None:
    mask, message = REFUSED[name]
    first, new = tokens(BATCH, HEADS, 8, WIDTH, VALUES), tokens(BATCH, HEADS, 1, WIDTH, VALUES)
    for kind in KINDS.values():
        with pytest.raises((ValueError, TypeError), match=message):
            step(start(first, None if kind[0] is None else 4, kind[1]), new, "single", "auto", mask)


@torch.no_grad()
def test_more_tokens_than_a_window_are_refused_with_a_mask() -> None:
    state, new = start(tokens(BATCH, HEADS, 8, WIDTH, VALUES), None), tokens(BATCH, HEADS, 9, WIDTH, VALUES)
    absent = torch.zeros(BATCH, dtype=torch.bool)
    assert native.continual_attention_masked_step(state, *new, False, absent) is None
    with pytest.raises(ValueError, match="key: got 9 tokens with a key_padding_mask, expected at most 8, the window"):
        step(state, new, "single", "auto", absent)


@torch.no_grad()
def test_a_token_that_is_not_finite_is_refused_where_it_is_read() -> None:
    state, new = start(tokens(BATCH, HEADS, 8, WIDTH, VALUES), None), tokens(BATCH, HEADS, 1, WIDTH, VALUES)
    new[1][2] = torch.inf
    absent = torch.zeros(BATCH, dtype=torch.bool)
    with pytest.raises(ValueError, match="key"):
        step(state, new, "single", "auto", absent)
    absent[2] = True
    assert step(state, new, "single", "auto", absent).out[~absent].isfinite().all()


@torch.no_grad()
def test_an_array_is_not_an_output() -> None:
    state, new = start(tokens(BATCH, HEADS, 8, WIDTH, VALUES), None), tokens(BATCH, HEADS, 1, WIDTH, VALUES)
    output: Any = np.array(["single", "retroactive"])
    with pytest.raises(ValueError, match="output: got a ndarray, expected one of single, retroactive"):
        step(state, new, output, "auto", torch.zeros(BATCH, dtype=torch.bool))
