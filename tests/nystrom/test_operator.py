"""Promise P8: gradients exist and are right, to any order, under every transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cmab_kernels as ck
from cmab_kernels.nystrom import costs

MASK = torch.tensor([[False, True, False, False, False, False, True], [False] * 7])


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _tokens() -> tuple[Tensor, Tensor, Tensor]:
    return _leaf(2, 2, 7, 3), _leaf(2, 2, 7, 3), _leaf(2, 2, 7, 2)


def _apart(number: int) -> Tensor:
    """Landmarks whose kernel matrix is far from singular."""
    return (3 * torch.eye(number, 3, dtype=torch.float64) + 0.3 * torch.randn(2, 2, number, 3, dtype=torch.float64)).requires_grad_()


def _cases(impl: str) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    def segments(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ck.nystrom_attention(q, k, v, 3, pinv_iterations=2, impl=impl)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ck.nystrom_attention(q, k, v, 7, key_padding_mask=MASK, pinv_iterations=2, impl=impl)

    def given(q: Tensor, k: Tensor, v: Tensor, near: Tensor, far: Tensor) -> Tensor:
        return ck.nystrom_attention(q, k, v, landmarks=(near, far), pinv_iterations=2, impl=impl)

    def exact(q: Tensor, k: Tensor, v: Tensor, near: Tensor) -> Tensor:
        return ck.nystrom_attention(q, k, v, landmarks=(near, near), pinv="exact", impl=impl)

    def pinv(matrix: Tensor) -> Tensor:
        return ck.iterative_pinv(matrix, 3, impl=impl)

    return {
        "segments": (segments, _tokens()),
        "masked": (masked, _tokens()),
        "given": (given, (*_tokens(), _leaf(2, 4, 3), _leaf(2, 2, 4, 3))),
        "exact": (exact, (*_tokens(), _apart(4))),
        "pinv": (pinv, (_leaf(2, 4, 4),)),
    }


CASES = list(_cases("reference"))


@pytest.mark.parametrize("case", CASES)
def test_gradcheck(impl: str, case: str) -> None:
    function, inputs = _cases(impl)[case]
    assert torch.autograd.gradcheck(function, inputs, check_batched_grad=case != "exact")


@pytest.mark.parametrize("case", CASES)
def test_gradgradcheck(impl: str, case: str) -> None:
    function, inputs = _cases(impl)[case]
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("subset", [(0,), (1,), (2,), (3,), (4,), (1, 3)])
def test_only_the_gradients_that_are_asked_for(impl: str, subset: tuple[int, ...]) -> None:
    function, inputs = _cases(impl)["given"]
    some = tuple(t if i in subset else t.detach() for i, t in enumerate(inputs))
    assert torch.autograd.gradcheck(function, some)


def _derivative(function: Callable[..., Any], inputs: tuple[Tensor, ...], order: int) -> tuple[Tensor, ...]:
    total = function(*inputs).pow(2).sum()
    for _ in range(order):
        grads = torch.autograd.grad(total, inputs, create_graph=True)
        total = sum(g.pow(2).sum() for g in grads)
    return grads


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("case", ["segments", "given", "pinv"])
def test_any_order(impl: str, case: str, order: int) -> None:
    function, inputs = _cases(impl)[case]
    definition = _cases("reference")[case][0]
    for ours, wanted in zip(_derivative(function, inputs, order), _derivative(definition, inputs, order), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-9 * float(wanted.detach().abs().max()))


def _step_fields(state: ck.ContinualNystromState) -> tuple[Any, ...]:
    return (*state[:4], *state[5:9], None, state.position, *state[10:])


def test_opcheck(impl: str) -> None:
    if impl == "reference":
        pytest.skip("the reference is no operator")
    ops = torch.ops.cmab
    q, k, v = (t.detach() for t in _tokens())
    rows = [t[0, :, :4].contiguous() for t in (q, k, v)]
    absent = torch.tensor([[False] * 4, [True, False, False, False]])
    matrix = torch.rand(2, 4, 4, dtype=torch.float64)
    state = ck.continual_nystrom_init(q, k, v, 3)
    exact = ck.continual_attention_init(q, k, v)
    token = [t[:, :, :2].contiguous() for t in (q, k, v)]
    calls = [
        (ops.iterative_pinv, (matrix, 6, "native")),
        (ops.iterative_pinv_backward, (matrix.mT, matrix, 6, "native")),
        (ops.landmark_values, (*rows, absent, 0.5, 6, "native")),
        (ops.landmark_values, (*rows, None, 0.5, 6, "native")),
        (ops.landmark_values_backward, (rows[2], *rows, absent, 0.5, 6, "native")),
        (ops.continual_nystrom_step, (*_step_fields(state), *token, False, "native")),
        (ops.continual_nystrom_step, (*_step_fields(state), *token, True, "native")),
        (ops.continual_attention_step, (*exact[:4], exact.scale, None, exact.position, exact.window, *token, False, "native")),
        (ops.continual_attention_step, (*exact[:4], exact.scale, None, exact.position, exact.window, *token, True, "native")),
    ]
    for operator, args in calls:
        torch.library.opcheck(operator.default, args)


@pytest.mark.parametrize("case", ["segments", "masked", "given", "pinv"])
def test_vmap(impl: str, case: str) -> None:
    function, inputs = _cases(impl)[case]
    several = tuple(torch.stack([t.detach(), 2 * t.detach(), -t.detach()]) for t in inputs)
    ours = torch.vmap(function)(*several)
    wanted = torch.stack([function(*(t[i] for t in several)) for i in range(3)])
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-10)
    grads = torch.vmap(torch.func.grad(lambda *args: function(*args).pow(2).sum()))(*several)
    alone = torch.stack([torch.func.grad(lambda *args: function(*args).pow(2).sum())(*(t[i] for t in several)) for i in range(3)])
    torch.testing.assert_close(grads, alone, rtol=1e-8, atol=1e-9)


def test_vmap_of_a_step() -> None:
    """Of one state over several next tokens."""
    q, k, v = (t.detach() for t in _tokens())
    state = ck.continual_nystrom_init(q, k, v, 3)
    several = [torch.randn(4, *t[:, :, :1].shape, dtype=torch.float64) for t in (q, k, v)]
    ours = torch.vmap(lambda *token: ck.continual_nystrom_step(state, *token).out)(*several)
    wanted = torch.stack([ck.continual_nystrom_step(state, *(t[i] for t in several)).out for i in range(4)])
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", ["segments", "masked", "given", "pinv"])
def test_compile(impl: str, case: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    function, inputs = _cases(impl)[case]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    ours = torch.autograd.grad(compiled(*inputs).pow(2).sum(), inputs)
    wanted = torch.autograd.grad(function(*inputs).pow(2).sum(), inputs)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("output", ["single", "retroactive"])
@pytest.mark.parametrize("exact", [False, True])
def test_compiled_steps(impl: str, exact: bool, output: str) -> None:
    """A stream through a compiled step: the state goes in and comes out."""
    torch._dynamo.reset()
    q, k, v = (t.detach() for t in _tokens())
    state = ck.continual_attention_init(q, k, v) if exact else ck.continual_nystrom_init(q, k, v, 3)
    step = ck.continual_attention_step if exact else ck.continual_nystrom_step

    def run(state: Any, *token: Tensor) -> Any:
        return step(state, *token, output=output, impl=impl)

    compiled, other = torch.compile(run, fullgraph=True, backend="aot_eager"), state
    for i in range(5):
        token = [t[:, :, i : i + 1] for t in (q, k, v)]
        out, state = run(state, *token)
        again, other = compiled(other, *token)
        torch.testing.assert_close(again, out, rtol=1e-12, atol=1e-13)
    assert other.position == state.position == 12


def test_autocast(impl: str) -> None:
    q, k, v = (t.detach().float() for t in _tokens())
    plain = ck.nystrom_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), 3, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = ck.nystrom_attention(q, k, v, 3, impl=impl)
        state = ck.continual_nystrom_init(q, k, v, 3)
        out, state = ck.continual_nystrom_step(state, *(t[:, :, :1] for t in (q, k, v)))
    assert torch.equal(ours, plain) and out.dtype == state.keys.dtype == torch.bfloat16 and state.sums.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_explain(dtype: torch.dtype) -> None:
    """By what a user has at hand: the arguments of the call."""
    q, k, v = (t.detach().to(dtype) for t in _tokens())
    for operator, given in (("nystrom_attention", (q, k, v)), ("iterative_pinv", (q,)), ("continual_nystrom_step", (q, k, v))):
        rows = ck.explain(operator, *given)
        assert rows[0].impl == "native" and rows[-1].impl == "reference" and not any(row.usable for row in rows[1:-1])


def test_checkpoint(impl: str) -> None:
    function, inputs = _cases(impl)["segments"]
    plain = torch.autograd.grad(function(*inputs).sum(), inputs)
    again = torch.autograd.grad(checkpoint(function, *inputs, use_reentrant=False).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.usefixtures("native")
def test_flops_of_whole_windows() -> None:
    """What the counter sees is what `costs` says."""
    q, k, v = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 5)
    with FlopCounterMode(display=False) as counter:
        ck.nystrom_attention(q, k, v, 4)
    assert counter.get_total_flops() == 6 * costs.nystrom_attention_operations(40, 4, 8, 5, 6)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("output", ["single", "retroactive"])
def test_flops_of_steps(fixed: bool, output: str) -> None:
    q, k, v = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 5)
    chosen = {"landmarks": (torch.randn(3, 4, 8), torch.randn(3, 4, 8))} if fixed else {"num_landmarks": 4}
    state = ck.continual_nystrom_init(q, k, v, **chosen)
    exact = ck.continual_attention_init(q, k, v)
    for tokens in (1, 3, 30):
        with FlopCounterMode(display=False) as counter:
            _, new = ck.continual_nystrom_step(state, *(t[:, :, :tokens] for t in (q, k, v)), output=output)
        wanted = costs.executed_operations(40, 4, 8, 5, state.position, tokens, 6, fixed, output == "retroactive")
        assert counter.get_total_flops() == 6 * wanted
        state = new
        with FlopCounterMode(display=False) as counter:
            _, new_exact = ck.continual_attention_step(exact, *(t[:, :, :tokens] for t in (q, k, v)), output=output)
        first = output == "retroactive" and exact.sums.shape[2] == 0
        wanted = costs.executed_attention_operations(40, 8, 5, tokens, output == "retroactive", first)
        assert counter.get_total_flops() == 6 * wanted
        exact = new_exact
