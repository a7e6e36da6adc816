"""An implementation that is named runs or raises an error. An unknown name raises an error that lists the known
names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cmab_kernels as ck
from cmab_kernels.intention import variants
from cmab_kernels.runtime import backends

Q, K, V = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 3)
FEW = K[:, :, :3]
STATE, SEEN = ck.ridge_state(K, V), ck.attention_state(Q, K, V)
NYSTROM, EXACT = ck.continual_nystrom_init(K, K, K, num_landmarks=2), ck.continual_attention_init(K, K, K)
TOKEN = torch.randn(1, 2, 1, 8)
TOKENS, WEIGHTS = torch.randn(1, 5, 8), torch.randn(8, 8)
SYSTEM = torch.eye(4)
LABELS = torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1, 2]])

CALLS: dict[str, Callable[[str], Any]] = {
    "latent_attention": lambda impl: ck.latent_attention(Q, K, V, impl=impl),
    "attention_state": lambda impl: ck.attention_state(Q, K, V, impl=impl),
    "projected_attention_state": lambda impl: ck.projected_attention_state(
        Q, TOKENS, torch.eye(16, 8), torch.eye(6, 8), impl=impl
    ),
    "remove_from_state": lambda impl: ck.remove_from_state(SEEN, Q, K, V, impl=impl),
    "attention_layer": lambda impl: ck.attention_layer(TOKENS, *(WEIGHTS,) * 4, num_heads=2, impl=impl),
    "feed_forward_layer": lambda impl: ck.feed_forward_layer(TOKENS, WEIGHTS, WEIGHTS, activation="gelu", impl=impl),
    "prefix_attention_states": lambda impl: ck.prefix_attention_states(Q, K, V, every=4, impl=impl),
    "nystrom_attention": lambda impl: ck.nystrom_attention(K, K, V, 3, impl=impl),
    "iterative_pinv": lambda impl: ck.iterative_pinv(SYSTEM, impl=impl),
    "continual_nystrom_step": lambda impl: ck.continual_nystrom_step(NYSTROM, TOKEN, TOKEN, TOKEN, impl=impl),
    "continual_attention_step": lambda impl: ck.continual_attention_step(EXACT, TOKEN, TOKEN, TOKEN, impl=impl),
    "intention": lambda impl: ck.intention(Q, K, V, 0.1, impl=impl),
    "sigma_intention": lambda impl: ck.sigma_intention(Q, K, V, 0.1, impl=impl),
    "ridge_state": lambda impl: ck.ridge_state(K, V, impl=impl),
    "ridge_step": lambda impl: ck.ridge_step(STATE, K, V, 0.1, impl=impl),
    "prefix_ridge_states": lambda impl: ck.prefix_ridge_states(K, V, every=4, impl=impl),
    "remove_ridge": lambda impl: ck.remove_ridge(STATE, K, V, impl=impl),
    "solve_ridge": lambda impl: ck.solve_ridge(STATE, 0.1, impl=impl),
    "regularised_solve": lambda impl: ck.regularised_solve(SYSTEM, SYSTEM, 0.1, impl=impl),
    "regularised_inverse": lambda impl: ck.regularised_inverse(SYSTEM, 0.1, impl=impl),
}
OTHER_WAYS: dict[str, Callable[[str], Any]] = {
    "nystrom_attention, exact": lambda impl: ck.nystrom_attention(K, K, V, 3, pinv="exact", impl=impl),
    "iterative_pinv of half": lambda impl: ck.iterative_pinv(SYSTEM.half(), impl=impl),
    "continual_nystrom_step with a gradient": lambda impl: ck.continual_nystrom_step(
        NYSTROM, TOKEN.clone().requires_grad_(), TOKEN, TOKEN, impl=impl
    ),
    "intention, dual": lambda impl: ck.intention(Q, FEW, V[:, :, :3], 0.1, impl=impl),
    "sigma_intention, dual": lambda impl: ck.sigma_intention(Q, FEW, V[:, :, :3], 0.1, impl=impl),
    "regularised_solve of half": lambda impl: ck.regularised_solve(SYSTEM.half(), SYSTEM.half(), 0.1, impl=impl),
    "ridge": lambda impl: variants.ridge(K, V, 0.1, impl=impl),
    "lda": lambda impl: variants.lda(K, LABELS, 3, impl=impl),
    "solve_qda": lambda impl: variants.solve_qda(variants.class_moments(K, LABELS, 3), regularisation=0.5, impl=impl),
}


def test_every_operator_is_called_here() -> None:
    assert CALLS.keys() == backends.OPERATORS.keys()


@pytest.mark.parametrize("name", [*CALLS, *OTHER_WAYS])
def test_an_unknown_implementation_is_an_error(name: str) -> None:
    call = {**CALLS, **OTHER_WAYS}[name]
    with pytest.raises(ValueError, match=r"^impl: got 'nonsense', expected one of auto, native, .*reference"):
        call("nonsense")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("impl", ["triton", "cuda"])
def test_what_the_set_does_not_have_is_an_error_and_what_cannot_run_says_why(name: str, impl: str) -> None:
    """On a CPU without Triton's interpreter, a named GPU implementation raises an error; nothing else runs in its
    place."""
    has = impl in backends.IMPLEMENTATIONS[backends.OPERATORS[name]]
    with pytest.raises(
        RuntimeError if has else ValueError, match=rf"^impl: (got )?'{impl}'(, expected one of| cannot run here: )"
    ):
        CALLS[name](impl)


@pytest.mark.parametrize("name", CALLS)
def test_every_implementation_that_explain_calls_usable_runs(name: str) -> None:
    wanted = CALLS[name]("auto")
    for impl in ("native", "reference"):
        ours = CALLS[name](impl)
        pairs = zip(ours, wanted, strict=True) if isinstance(ours, tuple) else [(ours, wanted)]
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in pairs if isinstance(a, torch.Tensor)), impl


def test_an_estimator_that_triton_sums_is_solved_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The implementation of an operator is passed on to the solve of its system."""
    asked: list[tuple[str, str]] = []
    choose = backends.choose

    def noted(operator_set: str, impl: str, *tensors: torch.Tensor) -> str:
        asked.append((operator_set, impl))
        return choose(operator_set, "auto", *tensors)

    for module in ("cmab_kernels.intention.api", "cmab_kernels.intention.solve.api"):
        monkeypatch.setattr(importlib.import_module(module), "choose", noted)
    variants.ridge(K, V, 0.1, impl="triton")
    assert ("intention", "triton") in asked and asked[-1] == ("intention.solve", "triton")
