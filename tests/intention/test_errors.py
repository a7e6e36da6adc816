"""Bad input raises an error that names the argument, the given value and the allowed values. States do not change."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels import RidgeState

Q, K, V = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 5)
STATE = ck.empty_ridge(2, 3, 8, 5)
A, RHS = torch.eye(4).expand(2, 3, 4, 4), torch.randn(2, 3, 4, 2)
ONE_NEGATIVE = torch.ones(2, 9).index_fill(1, torch.tensor(3), -1)

BAD_ROWS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "integer key": (TypeError, r"^key: got torch.int64", {"key": K.long()}),
    "value of another dtype": (TypeError, r"^value: got torch.float64.*torch.float32", {"value": V.double()}),
    "value elsewhere": (ValueError, r"^value: got device meta", {"value": V.to("meta")}),
    "key of three dimensions": (ValueError, r"^key: got shape \(3, 9, 8\)", {"key": K[0]}),
    "key of no width": (ValueError, r"^key: got shape.*D >= 1", {"key": K[..., :0]}),
    "fewer values than keys": (ValueError, r"^value: got shape \(2, 3, 8, 5\).*\(2, 3, 9, E\)", {"value": V[:, :, 1:]}),
    "additive mask": (TypeError, r"^key_padding_mask: got torch.float32", {"key_padding_mask": torch.zeros(2, 9)}),
    "mask too long": (
        ValueError,
        r"^key_padding_mask: got shape \(2, 10\)",
        {"key_padding_mask": torch.zeros(2, 10).bool()},
    ),
    "weights too long": (
        ValueError,
        r"^weights: got shape \(2, 10\).*\(2, 9\) or \(B, H, N\) = \(2, 3, 9\)",
        {"weights": torch.ones(2, 10)},
    ),
    "integer weights": (TypeError, r"^weights: got torch.int64", {"weights": torch.ones(2, 9).long()}),
    "weights that are a list": (TypeError, r"^weights: got a list", {"weights": [1.0] * 9}),
    "weights elsewhere": (ValueError, r"^weights: got device meta", {"weights": torch.ones(2, 9, device="meta")}),
    "a negative weight": (
        ValueError,
        r"^weights: got a negative element",
        {"weights": ONE_NEGATIVE},
    ),
    "unknown impl": (ValueError, r"^impl: got 'fast'.*auto, native, triton, reference", {"impl": "fast"}),
}
BAD_QUERIES: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "query of two dimensions": (ValueError, r"^query: got shape \(4, 8\).*\(B, H, L, D\)", {"query": Q[0, 0]}),
    "query of another width": (ValueError, r"^query: got shape \(2, 3, 4, 7\)", {"query": Q[..., :7]}),
    "query that is a list": (TypeError, r"^query: got a list", {"query": Q.tolist()}),
}
BAD_PENALTIES: dict[str, tuple[type[Exception], str, Any]] = {
    "negative": (ValueError, r"^alpha: got -0.1.*>= 0", -0.1),
    "not a number": (ValueError, r"^alpha: got nan", float("nan")),
    "infinite": (ValueError, r"^alpha: got inf", float("inf")),
    "an int that is no float": (ValueError, r"^alpha: got 10+, expected .*finite in torch.float", 10**400),
    "one negative of many": (ValueError, r"^alpha: got a negative element", torch.tensor([[1.0, -1.0, 0.0]])),
    "of another shape": (ValueError, r"^alpha: got shape \(2,\).*\(2, 3\)", torch.ones(2)),
    "of too many dimensions": (ValueError, r"^alpha: got shape \(1, 2, 3\)", torch.ones(1, 2, 3)),
    "a list": (TypeError, r"^alpha: got a list", [1.0]),
    "integers": (TypeError, r"^alpha: got torch.int64", torch.ones(3).long()),
    "elsewhere": (ValueError, r"^alpha: got device meta", torch.ones(3, device="meta")),
}
BAD_STATES: dict[str, tuple[type[Exception], str, Any]] = {
    "a tuple": (TypeError, r"^state: got a tuple.*RidgeState", tuple(STATE)),
    "other width": (ValueError, r"^state.gram: got shape \(2, 3, 7, 7\).*\(2, 3, 8, 8\)", ck.empty_ridge(2, 3, 7, 5)),
    "other value width": (ValueError, r"^state.moment: got shape \(2, 3, 8, 6\)", ck.empty_ridge(2, 3, 8, 6)),
    "single precision": (
        TypeError,
        r"^state.gram: got torch.float32.*float64",
        STATE._replace(gram=STATE.gram.float()),
    ),
    "a count of floats": (TypeError, r"^state.count: got torch.float32", STATE._replace(count=STATE.count.float())),
    "no moment": (TypeError, r"^state.moment: got None", STATE._replace(moment=None)),
    "elsewhere": (ValueError, r"^state.gram: got device meta", ck.empty_ridge(2, 3, 8, 5, device="meta")),
}
BAD_SYSTEMS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "not square": (ValueError, r"^gram: got shape \(2, 3, 4, 3\)", {"gram": A[..., :3]}),
    "a vector": (ValueError, r"^gram: got shape \(4,\)", {"gram": torch.ones(4)}),
    "other rows": (ValueError, r"^rhs: got shape \(2, 3, 3, 2\).*\(2, 3, 4, E\)", {"rhs": RHS[:, :, 1:]}),
    "other batch": (ValueError, r"^rhs: got shape \(1, 3, 4, 2\)", {"rhs": RHS[:1]}),
    "other dtype": (TypeError, r"^rhs: got torch.float64", {"rhs": RHS.double()}),
    "integers": (TypeError, r"^gram: got torch.int64", {"gram": A.long()}),
}
ROW_OPERATORS = [ck.intention, ck.sigma_intention, ck.ridge_state, ck.remove_ridge, ck.ridge_step]


def _call(operator: Callable, **changed: Any) -> Any:
    if operator in (ck.intention, ck.sigma_intention):
        return operator(**{"query": Q, "key": K, "value": V, "alpha": 0.1, **changed})
    state = {"state": STATE} if operator in (ck.remove_ridge, ck.ridge_step) else {}
    alpha = {"alpha": 0.1} if operator is ck.ridge_step else {}
    return operator(**{"key": K, "value": V, **state, **alpha, **changed})


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("operator", ROW_OPERATORS)
@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows(operator: Callable, case: str, impl: str) -> None:
    error, message, changed = BAD_ROWS[case]
    with pytest.raises(error, match=message):
        _call(operator, **{"impl": impl, **changed})


@pytest.mark.parametrize("operator", ROW_OPERATORS[:2])
@pytest.mark.parametrize("case", BAD_QUERIES)
def test_bad_queries(operator: Callable, case: str) -> None:
    error, message, changed = BAD_QUERIES[case]
    with pytest.raises(error, match=message):
        _call(operator, **changed)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("case", BAD_PENALTIES)
def test_bad_penalties(case: str, impl: str) -> None:
    error, message, alpha = BAD_PENALTIES[case]
    for call in (
        lambda: ck.intention(Q, K, V, alpha, impl=impl),
        lambda: ck.intention(Q, K, V, alpha, form="dual", impl=impl),
        lambda: ck.sigma_intention(Q, K, V, alpha, impl=impl),
        lambda: ck.solve_ridge(STATE, alpha, impl=impl),
        lambda: ck.ridge_step(STATE, K, V, alpha, impl=impl),
        lambda: ck.regularised_solve(A, RHS, alpha, impl=impl),
        lambda: ck.regularised_inverse(A, alpha, impl=impl),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("case", BAD_STATES)
def test_bad_states(case: str) -> None:
    error, message, state = BAD_STATES[case]
    with pytest.raises(error, match=message):
        ck.ridge_state(K, V, state=state)
    with pytest.raises(error, match=message):
        ck.remove_ridge(state, K, V)
    with pytest.raises(error, match=message):
        ck.ridge_step(state, K, V, 0.1)
    with pytest.raises(error, match=message.replace("^state", r"^states\[1\]")):
        ck.merge_ridge(STATE, state)


def test_a_state_whose_parts_do_not_fit() -> None:
    torn = RidgeState(STATE.gram, STATE.moment[:, :2], STATE.count)
    for call in (lambda: ck.merge_ridge(torn), lambda: ck.solve_ridge(torn, 0.1)):
        with pytest.raises(ValueError, match=r"\.gram: got shape \(2, 3, 8, 8\).*\(2, 2, 8, 8\)"):
            call()


@pytest.mark.parametrize("width", [-1, 1.5, True, "a", None])
def test_an_empty_state_of_no_width(width: Any) -> None:
    with pytest.raises(
        ValueError if width == -1 else TypeError, match="^" + re.escape(f"width: got {width!r}, expected an int >= 0")
    ):
        ck.empty_ridge(1, 1, width, 1)


@pytest.mark.parametrize("width", [torch.tensor(2), torch.tensor([2, 3]), torch.tensor(2.5)])
def test_an_empty_state_of_a_tensor(width: torch.Tensor) -> None:
    for make in (ck.empty_ridge, ck.empty_state):
        with pytest.raises(TypeError, match=r"^width: got a Tensor, expected an int >= 0"):
            make(1, 1, 2, width) if make is ck.empty_state else make(1, 1, width, 2)


def test_an_empty_state_nowhere() -> None:
    with pytest.raises(ValueError, match=r"^device: got 'foo'"):
        ck.empty_ridge(1, 1, 1, 1, device="foo")
    with pytest.raises(TypeError, match=r"^device: got a float"):
        ck.empty_ridge(1, 1, 1, 1, device=0.5)


@pytest.mark.parametrize("case", BAD_SYSTEMS)
def test_bad_systems(case: str) -> None:
    error, message, changed = BAD_SYSTEMS[case]
    with pytest.raises(error, match=message):
        ck.regularised_solve(**{"gram": A, "rhs": RHS, "alpha": 0.1, **changed})


@pytest.mark.parametrize(
    "gram", [torch.tensor(3.0), torch.ones(4), A[..., :3], A[..., :3, :], A[..., :0, :0], A.long()]
)
def test_bad_matrices_to_invert(gram: Tensor) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^gram: got (shape|torch)"):
        ck.regularised_inverse(gram, 0.1)


def test_a_penalty_that_float32_does_not_hold() -> None:
    for solve in (
        lambda alpha: ck.regularised_solve(A, RHS, alpha),
        lambda alpha: ck.regularised_inverse(A.half(), alpha),
    ):
        with pytest.raises(ValueError, match=r"^alpha: got 1e\+39.*finite in torch.float32"):
            solve(1e39)
    ck.regularised_solve(A.double(), RHS.double(), 1e39)


def test_an_unknown_form() -> None:
    with pytest.raises(ValueError, match=r"^form: got 'both'.*auto, primal, dual"):
        ck.intention(Q, K, V, 0.1, form="both")


def test_an_impl_that_cannot_run_here_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"^impl: 'triton' cannot run here"):
        ck.intention(Q, K, V, 0.1, impl="triton")
    for impl in ("cuda", "triton"):
        with pytest.raises(RuntimeError, match=rf"^impl: '{impl}' cannot run here"):
            ck.regularised_solve(A, RHS, 0.1, impl=impl)


def test_a_negative_value_inside_a_compiled_graph() -> None:
    compiled = torch.compile(
        lambda alpha, weights: ck.intention(Q, K, V, alpha, weights=weights), fullgraph=True, backend="aot_eager"
    )
    compiled(torch.ones(()), torch.ones(2, 9))
    with pytest.raises(ValueError, match="alpha"):
        compiled(-torch.ones(()), torch.ones(2, 9))
    with pytest.raises(ValueError, match="weights"):
        compiled(torch.ones(()), -torch.ones(2, 9))


def test_a_negative_weight_in_padding_is_nobodys_business() -> None:
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, 3] = True
    weights = torch.ones(2, 9).index_fill(1, torch.tensor(3), -1)
    expected = ck.intention(Q, K, V, 0.1, key_padding_mask=mask)
    for poison in (-1.0, torch.nan):
        weights[:, 3] = poison
        for form in ("primal", "dual"):
            out = ck.intention(Q, K, V, 0.1, form=form, weights=weights, key_padding_mask=mask)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_the_state_is_never_changed() -> None:
    state = ck.ridge_state(K, V)
    before = [t.clone() for t in state]
    ck.ridge_state(K, V, state=state)
    ck.remove_ridge(state, K, V)
    with pytest.raises(ValueError):
        ck.ridge_state(K[..., :3], V, state=state)
    assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))


def test_a_learnable_penalty_is_checked_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    alpha, weights = torch.ones(3, requires_grad=True), torch.ones(2, 9, requires_grad=True)
    for impl in ("auto", "reference"):
        ck.intention(Q, K, V, alpha, weights=weights, impl=impl).sum().backward()
    assert not recwarn.list
