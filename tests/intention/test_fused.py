"""An implementation that has sums and solve in one kernel gives the results and gradients of the composed one.

The native kernels stand in for it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.intention import native
from cmab_kernels.intention.api import solve_rows
from cmab_kernels.intention.solve.contract import RidgeSolve
from cmab_kernels.runtime import backends

MASK = torch.tensor([[False, False, False, False, True], [False] * 5])


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let "cuda" and "triton" of Intention run native code on the CPU,
    "cuda" with the fused `ridge_solve`; return the calls."""
    ran: list[str] = []

    def ridge_solve(inputs: RidgeSolve) -> tuple[Tensor, ...]:
        ran.append("ridge_solve")
        *rows, _ = inputs
        return solve_rows(*rows, "native", "native")

    modules = {
        "cmab_kernels.intention.cuda": SimpleNamespace(unsupported=native.unsupported, ridge_solve=ridge_solve),
        "cmab_kernels.intention.triton": native,
        "cmab_kernels.intention.solve.cuda": backends.implementation("intention.solve", "native"),
    }
    for path, module in modules.items():
        monkeypatch.setitem(backends._MODULES, path, [module])
        monkeypatch.setitem(backends._PROBLEMS, path, "")
    return ran


def _inputs() -> tuple[Tensor, ...]:
    shapes = ((2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2))
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    positive = ((torch.rand(shape, dtype=torch.float64) + 0.2).requires_grad_() for shape in ((2, 2), (2, 5)))
    return q, k, v, *positive


def _intention(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, weights: Tensor, impl: str = "cuda") -> Tensor:
    return ck.intention(q, k, v, alpha, form="primal", weights=weights, key_padding_mask=MASK, impl=impl)


def test_results_and_gradients_of_any_order(fused: list[str]) -> None:
    inputs = _inputs()
    assert torch.equal(_intention(*inputs), _intention(*inputs, impl="native")) and fused == ["ridge_solve"]
    assert torch.autograd.gradcheck(_intention, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(_intention, inputs)


def test_a_map_of_nothing(fused: list[str]) -> None:
    q, k, v, alpha, weights = (t.detach() for t in _inputs())

    def slope(key: Tensor) -> Tensor:
        return torch.func.grad(lambda x: _intention(q, x, v, alpha, weights).sum())(key)

    assert torch.vmap(slope)(k[None][:0]).shape == (0, *k.shape)


def test_what_the_one_kernel_does_not_do_is_of_the_completing_implementation() -> None:
    _, k, v, _, _ = _inputs()
    state = ck.ridge_state(k, v, impl="cuda")
    assert torch.equal(state.gram, ck.ridge_state(k, v, impl="native").gram)
    assert backends.kernel("intention", "cuda", "gram") is native.gram


def test_a_completing_implementation_that_cannot_run_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends._PROBLEMS, "cmab_kernels.intention.triton", "no Triton here")
    _, k, v, _, _ = _inputs()
    with pytest.raises(RuntimeError, match="no Triton here"):
        ck.ridge_state(k, v, impl="cuda")


def test_opcheck() -> None:
    _, k, v, alpha, weights = (t.detach() for t in _inputs())
    args = (k, v, weights[:, None].expand(2, 2, 5), MASK, alpha[..., 0:1].expand(2, 2), "cuda")
    assert set(torch.library.opcheck(torch.ops.cmab.ridge_solve.default, args).values()) == {"SUCCESS"}
