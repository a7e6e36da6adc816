"""The continual steps in Triton's interpreter. tests/test_interpreter.py runs this file with TRITON_INTERPRET=1.

The interpreter checks no bounds: tokens lie between margins of NaN, results between margins that must stay as they
were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.nystrom.continual import triton as kernels
from cmab_kernels.nystrom.continual.state import ContinualNystromState, next_state, remembered
from cmab_kernels.nystrom.continual.triton import launch
from cmab_kernels.testing import STREAMS, between_margins, guarded_results, row_error

from .memory_cases import (
    check_a_capture_keeps_the_kind_of_output,
    check_in_place_is_out_of_place,
)
from .step_cases import (
    FADING,
    Tokens,
    check_log_scales,
    check_the_largest_of_huge_logits_leaves,
    check_values_that_fade,
    compare,
    defined,
    errors,
    part,
    same,
    start,
    tokens,
    wide,
)
from .test_suite import TestContinualAttention as _ContinualAttention
from .test_suite import TestFixedLandmarks as _FixedLandmarks

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns where a masked lane overflows

KINDS = [(3, False), (3, True), (None, False), (None, True)]
kinds = pytest.mark.parametrize("landmarks, retroactive", KINDS)


@pytest.fixture(autouse=True)
def margins() -> Iterator[None]:
    """Put results between margins of memory, and check at the end of the test that no kernel wrote to the margins."""
    with guarded_results():
        yield


def _step(state: Any, new: Tokens, retroactive: bool = False) -> tuple[Tensor, Any]:
    name = "continual_nystrom_step" if isinstance(state, ContinualNystromState) else "continual_attention_step"
    return getattr(kernels, name)(state, *map(between_margins, new), retroactive)


def _capture() -> AbstractContextManager[object]:
    return mock.patch.object(launch, "_captures", lambda tensor: True)


# ---- the suite that every operator inherits


class InTriton:
    """A declaration for Triton, with fewer and smaller inputs: the interpreter takes 50 ms for a token of a head."""

    impls = repeatable = ("triton",)
    extents: ClassVar = {**_FixedLandmarks.extents, "B": 2, "H": 1, "N": 9, "D": 9, "M": 3}
    shapes = ({},)
    dtypes = (torch.float32, torch.float16)
    repeats = 2
    # Gradients are those of test_triton_gradient.py, or of the definition; numerical derivatives would take minutes.
    test_autocast = test_opcheck = test_any_order = test_gradcheck = test_gradgradcheck = None


class TestContinualAttention(InTriton, _ContinualAttention): ...


class TestFixedLandmarks(InTriton, _FixedLandmarks): ...


# ---- a stream equals the definition

SHAPES = {  # batch, heads, window, landmarks, D, E
    "ragged": (1, 2, 11, 4, 9, 8),
    "one of everything": (1, 1, 1, 1, 1, 1),
    "as many as tokens": (1, 1, 6, 6, 17, 33),
    "tiles of rows and of the window": (1, 1, 40, 17, 3, 300),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("retroactive", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_nystrom(shape: str, retroactive: bool, dtype: torch.dtype) -> None:
    batch, heads, window, landmarks, width, value_width = SHAPES[shape]
    stream = tokens(batch, heads, window + 6, width, value_width, dtype)
    compare(_step, stream, window, landmarks, [1, 3, 2], retroactive)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("retroactive", [False, True])
def test_exact(shape: str, retroactive: bool) -> None:
    batch, heads, window, _, width, value_width = SHAPES[shape]
    compare(_step, tokens(batch, heads, window + 4, width, value_width), window, None, [1, 2, 1], retroactive)


@pytest.mark.parametrize("retroactive", [False, True])
def test_fixed_landmarks(retroactive: bool) -> None:
    compare(_step, tokens(1, 1, 20, 4, 3), 8, 3, [1, 9, 2], retroactive, fixed=True)


@pytest.mark.parametrize("retroactive", [False, True])
def test_more_landmarks_than_registers_hold(retroactive: bool) -> None:
    """With 67 landmarks the pseudo-inverse is multiplied in blocks, in GPU memory."""
    compare(_step, tokens(1, 1, 72, 5, 6), 70, 67, [1, 1], retroactive)


@pytest.mark.parametrize("law", STREAMS)
@pytest.mark.parametrize("landmarks", [2, None])
def test_laws(law: str, landmarks: int | None) -> None:
    """All outputs are right; plain subtraction is wrong, or NaN, after a few dozen steps."""
    window, length = 6, 90
    query, key, value = tokens(1, 1, window + length, 4, 3, size=2.0)
    query = 2.0 * torch.nn.functional.normalize(query, dim=-1)
    key = key * STREAMS[law](window + length)[:, None]
    compare(_step, (query, key, value), window, landmarks, [length], landmarks is None, landmarks is not None)


def test_a_step_of_every_kind_is_taken_through_the_public_function() -> None:
    stream = tokens(1, 2, 9, 4, 3)
    first, new = part(stream, 0, 7), part(stream, 7, 9)
    for state in (ck.continual_nystrom_init(*first, 2), ck.continual_attention_init(*first)):
        step = ck.continual_nystrom_step if isinstance(state, ContinualNystromState) else ck.continual_attention_step
        for output in ("single", "retroactive"):
            ours, right = (step(state, *new, output=output, impl=impl) for impl in ("triton", "reference"))
            torch.testing.assert_close(ours.out, right.out)
            assert (ours.state.position == 9).all() and (right.state.position == 9).all()


# ---- bits


@kinds
def test_chunks_do_not_matter(landmarks: int | None, retroactive: bool) -> None:
    window, length = 7, 9
    stream = tokens(1, 1, window + length, 6, 9, size=5.0)
    results = []
    for chunks in ([1] * 9, [9], [2, 6, 1]):
        state, at, outs = start(part(stream, 0, window), landmarks), window, []
        for chunk in chunks:
            out, state = _step(state, part(stream, at, at + chunk), retroactive)
            at += chunk
            outs.append(out)
        results.append((outs[-1] if retroactive else torch.cat(outs, dim=2), state))
    assert all(same(out, results[0][0]) and same(state, results[0][1]) for out, state in results)


@kinds
def test_in_place_is_out_of_place(landmarks: int | None, retroactive: bool) -> None:
    check_in_place_is_out_of_place(_step, _capture, landmarks, retroactive, chunk=2)


def test_a_sole_owner_goes_on_in_its_own_memory() -> None:
    """This tests only the rule, for tensors whose storage was never requested, because torch counts a requested storage
    as a holder from then on.

    Triton's interpreter requests it, and so does filling new memory in these tests.
    """
    state = start(part(tokens(1, 1, 6, 2, 2), 0, 6), 2)
    state = remembered(state._replace(spare=state.sums.clone()))
    places = state.keys.data_ptr(), state.spare.data_ptr(), state.sums.data_ptr()
    after = next_state(state, 1, False)
    assert (after.keys.data_ptr(), after.sums.data_ptr(), after.spare.data_ptr()) == places


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns first": lambda t: t.mT.contiguous().mT,
    "step 2": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda t: t[:1, :1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("landmarks", [2, None])
def test_layouts_change_no_bit(layout: str, landmarks: int | None) -> None:
    stream = tokens(2, 2, 7, 5, 3)
    query, key, value = map(LAYOUTS[layout], part(stream, 5, 7))
    name = "continual_attention_step" if landmarks is None else "continual_nystrom_step"
    strange = getattr(kernels, name)(start(part(stream, 0, 5), landmarks), query, key, value, False)
    assert all(map(same, strange, _step(start(part(stream, 0, 5), landmarks), (query, key, value))))


@pytest.mark.parametrize("batch, heads", [(0, 2), (2, 0)])
def test_no_heads(batch: int, heads: int) -> None:
    compare(_step, tokens(batch, heads, 6, 3, 4, torch.float64), 4, 2, [2], False)


# ---- hard numbers


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1.7e308])
@pytest.mark.parametrize("spoilt", [0, 1, 2])
@pytest.mark.parametrize("landmarks", [2, None])
def test_recovery(spoilt: int, poison: float, landmarks: int | None) -> None:
    """Rows may be NaN while a token that is not finite is in the window or in a landmark; afterwards they are right."""
    window, at_fault = 4, 5
    stream = tokens(1, 1, 18, 4, 4, torch.float64, size=20.0)
    dirty = tuple(t.clone() for t in stream)
    dirty[spoilt][0, 0, at_fault] = poison * torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    in_landmarks = landmarks is not None and spoilt < 2
    gone = at_fault + window * (2 if in_landmarks else 1) + (window // 2 if in_landmarks else 0)
    ours, right = (start(part(stream, 0, window), landmarks) for _ in range(2))
    seen = False
    for at in range(window, 18):
        out, ours = _step(ours, part(dirty, at, at + 1), landmarks is None)
        wanted, right = defined(right, part(stream, at, at + 1), landmarks is None)
        (error,) = errors(wanted, out)
        assert at_fault <= at < gone or (error < 1e-12).all(), at
        seen |= not (error < 1e-3).all()
    assert seen, "such a token does something"


@pytest.mark.parametrize("landmarks", [2, None])
def test_values_that_outweigh_the_rest(landmarks: int | None) -> None:
    """When a value of 1e6 leaves the window, its rounding error must be removed too: the row sum phi does not change,
    so the guard checks values."""
    window, spike = 6, 9
    stream = tokens(1, 1, 20, 4, 5)
    stream[2][:, :, spike] = 1e6
    ours, right = start(part(stream, 0, window), landmarks), start(wide(part(stream, 0, window)), landmarks)
    for at in range(window, 20):
        out, ours = _step(ours, part(stream, at, at + 1), True)
        wanted, right = defined(right, wide(part(stream, at, at + 1)), True)
        (error,) = errors(wanted, out)
        assert at < spike + window or (error < 1e-4).all(), (at, float(error.max()))


@pytest.mark.parametrize("landmarks", [2, None])
def test_weights_that_outweigh_the_rest(landmarks: int | None) -> None:
    """When a token of weight exp(20) and value 0 leaves, the row sum has lost its digits, and only its own guard can
    detect that."""
    window, spike = 6, 9
    _, key, value = tokens(1, 1, 20, 1, 5)
    key[:, :, spike], value[:, :, spike] = 20.0, 0.0
    stream = torch.ones(1, 1, 20, 1), key, value
    compare(_step, stream, window, landmarks, [1] * 14, True, fixed=True)


@pytest.mark.parametrize("size", [1e4, 1e38])
@pytest.mark.parametrize("landmarks", [2, None])
def test_logits_of_any_size(size: float, landmarks: int | None) -> None:
    """Logits are plus or minus `size`, so that one key has all the weight or equal keys share it; sums of tokens may
    overflow float32."""
    window, length = 5, 40
    key = torch.where(torch.rand(1, 1, length, 1) < 0.5, -size, size)
    stream = torch.ones(1, 1, length, 1), key, torch.randn(1, 1, length, 3)
    ours, right = (start(part(stream, 0, window), landmarks, scale=1.0) for _ in range(2))
    for at in range(window, length, 5):
        out, ours = _step(ours, part(stream, at, at + 5), landmarks is None)
        wanted, right = defined(right, part(stream, at, at + 5), landmarks is None)
        assert out.isfinite().all() and (row_error(out, wanted) < 1e-4).all()


@pytest.mark.parametrize("landmarks", [2, None])
def test_rows_are_made_anew_on_schedule(landmarks: int | None) -> None:
    """An error in sums that the guard cannot detect is gone after as many steps as the schedule says, and not
    before."""
    window = 6 if landmarks else 14
    *asked, value = tokens(1, 1, window + 14, 1, 1, torch.float64, size=0.1)
    stream = (*asked, 1 + 0.1 * value)
    with mock.patch.object(launch, "SCHEDULE", 8):
        _, first = _step(start(part(stream, 0, window), landmarks, fixed=True), part(stream, window, window + 1), True)
        wrong = first._replace(sums=first.sums + torch.tensor([1e-3, 0.0, 0.0, 0.0, 0.0, 0.0]))

        def difference(steps: int) -> float:
            new = part(stream, window + 1, window + 1 + steps)
            return float((_step(wrong, new, True)[1].sums - _step(first, new, True)[1].sums).abs().max())

        assert difference(1) > 1e-4 and difference(9) < 1e-12


# ---- refusals


def test_a_capture_cannot_change_the_kind_of_output() -> None:
    check_a_capture_keeps_the_kind_of_output(_step, _capture)


def test_reasons() -> None:
    narrow, wider = torch.zeros(1, 1, 4, 300), torch.zeros(1, 1, 4, 513)
    assert kernels.unsupported(narrow, narrow, narrow, torch.zeros(1, 1, 64, 300)) is None
    assert "at most 512 wide, and value is 513" in str(kernels.unsupported(narrow, narrow, wider))
    assert "landmarks, and the state has 257" in str(
        kernels.unsupported(narrow, narrow, narrow, torch.zeros(1, 1, 257, 300))
    )
    assert "bfloat16" in str(kernels.unsupported(*[narrow.bfloat16()] * 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_largest_of_huge_logits_leaves(dtype: torch.dtype) -> None:
    check_the_largest_of_huge_logits_leaves(lambda state, token: _step(state, token)[1], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("law", FADING)
def test_values_that_fade(law: str, dtype: torch.dtype) -> None:
    check_values_that_fade(lambda state, token: _step(state, token)[1], law, dtype)


def test_log_scales() -> None:
    check_log_scales(lambda state, token: _step(state, token)[1])


@kinds
@torch.no_grad()
def test_rows_without_a_token(landmarks: int | None, retroactive: bool) -> None:
    """Rows of the batch that have no token keep their states bit for bit, and the others have the bits of a step of
    all."""
    output = "retroactive" if retroactive else "single"
    take = ck.continual_attention_step if landmarks is None else ck.continual_nystrom_step
    stream = tokens(3, 1, 15, 4, 5)
    states = [start(part(stream, 0, 9), landmarks) for _ in range(2)]
    absent = torch.tensor([False, True, False])
    for at in range(9, 15):
        new = part(stream, at, at + 1)
        before = ck.state_to_tensors(states[1])
        wanted, states[0] = take(states[0], *new, output=output, impl="triton")
        masked = tuple(t.masked_fill(absent[:, None, None, None], math.nan) for t in new)
        out, states[1] = take(states[1], *masked, output=output, impl="triton", key_padding_mask=absent)
        assert torch.equal(out[~absent], wanted[~absent]) and out[absent].isnan().all()
        other, after = (ck.state_to_tensors(state) for state in states)
        for name in (
            "queries",
            "keys",
            "values",
            "sums",
            "position",
            *(("landmark_keys", "inverse") if landmarks else ()),
        ):
            assert torch.equal(after[name][~absent], other[name][~absent])
            assert after[name].shape != before[name].shape or torch.equal(after[name][absent], before[name][absent])
