"""The streaming state: exact sums, merges and removals, for a million steps (P4)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import RidgeState

LAWS = {
    "normal": lambda n, w: torch.randn(1, 1, n, w),
    "ten times": lambda n, w: 10 * torch.randn(1, 1, n, w),
    "spikes of 20": lambda n, w: torch.randn(1, 1, n, w) + 20.0 * (torch.arange(n) % 5_000 == 4_999)[:, None],
    "spikes of 40": lambda n, w: torch.randn(1, 1, n, w) + 40.0 * (torch.arange(n) % 50_000 == 49_999)[:, None],
}


def _rows(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, n, 4).to(dtype), torch.randn(2, 3, n, 5).to(dtype)


def _close(a: RidgeState, b: RidgeState, tolerance: float = 1e-13) -> None:
    torch.testing.assert_close(a.gram, b.gram, rtol=tolerance, atol=tolerance * float(b.gram.abs().max()))
    torch.testing.assert_close(a.moment, b.moment, rtol=tolerance, atol=tolerance * float(b.gram.abs().max()))
    assert torch.equal(a.count, b.count)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float64_and_exact(impl: str, dtype: torch.dtype) -> None:
    k, v = _rows(300, dtype)
    weights = torch.rand(2, 300)
    state = ck.ridge_state(k, v, weights=weights, impl=impl)
    kd, vd, w = (
        k.double(),
        v.double(),
        weights.to(torch.float64 if dtype == torch.float64 else torch.float32).double()[:, None, :, None],
    )
    _close(state, RidgeState((w * kd).mT @ kd, (w * kd).mT @ vd, torch.full((2, 3), 300)))
    assert torch.equal(state.gram, state.gram.mT)


def test_ignored_keys_are_not_counted(impl: str) -> None:
    ignored = torch.rand(2, 30) < 0.3
    before = RidgeState(
        torch.eye(4).double().expand(2, 3, 4, 4), torch.zeros(2, 3, 4, 5).double(), torch.arange(6).view(2, 3)
    )
    state = ck.ridge_state(*_rows(30), state=before, key_padding_mask=ignored, impl=impl)
    assert torch.equal(state.count, before.count + (~ignored).sum(1, keepdim=True))


def test_every_split_gives_the_same_state(impl: str) -> None:
    k, v = _rows(11, torch.float32)
    whole = ck.ridge_state(k, v, impl=impl)
    for cut in range(12):
        parts = [ck.ridge_state(k[:, :, s], v[:, :, s], impl=impl) for s in (slice(0, cut), slice(cut, 11))]
        _close(ck.merge_ridge(*parts), whole)
        _close(ck.ridge_state(k[:, :, cut:], v[:, :, cut:], state=parts[0], impl=impl), whole)
    state = ck.empty_ridge(2, 3, 4, 5)
    for i in range(11):
        state = ck.ridge_state(k[:, :, i : i + 1], v[:, :, i : i + 1], state=state, impl=impl)
    _close(state, whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [0, 1, 700])
def test_a_step_is_an_update_and_a_solve(dtype: torch.dtype, keys: int, impl: str) -> None:
    """The bits are the same for any layout of the state, which does not change."""
    k, v = _rows(9 + keys, dtype)
    before = ck.ridge_state(k[:, :, :9], v[:, :, :9], impl=impl)
    odd = RidgeState(before.gram.mT, before.moment.mT.contiguous().mT, before.count[:, :1].clone().expand(2, 3))
    options = {"weights": torch.rand(2, keys), "key_padding_mask": torch.rand(2, keys) < 0.3}
    for state, alpha in ((before, 0.1), (odd, torch.rand(3)), (before, torch.tensor(0.5))):
        kept = [part.clone() for part in state]
        (weight, info), new = ck.ridge_step(state, k[:, :, 9:], v[:, :, 9:], alpha, **options, impl=impl)
        wanted = ck.ridge_state(k[:, :, 9:], v[:, :, 9:], state=state, **options, impl=impl)
        solved = ck.solve_ridge(wanted, alpha, impl=impl)
        for mine, theirs in zip((weight, info, *new, *state), (*solved, *wanted, *kept), strict=True):
            assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype


def test_removal_gives_back_the_rest(impl: str) -> None:
    k, v = _rows(50, torch.float32)
    weights, mask = torch.rand(2, 50), torch.rand(2, 50) < 0.2
    options = [{"weights": weights[:, s], "key_padding_mask": mask[:, s]} for s in (slice(0, 30), slice(30, 50))]
    whole = ck.ridge_state(k, v, weights=weights, key_padding_mask=mask, impl=impl)
    rest = ck.remove_ridge(whole, k[:, :, :30], v[:, :, :30], **options[0], impl=impl)
    _close(rest, ck.ridge_state(k[:, :, 30:], v[:, :, 30:], **options[1], impl=impl), 1e-14)
    nothing = ck.remove_ridge(rest, k[:, :, 30:], v[:, :, 30:], **options[1], impl=impl)
    assert nothing.gram.eq(0).all() and nothing.moment.eq(0).all() and nothing.count.eq(0).all()
    with pytest.raises(ValueError, match=r"^state.count minus the number of removed keys: got a negative element"):
        ck.remove_ridge(nothing, k[:, :, :1], v[:, :, :1], impl=impl)


def test_a_removal_that_leaves_too_little_is_reported() -> None:
    k, v = _rows(6)
    left = ck.remove_ridge(ck.ridge_state(k, v), k[:, :, :3], v[:, :, :3])
    assert left.count.eq(3).all()
    assert ck.solve_ridge(left, 0.0).info.ne(0).all(), "three keys do not determine four coefficients"
    assert ck.solve_ridge(left, 0.1).info.eq(0).all()


def test_gradients_through_updates_merges_and_removals(impl: str) -> None:
    k, v = (t.requires_grad_() for t in _rows(8))
    alpha = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def stream(k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
        state = ck.ridge_state(k[:, :, :3], v[:, :, :3], impl=impl)
        state = ck.ridge_state(k[:, :, 3:6], v[:, :, 3:6], state=state, impl=impl)
        state = ck.merge_ridge(state, ck.ridge_state(k[:, :, 6:], v[:, :, 6:], impl=impl))
        state = ck.remove_ridge(state, k[:, :, 1:2], v[:, :, 1:2], impl=impl)
        return ck.solve_ridge(state, alpha, impl=impl).weight

    kept = [0, 2, 3, 4, 5, 6, 7]
    wanted = ck.solve_ridge(ck.ridge_state(k[:, :, kept], v[:, :, kept], impl=impl), alpha, impl=impl).weight
    ours = stream(k, v, alpha)
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-11)
    for a, b in zip(
        torch.autograd.grad(ours.pow(2).sum(), (k, v, alpha)),
        torch.autograd.grad(wanted.pow(2).sum(), (k, v, alpha)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)
    assert torch.autograd.gradcheck(stream, (k, v, alpha)) and torch.autograd.gradgradcheck(stream, (k, v, alpha))


def _drift(law: str, steps: int) -> tuple[float, float]:
    """Return the relative errors of the Gram matrix after `steps` updates of a sliding window:
    ours, and that of float32 sums."""
    window, width = 100, 4
    rows, targets = LAWS[law](steps, width), torch.randn(1, 1, steps, 2)
    state, single = ck.empty_ridge(1, 1, width, 2), torch.zeros(width, width)
    for i in range(steps):
        state = ck.ridge_state(rows[:, :, i : i + 1], targets[:, :, i : i + 1], state=state)
        single += rows[0, 0, i, :, None] * rows[0, 0, i]
        if i >= window:
            old = slice(i - window, i - window + 1)
            state = ck.remove_ridge(state, rows[:, :, old], targets[:, :, old])
            single -= rows[0, 0, i - window, :, None] * rows[0, 0, i - window]
    last = rows[0, 0, -window:].double()
    gram = last.T @ last
    assert state.count.item() == window
    return tuple(float((g - gram).norm() / gram.norm()) for g in (state.gram[0, 0], single.double()))


@pytest.mark.parametrize("law", LAWS)
def test_a_long_sliding_window_does_not_drift(law: str) -> None:
    ours, _ = _drift(law, 5_000)
    assert ours < 1e-13


@pytest.mark.nightly
@pytest.mark.parametrize("law", LAWS)
def test_a_million_steps_do_not_drift(law: str) -> None:
    ours, single = _drift(law, 1_000_000)
    print(f"{law}: float64 sums {ours:.1e}, float32 sums {single:.1e}")
    assert ours < 1e-11 and single > 100 * ours


def test_a_million_additions_in_one_call_and_in_many(impl: str) -> None:
    """Sums of a million float32 rows of mean 1 are right in float64;
    summed in float32 they would be off by more than 1e-4."""
    key, value = 1 + torch.randn(1, 1, 1_000_000, 2), torch.randn(1, 1, 1_000_000, 1)
    gram = key[0, 0].double().T @ key[0, 0].double()
    state = None
    for k, v in zip(key.split(9973, 2), value.split(9973, 2), strict=True):
        state = ck.ridge_state(k, v, state=state, impl=impl)
    for sums in (state.gram, ck.ridge_state(key, value, impl=impl).gram):
        assert (sums[0, 0] - gram).norm() < 1e-12 * gram.norm()
    assert (
        ck.intention(torch.eye(2)[None, None], key, value, 1.0, impl=impl) - ck.solve_ridge(state, 1.0).weight
    ).abs().max() < 1e-7


def test_to_and_from_a_plain_dict() -> None:
    state = ck.ridge_state(*_rows(7))
    again = RidgeState(**{name: tensor.clone() for name, tensor in state._asdict().items()})
    _close(ck.merge_ridge(again, ck.empty_ridge(2, 3, 4, 5)), state)


@pytest.mark.parametrize("every", [1, 4, 7, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_states_of_all_prefixes_are_those_of_a_loop(impl: str, every: int, masked: bool) -> None:
    """Each is `ridge_state` of the keys so far, with its count, on top of an earlier state, which does not change."""
    key, value, weights = torch.randn(2, 3, 26, 5), torch.randn(2, 3, 26, 2), torch.rand(2, 26)
    mask = torch.rand(2, 26) < 0.3 if masked else None
    before = ck.ridge_state(torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 2))
    kept = [part.clone() for part in before]
    states = ck.prefix_ridge_states(
        key, value, every=every, state=before, weights=weights, key_padding_mask=mask, impl=impl
    )
    assert all(torch.equal(part, old) for part, old in zip(before, kept, strict=True))
    stops = [min(stop + every, 26) for stop in range(0, 26, every)]
    assert states.count.shape == (2, 3, len(stops))
    for t, stop in enumerate(stops):
        seen = ck.ridge_state(
            key[:, :, :stop],
            value[:, :, :stop],
            state=before,
            weights=weights[:, :stop],
            key_padding_mask=None if mask is None else mask[:, :stop],
            impl="reference",
        )
        for ours, right in zip(states, seen, strict=True):
            torch.testing.assert_close(ours[:, :, t], right, rtol=1e-12, atol=1e-12)


def test_no_keys_have_no_prefixes(impl: str) -> None:
    none = torch.randn(2, 3, 0, 5)
    assert [tuple(part.shape) for part in ck.prefix_ridge_states(none, none, impl=impl)] == [
        (2, 3, 0, 5, 5),
        (2, 3, 0, 5, 5),
        (2, 3, 0),
    ]
