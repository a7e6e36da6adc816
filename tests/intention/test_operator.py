"""Promise P8: gradients exist and are right, to any order, under every transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cmab_kernels as ck

MASK = torch.tensor([[False, False, False, False, True], [False] * 5])


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _positive(*shape: int) -> Tensor:
    return (torch.rand(shape, dtype=torch.float64) + 0.2).requires_grad_()


def _rows(width: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return _leaf(2, 2, 4, width), _leaf(2, 2, 5, width), _leaf(2, 2, 5, 2)


def _symmetric(matrix: Tensor) -> Tensor:
    """A positive definite matrix of any: only the symmetric part of a gradient means something."""
    return matrix @ matrix.mT + matrix + matrix.mT + 4 * torch.eye(matrix.shape[-1], dtype=matrix.dtype)


def _cases(impl: str) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    def primal(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, weights: Tensor) -> Tensor:
        return ck.intention(q, k, v, alpha, form="primal", weights=weights, key_padding_mask=MASK, impl=impl)

    def dual(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, weights: Tensor) -> Tensor:
        return ck.intention(q, k, v, alpha, form="dual", weights=weights, key_padding_mask=MASK, impl=impl)

    def sigma(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
        return ck.sigma_intention(q, k, v, alpha, key_padding_mask=MASK, impl=impl)

    def state(k: Tensor, v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return ck.ridge_state(k, v, weights=weights, impl=impl)[:2]

    def solve(gram: Tensor, rhs: Tensor, alpha: Tensor) -> Tensor:
        return ck.regularised_solve(_symmetric(gram), rhs, alpha, impl=impl).weight

    return {
        "primal": (primal, (*_rows(), _positive(2, 2), _positive(2, 5))),
        "dual": (dual, (*_rows(7), _positive(2, 1), _positive(2, 2, 5))),
        "sigma": (sigma, (*_rows(), _positive(2, 2))),
        "sigma, dual": (sigma, (*_rows(7), _positive())),
        "state": (state, (*_rows()[1:], _positive(2, 5))),
        "solve": (solve, (_leaf(2, 3, 3), _leaf(2, 3, 2), _positive(2))),
        "inverse": (lambda gram, alpha: ck.regularised_inverse(_symmetric(gram), alpha, impl=impl), (_leaf(2, 3, 3), _positive())),
    }


CASES = list(_cases("reference"))


def test_the_gradient_of_a_matrix_belongs_to_both_triangles(impl: str) -> None:
    """-(Z X' + X Z') / 2, with Z = (A + alpha I)^-1 dX, though the upper triangle is not read, be it NaN."""
    gram, rhs, slope = _symmetric(_leaf(2, 5, 5)).detach(), _leaf(2, 5, 3), _leaf(2, 5, 3).detach()
    unread = gram.masked_fill(torch.ones(5, 5).triu(1).bool(), torch.nan).requires_grad_()
    solution = ck.regularised_solve(unread, rhs, 0.3, impl=impl).weight
    (found,) = torch.autograd.grad(solution, unread, slope)
    z = torch.cholesky_solve(slope, torch.linalg.cholesky(gram + 0.3 * torch.eye(5, dtype=gram.dtype)))
    torch.testing.assert_close(found, -(z @ solution.mT + solution @ z.mT) / 2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_gradcheck(impl: str, case: str) -> None:
    function, inputs = _cases(impl)[case]
    assert torch.autograd.gradcheck(function, inputs, check_batched_grad=True)


@pytest.mark.parametrize("case", CASES)
def test_gradgradcheck(impl: str, case: str) -> None:
    function, inputs = _cases(impl)[case]
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_gradients_at_a_weight_of_zero(impl: str, form: str) -> None:
    """A key about to enter has a say already: its weight's derivative is one-sided there, and finite."""
    q, k, v = (t.detach() for t in _rows())
    weights = torch.tensor([[1.0, 0.0, 2.0, 0.0, 1.0]], dtype=torch.float64).expand(2, 5).clone().requires_grad_()

    def loss(weights: Tensor) -> Tensor:
        return ck.intention(q, k, v, 0.3, form=form, weights=weights, impl=impl).pow(2).sum()

    (ours,) = torch.autograd.grad(loss(weights), weights)
    for i in range(5):
        step = torch.zeros(2, 5, dtype=torch.float64)
        step[:, i] = 1e-6
        with torch.no_grad():
            slope = (loss(weights + 2 * step) - loss(weights)) / 2e-6
            bend = (loss(weights + 2 * step) - 2 * loss(weights + step) + loss(weights)) / 1e-6
        assert abs(ours[:, i].sum() - (slope - bend)) < 1e-3 * max(1.0, abs(float(slope)))


@pytest.mark.parametrize("subset", [(0,), (1,), (2,), (3,), (4,), (1, 3), (0, 2, 4)])
def test_only_the_gradients_that_are_asked_for(impl: str, subset: tuple[int, ...]) -> None:
    function, inputs = _cases(impl)["primal"]
    some = tuple(t if i in subset else t.detach() for i, t in enumerate(inputs))
    assert torch.autograd.gradcheck(function, some) and torch.autograd.gradgradcheck(function, some)


def _derivative(function: Callable[..., Any], inputs: tuple[Tensor, ...], order: int) -> tuple[Tensor, ...]:
    total = function(*inputs).pow(2).sum()
    for _ in range(order):
        grads = torch.autograd.grad(total, inputs, create_graph=True)
        total = sum(g.pow(2).sum() for g in grads)
    return grads


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("case", ["primal", "dual", "sigma"])
def test_any_order(impl: str, case: str, order: int) -> None:
    function, inputs = _cases(impl)[case]
    definition = _cases("reference")[case][0]
    if case == "dual":  # another formula for the same number
        definition = _cases("reference")["primal"][0]
    for ours, wanted in zip(_derivative(function, inputs, order), _derivative(definition, inputs, order), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-9 * float(wanted.detach().abs().max()))


def test_opcheck() -> None:
    _, k, v = (t.detach() for t in _rows())
    weights, alpha = torch.rand(2, 2, 5).double(), torch.rand(2, 2).double()
    ops, optional = torch.ops.cmab, (None, MASK)
    dgram, dmoment = torch.randn(2, 2, 3, 3).double(), torch.randn(2, 2, 3, 2).double()
    system = dgram[0] @ dgram[0].mT
    calls = [
        (ops.gram, (k, v, weights, MASK, [True, True], True, "native")),
        (ops.gram, (k, v, *optional, [False, True], False, "native")),
        (ops.gram_backward, (dgram, dmoment, k, v, weights, None, [True, False, True], True, "native")),
        (ops.gram_backward, (dgram, dmoment, k, v, *optional, [True, True, False], False, "native")),
        (ops.apply_rows, (k, dmoment, "native")),
        (ops.regularised_solve, (system, dmoment[0], alpha[0], "native")),
    ]
    for operator, args in calls:
        assert set(torch.library.opcheck(operator.default, args).values()) == {"SUCCESS"}, operator


def _loss(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    out = ck.intention(q, k, v, alpha) + ck.intention(q, k[:, :, :2], v[:, :, :2], 0.5) + ck.sigma_intention(q, k, v, alpha)
    state = ck.ridge_state(k[:, :, :3], v[:, :, :3], state=ck.ridge_state(k, v))
    return out.pow(2).sum() + ck.solve_ridge(state, alpha).weight.sum()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_of_the_whole_graph(dynamic: bool, backend: str) -> None:
    torch._dynamo.reset()
    inputs = (*_rows(), _positive(2, 2))
    compiled = torch.compile(_loss, fullgraph=True, dynamic=dynamic, backend=backend)
    wanted = torch.autograd.grad(_loss(*inputs), inputs)
    for ours, theirs in zip(torch.autograd.grad(compiled(*inputs), inputs), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_compile_of_the_reference() -> None:
    torch._dynamo.reset()
    inputs = (*_rows(), _positive(2, 2))
    with ck.use_impl("reference"):
        torch.testing.assert_close(torch.compile(_loss, fullgraph=True, backend="aot_eager")(*inputs), _loss(*inputs))


@pytest.mark.parametrize("width", [3, 7])
def test_vmap(impl: str, width: int) -> None:
    q, k, v = torch.randn(4, 2, 2, 3, width), torch.randn(2, 2, 5, width), torch.randn(2, 2, 4, 5, 3)
    alpha = torch.rand(4) + 0.1

    def run(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
        state = ck.ridge_state(k, v, key_padding_mask=MASK, impl=impl)
        streamed = q.double() @ ck.solve_ridge(state, alpha, impl=impl).weight
        both = ck.intention(q, k, v, alpha, key_padding_mask=MASK, impl=impl) + streamed
        return both + ck.sigma_intention(q, k, v, alpha, key_padding_mask=MASK, impl=impl)

    mapped = torch.vmap(run, in_dims=(0, None, 2, 0))(q, k, v, alpha)
    for i in range(4):
        torch.testing.assert_close(mapped[i], run(q[i], k, v[:, :, i], alpha[i]), rtol=1e-4, atol=1e-4)


def test_vmap_of_a_gradient(impl: str) -> None:
    queries, k, v = torch.randn(4, 2, 2, 3, 4), torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 3)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ck.intention(q, k, v, 0.1, impl=impl).pow(2).sum()

    mapped = torch.vmap(torch.func.grad(loss, (0, 1, 2)), in_dims=(0, None, None))(queries, k, v)
    for i, q in enumerate(queries):
        inputs = tuple(t.detach().clone().requires_grad_() for t in (q, k, v))
        for ours, wanted in zip(mapped, torch.autograd.grad(loss(*inputs), inputs), strict=True):
            torch.testing.assert_close(ours[i], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [50, 5])
def test_autocast(impl: str, length: int) -> None:
    q, k, v = (torch.randn(2, 2, n, 16, requires_grad=True) for n in (3, length, length))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ck.intention(q, k.bfloat16(), v, 1.0, impl=impl)
        sigma = ck.sigma_intention(q, k, v, 1.0, impl=impl)
        state = ck.ridge_state(k, v, impl=impl)
        weight = ck.solve_ridge(state, 1.0, impl=impl).weight
    assert out.dtype == sigma.dtype == torch.bfloat16 and state.gram.dtype == weight.dtype == torch.float64
    half = [t.detach().bfloat16().float() for t in (q, k, v)]
    torch.testing.assert_close(out.float(), ck.intention(*half, 1.0, impl="reference"), rtol=0.03, atol=0.02)
    torch.testing.assert_close(weight, ck.solve_ridge(ck.ridge_state(*half[1:], impl="reference"), 1.0).weight)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum() + sigma.float().sum(), (q, k, v)))


def test_checkpointing(impl: str) -> None:
    function, inputs = _cases(impl)["primal"]
    plain = torch.autograd.grad(function(*inputs).pow(2).sum(), inputs)
    again = checkpoint(function, *inputs, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again.pow(2).sum(), inputs), plain, strict=True):
        assert torch.equal(a, b)


def test_flops() -> None:
    q, k, v = _rows()
    sums, apply, system = 4 * 5 * (3 * 4 + 2 * 3 * 2), 4 * 4 * 2 * 3 * 2, 4 * (3**3 // 3 + 2 * 3**2 * 2)
    with FlopCounterMode(display=False) as forward:
        out = ck.intention(q, k, v, 0.1, impl="native")
    assert forward.get_total_flops() == sums + apply + system
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    dquery, dweight, rows = 4 * 4 * 2 * 2 * 3, 4 * 4 * 2 * 3 * 2, 2 * 4 * 5 * 3 * (3 + 2 * 2)
    small = 4 * 2 * 3 * 3 * 2  # Z W', by torch
    assert backward.get_total_flops() == dquery + dweight + system + rows + small


def test_forward_mode_raises() -> None:
    """A gradient is right or it raises."""
    q, k, v = (t.detach() for t in _rows())
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(lambda k: ck.intention(q, k, v, 0.1, impl="native"), (k,), (k,))
    with pytest.raises(RuntimeError, match="jvp"), forward_ad.dual_level():
        ck.solve_ridge(ck.ridge_state(forward_ad.make_dual(k, k), v, impl="native"), 0.1)
