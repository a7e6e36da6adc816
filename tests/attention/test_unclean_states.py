"""States whose empty rows hold any number, and states that no keys can have: one rule for every function with a
state."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import cmab_kernels as ck
from cmab_kernels import AttentionState, nn
from cmab_kernels.attention import state as states
from cmab_kernels.attention.state import share_gradient

B, H, L, D, E = 2, 2, 3, 4, 4
EMPTY_ROW, HUGE_ROW = (0, 1, 2), (1, 0, 1)
Q, K, V = (torch.randn(B, H, n, D, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (L, 5, 6))
V = V[:, :, :5]
X, WEIGHT = torch.randn(B, 5, 8, dtype=torch.float64), torch.randn(2, H * D, 8, dtype=torch.float64)
BLOCK, STACK = nn.CMAB(8, L, H, dtype=torch.float64), nn.CMABStack(8, L, H, 2, dtype=torch.float64)


def _attend(state: AttentionState, impl: str) -> AttentionState:
    return ck.attention_state(Q, K, V, state=state, impl=impl)


def _remove(state: AttentionState, impl: str) -> AttentionState:
    return ck.remove_from_state(state, Q, 0.1 * K[:, :, :2], V[:, :, :2], scale=0.1, impl=impl).state


def _module(call: Callable[[AttentionState], AttentionState], state: AttentionState, impl: str) -> AttentionState:
    with ck.use_impl(impl):
        return call(state)


def _stacked(state: AttentionState) -> AttentionState:
    return AttentionState(*(torch.stack([part, part]) for part in state))


def _merge(*position: int) -> Callable[[AttentionState, str], AttentionState]:
    def call(state: AttentionState, impl: str) -> AttentionState:
        good = ck.attention_state(Q, K, V, impl=impl)
        with ck.use_impl(impl):
            return ck.merge_states(*(state if i in position else good for i in range(max(2, *position))))

    return call


PATHS: dict[str, Callable[[AttentionState, str], AttentionState]] = {
    "merged first": _merge(0, 0),
    "merged second": _merge(1, 0),
    "all merged": _merge(0, 1),
    "merged among many": _merge(1, 3),
    "merged alone": lambda state, impl: _module(ck.merge_states, state, impl),
    "attention_state": _attend,
    "remove_from_state": _remove,
    "prefix_attention_states": lambda state, impl: ck.prefix_attention_states(Q, K, V, every=2, state=state, impl=impl),
    "projected_attention_state": lambda state, impl: ck.projected_attention_state(
        Q, X, *WEIGHT, state=state, impl=impl
    ),
    "CMAB.update": lambda state, impl: _module(lambda s: BLOCK.update(X, BLOCK.latents, s)[1], state, impl),
    "CMAB.remove": lambda state, impl: _module(
        lambda s: BLOCK.remove(0.1 * X[:, :2], BLOCK.latents, s)[1], state, impl
    ),
    "CMABStack.update": lambda state, impl: _module(
        lambda s: STACK.update(X, STACK.blocks[0].latents, _stacked(s))[1], state, impl
    ),
}
IMPLS = ["native", "reference"]


@pytest.fixture(params=IMPLS)
def impl(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and not ck.explain("attention_state", Q, K, V)[0].usable:
        pytest.skip("the extension was not built")
    return request.param


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to be on a GPU, where the host does not wait for the values."""
    monkeypatch.setattr(states, "is_read", lambda tensor: False)


def _state(inside: float, lse: float = -math.inf) -> AttentionState:
    """A state with a row of this lse that holds `inside`, a row with a huge lse, and rows with keys."""
    out, log = ck.attention_state(Q, 2 * K, V + 1, impl="reference")
    out, log = out.clone(), log.clone()
    log[HUGE_ROW] = 800.0
    out[EMPTY_ROW], log[EMPTY_ROW] = inside, lse
    return AttentionState(out, log)


def _derived(call: Callable[[AttentionState], AttentionState], state: AttentionState, order: int = 1) -> list[Tensor]:
    """The result and its gradients with respect to the state, up to this order."""
    given = AttentionState(*(part.clone().requires_grad_() for part in state))
    found = [*call(given)]
    results = [part.detach() for part in found]
    for _ in range(order):
        loss = sum(
            (part.masked_fill(part == -math.inf, 0.0).sin() * (1 + part.detach().abs().clamp(max=9))).sum()
            for part in found
        )
        found = [*torch.autograd.grad(loss, tuple(given), create_graph=True)]
        results += [part.detach() for part in found]
    return results


@pytest.mark.parametrize("inside", [math.nan, math.inf])
@pytest.mark.parametrize("path", PATHS)
def test_what_an_empty_row_holds_counts_for_nothing(path: str, inside: float, impl: str) -> None:
    clean, unclean = _state(0.0), _state(inside)
    with torch.no_grad():
        results = [PATHS[path](state, impl) for state in (unclean, clean)]
    for ours, right in zip(*results, strict=True):
        assert not right.isnan().any() and torch.equal(ours, right)


@pytest.mark.parametrize("path", PATHS)
def test_gradients_with_an_unclean_row(path: str, impl: str) -> None:
    """No gradient is NaN, the gradient of the empty row is 0, and all gradients equal those of the clean state; so do
    second derivatives."""
    found = [_derived(lambda state: PATHS[path](state, impl), _state(inside), order=2) for inside in (math.nan, 0.0)]
    for ours, right in zip(*found, strict=True):
        assert not right.isnan().any() and torch.equal(ours, right)
    assert not found[0][2][EMPTY_ROW].any() and not found[0][3][EMPTY_ROW].any()


@pytest.mark.parametrize("path", PATHS)
def test_transforms_of_an_unclean_state(path: str, impl: str) -> None:
    """The rule for unclean states holds under vmap, and in forward mode, which uses the definition."""
    state = _state(math.nan)
    call = PATHS[path]
    right = call(_state(0.0), "reference")
    if "CMAB" not in path:
        mapped = torch.func.vmap(lambda out, lse: tuple(call(AttentionState(out, lse), impl)))(
            *(torch.stack([p, p]) for p in state)
        )
        for ours, wanted in zip(mapped, right, strict=True):
            torch.testing.assert_close(ours[1], wanted, rtol=1e-9, atol=1e-9)
    with forward_ad.dual_level():
        dual = call(AttentionState(*(forward_ad.make_dual(part, torch.ones_like(part)) for part in state)), "auto")
        assert not any(forward_ad.unpack_dual(part).tangent.isnan().any() for part in dual)


@pytest.mark.parametrize("refused", [math.nan, math.inf])
@pytest.mark.parametrize("path", PATHS)
def test_an_lse_that_no_keys_have_is_refused(path: str, refused: float, impl: str) -> None:
    for state in (_state(1.0, refused), AttentionState(*(part.requires_grad_() for part in _state(1.0, refused)))):
        with pytest.raises(
            ValueError,
            match=r"^state(s\[\d\])?\.lse: got \+inf, or a NaN where state(s\[\d\])?\.out holds numbers, expected a "
            r"number",
        ):
            PATHS[path](state, impl)


@pytest.mark.parametrize("path", PATHS)
def test_a_row_that_keys_have_spoilt_stays_alone(path: str, impl: str) -> None:
    """The row is NaN, as a NaN in keys would make it: no error is raised, and no other row changes."""
    with torch.no_grad():
        _is_alone(path, PATHS[path](_state(math.nan, math.nan), impl), PATHS[path](_state(0.0), impl))


@pytest.mark.parametrize("inside", [1.0, math.nan])
@pytest.mark.parametrize("refused", [math.nan, math.inf])
@pytest.mark.parametrize("path", PATHS)
def test_where_values_are_not_read_it_makes_its_row_nan(
    path: str, refused: float, inside: float, impl: str, unread: None
) -> None:
    with torch.no_grad():
        _is_alone(path, PATHS[path](_state(inside, refused), impl), PATHS[path](_state(0.0), impl))


def _is_alone(path: str, found: AttentionState, right: AttentionState) -> None:
    """Check that the row of the state that is not clean is NaN, and that all other rows are the same as without it."""
    batch, head, row = EMPTY_ROW
    spoilt = torch.zeros_like(right.lse, dtype=torch.bool)
    spoilt[(batch, head, slice(None), row) if path.startswith("prefix") else (..., batch, head, row)] = True
    assert torch.equal(found.out.isnan().all(-1), spoilt) and torch.equal(found.lse.isnan(), spoilt)
    for ours, wanted in zip(found, right, strict=True):
        assert torch.equal(ours[~spoilt], wanted[~spoilt])


@pytest.mark.parametrize("refused", [math.nan, math.inf])
def test_a_removal_from_such_a_row_is_not_reliable(refused: float, impl: str, unread: None) -> None:
    state = _state(1.0, refused)
    for count in (0, 2):
        reliable = ck.remove_from_state(state, Q, 0.1 * K[:, :, :count], V[:, :, :count], scale=0.1, impl=impl).reliable
        assert not reliable[EMPTY_ROW]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_merges_of_all_kinds_of_rows_agree(dtype: torch.dtype, unread: None) -> None:
    """Native code and the definition, for every pair of an lse and a content of `out`."""
    rows = [
        (lse, out) for lse in (-math.inf, -800.0, 0.0, 800.0, math.inf, math.nan) for out in (0.5, math.inf, math.nan)
    ]
    pairs = [(one, two) for one in rows for two in rows]
    lses, outs = (torch.tensor([[one[i], two[i]] for one, two in pairs]).double() for i in range(2))
    first, second = (
        AttentionState(outs[:, i].to(dtype).view(1, 1, -1, 1), lses[:, i].reshape(1, 1, -1)) for i in range(2)
    )
    with ck.use_impl("reference"):
        right = ck.merge_states(first, second)
    for ours, wanted in zip(ck.merge_states(first, second), right, strict=True):
        torch.testing.assert_close(ours, wanted, equal_nan=True)


def test_the_gradient_of_a_share_of_a_whole() -> None:
    """An incoming gradient is also 0 where a part is empty, even if this gradient is a NaN."""
    part, whole = _state(math.nan), _state(1.0, 2.0)
    dout, dlse = torch.full_like(part.out, math.nan), torch.ones_like(part.lse)
    down, slope = share_gradient(part, whole, dout, dlse)
    assert not down[EMPTY_ROW].any() and not slope[EMPTY_ROW].any() and down.isnan().any()
