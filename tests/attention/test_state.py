"""The algebra of states: merge, removal, streams (P4), and empty states."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

import cmab_kernels as ck
from cmab_kernels import AttentionState
from cmab_kernels.attention.state import merged, subtract_state


def _keys(
    n: int, dtype: torch.dtype = torch.float64, law: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        (law * torch.randn(2, 3, 4, 6)).to(dtype),
        torch.randn(2, 3, n, 6).to(dtype),
        torch.randn(2, 3, n, 5).to(dtype),
    )


def _close(a: AttentionState, b: AttentionState, tolerance: float = 1e-12) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("law", [1.0, 30.0, 1e4])
def test_merge_equals_attention_over_the_union(law: float) -> None:
    q, k, v = _keys(11, law=law)
    parts = [ck.attention_state(q, k[:, :, s], v[:, :, s]) for s in (slice(0, 4), slice(4, 4), slice(4, 11))]
    whole = ck.attention_state(q, k, v)
    _close(ck.merge_states(*parts), whole, 1e-11)
    _close(ck.merge_states(*reversed(parts)), whole, 1e-11)
    _close(ck.merge_states(ck.merge_states(*parts[:2]), parts[2]), whole, 1e-11)


def test_empty_is_the_identity() -> None:
    q, k, v = _keys(7, torch.float32)
    state, empty = ck.attention_state(q, k, v), ck.empty_state(2, 3, 4, 5)
    for same in (ck.merge_states(empty, state), ck.merge_states(state, empty), ck.merge_states(state)):
        assert all(torch.equal(a, b) for a, b in zip(same, state, strict=True))
    nothing = ck.merge_states(empty, empty, empty)
    assert nothing.lse.eq(-math.inf).all() and nothing.out.eq(0).all()
    assert all(torch.equal(a, b) for a, b in zip(ck.attention_state(q, k[:, :, :0], v[:, :, :0]), empty, strict=True))


def test_merge_is_exact_at_huge_logits() -> None:
    """States whose lse is about 1e4 merge exactly, since lse is float64: float32 would be off by 5e-4."""
    out = torch.randn(1, 1, 1, 3)
    a = AttentionState(out, torch.full((1, 1, 1), 1e4, dtype=torch.float64))
    b = AttentionState(-out, torch.full((1, 1, 1), 1e4 - 1e-4, dtype=torch.float64))
    share = 1 / (1 + math.exp(-1e-4))
    torch.testing.assert_close(ck.merge_states(a, b).out, (2 * share - 1) * out, rtol=1e-6, atol=0)


def test_merge_has_gradients_through_out_and_lse() -> None:
    states = [
        AttentionState(torch.randn(1, 2, 3, 4, dtype=torch.float64), 5 * torch.randn(1, 2, 3, dtype=torch.float64))
        for _ in range(3)
    ]
    tensors = tuple(t.requires_grad_() for state in states for t in state)

    def merge(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(ck.merge_states(*(AttentionState(*tensors[i : i + 2]) for i in range(0, len(tensors), 2))))

    assert torch.autograd.gradcheck(merge, tensors) and torch.autograd.gradgradcheck(merge, tensors)


def test_gradients_of_empty_states_are_zero() -> None:
    states = [ck.empty_state(1, 1, 2, 3), ck.empty_state(1, 1, 2, 3)]
    tensors = [t.requires_grad_() for state in states for t in state]
    merged = ck.merge_states(*states)
    grads = torch.autograd.grad(merged.out.sum() + merged.lse.masked_fill(merged.lse == -math.inf, 0).sum(), tensors)
    assert all(grad.eq(0).all() for grad in grads)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.99])
def test_removal_gives_back_the_rest(share: float) -> None:
    n, gone = 200, round(200 * share)
    q, k, v = _keys(n, torch.float32)
    state, reliable = ck.remove_from_state(ck.attention_state(q, k, v), q, k[:, :, :gone], v[:, :, :gone])
    rest = ck.attention_state(q.double(), k[:, :, gone:].double(), v[:, :, gone:].double())
    assert reliable.all()
    error = (state.out.double() - rest.out).norm(dim=-1) / rest.out.norm(dim=-1)
    assert error.max() < 3e-6 / (1 - share)
    assert (state.lse - rest.lse).abs().max() < 3e-6 / (1 - share)


def test_removal_flags_what_cancelled() -> None:
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([20.0, 0.0]).view(1, 1, 2, 1), torch.randn(1, 1, 2, 3)
    state = ck.attention_state(q, k, v)
    assert not ck.remove_from_state(state, q, k[:, :, :1], v[:, :, :1]).reliable.any(), (
        "all but exp(-20) of the mass went"
    )
    assert ck.remove_from_state(state, q, k[:, :, 1:], v[:, :, 1:]).reliable.all()
    everything = ck.remove_from_state(state, q, k, v)
    assert not everything.reliable.any() and not everything.state.out.isnan().any()
    from_nothing = ck.remove_from_state(ck.empty_state(1, 1, 1, 3), q, k, v)
    assert not from_nothing.reliable.any() and from_nothing.state.lse.eq(-math.inf).all()
    nothing = ck.remove_from_state(state, q, k[:, :, :0], v[:, :, :0])
    assert (
        nothing.reliable.all()
        and torch.equal(nothing.state.out, state.out)
        and torch.equal(nothing.state.lse, state.lse)
    )
    assert ck.remove_from_state(ck.empty_state(1, 1, 1, 3), q, k[:, :, :0], v[:, :, :0]).reliable.all()


def test_removal_has_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in _keys(6))

    def rest(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(ck.remove_from_state(ck.attention_state(q, k, v), q, k[:, :, :2], v[:, :, :2]).state)

    assert torch.autograd.gradcheck(rest, (q, k, v))
    grads = torch.autograd.grad(ck.remove_from_state(ck.attention_state(q, k, v), q, k, v).state.out.sum(), (q, k, v))
    assert not any(grad.isnan().any() for grad in grads), "removing everything"


def test_split_at_every_point_with_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in _keys(9))
    whole = ck.attention_state(q, k, v)
    weights = torch.randn_like(whole.out), torch.randn_like(whole.lse)
    wanted = torch.autograd.grad(tuple(whole), (q, k, v), weights)
    for cut in range(10):
        state = ck.attention_state(q, k[:, :, :cut], v[:, :, :cut])
        state = ck.attention_state(q, k[:, :, cut:], v[:, :, cut:], state=state)
        _close(state, whole)
        for a, b in zip(torch.autograd.grad(tuple(state), (q, k, v), weights), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_chunks_of_one_with_gradients() -> None:
    q, k, v = (t.requires_grad_() for t in _keys(20))
    state = ck.empty_state(2, 3, 4, 5, dtype=torch.float64)
    for i in range(20):
        state = ck.attention_state(q, k[:, :, i : i + 1], v[:, :, i : i + 1], state=state)
    whole = ck.attention_state(q, k, v)
    _close(state, whole)
    loss = [s.out.pow(2).sum() + s.lse.sin().sum() for s in (state, whole)]
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v)) for x in loss), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def _logits(law: str, steps: int) -> torch.Tensor:
    """Return the logits of a stream from one of four distributions: N(0, 1), N(0, 10^2), and N(0, 1) with rare large
    logits of 20 or 40."""
    logits = torch.randn(steps)
    if law == "ten":
        logits *= 10
    elif law == "spikes of 20":
        logits[::5_000] += 20
    elif law == "spikes of 40":
        logits[::50_000] += 40
    return logits


@pytest.mark.parametrize("law", ["one", "ten", "spikes of 20", "spikes of 40"])
@pytest.mark.parametrize("steps", [20_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_long_stream_equals_one_pass(law: str, steps: int) -> None:
    """A float32 stream of single keys that is saved and restored from time to time equals one pass in float64."""
    logits, value = _logits(law, steps), torch.randn(steps, 2)
    query = torch.ones(1, 1, 1, 1)
    state = ck.empty_state(1, 1, 1, 2)
    for i, (key, v) in enumerate(zip(logits.view(-1, 1, 1, 1, 1), value.view(-1, 1, 1, 1, 2), strict=True)):
        state = ck.attention_state(query, key, v, state=state, scale=1.0)
        if i % 7919 == 0:
            state = AttentionState(**{name: tensor.clone() for name, tensor in state._asdict().items()})
    weight = logits.double().softmax(0)
    expected = weight @ value.double()
    spread = float((weight.unsqueeze(-1) * value.double().abs()).sum())
    assert abs(float(state.lse) - float(logits.double().logsumexp(0))) < 4 * torch.finfo(torch.float32).eps * float(
        logits.abs().max()
    )
    assert float((state.out.view(-1).double() - expected).abs().max()) < 1e-5 * spread


def _same(ours: Sequence[torch.Tensor], formula: Sequence[torch.Tensor]) -> None:
    for mine, wanted in zip(ours, formula, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-13, equal_nan=True)


@pytest.mark.skipif(
    not ck.explain("attention_state", *3 * [torch.ones(1, 1, 1, 1)])[0].usable, reason="the extension was not built"
)
@pytest.mark.parametrize("left", ["most", "some", "nothing", "nothing there", "nothing removed", "nan"])
def test_one_native_call_is_the_formula(left: str) -> None:
    """Removal and merge in one native call, as used without gradients, equal their formulas, also in edge cases."""
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (70, 9, 9))
    gone = slice(0, {"most": 1, "some": 5, "nan": 5, "nothing removed": 0}.get(left, 9))
    state = ck.empty_state(2, 3, 70, 4, dtype=torch.float64) if left == "nothing there" else ck.attention_state(q, k, v)
    if left == "nan":
        v[1, 2, 0, 1] = k[0, 1, 2, 0] = math.nan
    part = ck.attention_state(q, k[:, :, gone], v[:, :, gone])
    removal, formula = (
        ck.remove_from_state(state, q, k[:, :, gone], v[:, :, gone], impl="native"),
        subtract_state(state, part),
    )
    _same(removal.state, formula.state)
    assert torch.equal(removal.reliable, formula.reliable)
    for others in ((part,), (part, state)):
        _same(ck.merge_states(state, *others), merged(state, *others))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_formula_flags_what_cancelled(dtype: torch.dtype) -> None:
    """A row is reliable if the share of its mass that is left is at least the root of eps."""
    whole = AttentionState(torch.ones(1, 1, 2, 1, dtype=dtype), torch.zeros(1, 1, 2, dtype=torch.float64))
    left = torch.finfo(dtype).eps ** 0.5 * torch.tensor([0.9, 1.1], dtype=torch.float64)
    part = whole._replace(lse=torch.log1p(-left).view(1, 1, 2))
    assert subtract_state(whole, part).reliable.flatten().tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_removal_of_logits_without_digits_is_flagged(impl: str, dtype: torch.dtype) -> None:
    """The code that added a key may have rounded its logit to a neighbour of the logit that is removed."""
    largest = 2.0 ** (40 if dtype == torch.float32 else 70)
    query = torch.ones(1, 1, 1, 1, dtype=dtype)
    key, value = (
        largest * torch.tensor([1.0, 2.0**-8], dtype=dtype).view(1, 1, 2, 1),
        torch.randn(1, 1, 2, 3, dtype=dtype),
    )
    state = ck.attention_state(query, key, value, scale=1.0, impl=impl)
    state = state._replace(lse=state.lse * (1 + torch.finfo(dtype).eps))
    for token, reliable in ((0, False), (1, True)):
        one = slice(token, token + 1)
        assert (
            ck.remove_from_state(state, query, key[:, :, one], value[:, :, one], scale=1.0, impl=impl).reliable.item()
            is reliable
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("roundings", [1, 7])
def test_removal_of_logits_rounded_otherwise_is_flagged(impl: str, dtype: torch.dtype, roundings: int) -> None:
    """If all keys are removed, only the rounding of their logits is left;
    a row that keeps half of its mass is reliable."""
    eps = torch.finfo(dtype).eps
    query, key, value = (
        torch.ones(1, 1, 1, 1).to(dtype),
        torch.full((1, 1, 2, 1), 2.0**-10 / eps, dtype=dtype),
        torch.randn(1, 1, 2, 3).to(dtype),
    )
    state = ck.attention_state(query, key, value, scale=1.0, impl=impl)
    state = state._replace(lse=state.lse * (1 + roundings * eps))
    for count, reliable in ((2, False), (1, True)):
        removal = ck.remove_from_state(state, query, key[:, :, :count], value[:, :, :count], scale=1.0, impl=impl)
        assert removal.reliable.item() is reliable
