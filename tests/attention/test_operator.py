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
from cmab_kernels import AttentionState

OFFSETS = torch.tensor([0, 2, 2, 5])
MASK = torch.tensor([[False, False, False, True, True], [False] * 5])


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    return _leaf(2, 2, 3, 4), _leaf(2, 2, 5, 4), _leaf(2, 2, 5, 3)


def _cases(impl: str) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    def streamed(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return tuple(ck.attention_state(q, k, v, state=AttentionState(out, lse), key_padding_mask=MASK, impl=impl))

    return {
        "plain": (lambda q, k, v: tuple(ck.attention_state(q, k, v, impl=impl)), _inputs()),
        "shared query": (lambda q, k, v: tuple(ck.attention_state(q, k, v, scale=0.9, impl=impl)), (_leaf(2, 3, 4), *_inputs()[1:])),
        "packed": (
            lambda q, k, v: ck.latent_attention(q, k, v, cu_seqlens=OFFSETS, impl=impl),
            (_leaf(3, 2, 3, 4), _leaf(1, 2, 5, 4), _leaf(1, 2, 5, 3)),
        ),
        "masked, with a state": (streamed, (*_inputs(), _leaf(2, 2, 3, 3), _leaf(2, 2, 3))),
    }


CASES = ["plain", "shared query", "packed", "masked, with a state"]


@pytest.mark.parametrize("case", CASES)
def test_gradcheck(impl: str, case: str) -> None:
    function, inputs = _cases(impl)[case]
    assert torch.autograd.gradcheck(function, inputs, check_batched_grad=True)


@pytest.mark.parametrize("case", CASES)
def test_gradgradcheck(impl: str, case: str) -> None:
    function, inputs = _cases(impl)[case]
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("subset", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_the_gradients_that_are_asked_for(subset: tuple[int, ...]) -> None:
    function, inputs = _cases("native")["plain"]
    some = tuple(t if i in subset else t.detach() for i, t in enumerate(inputs))
    assert torch.autograd.gradcheck(function, some) and torch.autograd.gradgradcheck(function, some)


def _derivative(function: Callable[..., Any], inputs: tuple[Tensor, ...], order: int) -> tuple[Tensor, ...]:
    total = sum(t.pow(2).sum() for t in function(*inputs))
    for _ in range(order):
        grads = torch.autograd.grad(total, inputs, create_graph=True)
        total = sum(g.pow(2).sum() for g in grads)
    return grads


@pytest.mark.parametrize("order", [1, 2, 3])
def test_any_order(order: int) -> None:
    function, inputs = _cases("native")["masked, with a state"]
    definition = _cases("reference")["masked, with a state"][0]
    for ours, wanted in zip(_derivative(function, inputs, order), _derivative(definition, inputs, order), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-12 * float(wanted.detach().abs().max()))


@pytest.mark.parametrize("with_state", [False, True])
def test_opcheck(with_state: bool) -> None:
    q, k, v = (t.detach() for t in _inputs())
    state = (torch.randn(2, 2, 3, 3).double(), torch.randn(2, 2, 3).double()) if with_state else (None, None)
    out, lse = torch.ops.cmab.attention(q, k, v, MASK, None, *state, 0.5, "native")
    checks = [
        torch.library.opcheck(torch.ops.cmab.attention.default, (q, k, v, MASK, None, *state, 0.5, "native")),
        torch.library.opcheck(
            torch.ops.cmab.attention_backward.default, (out, lse, q, k, v, MASK, None, out, lse, 0.5, [True, False, True], "native")
        ),
    ]
    assert all(set(check.values()) == {"SUCCESS"} for check in checks)


def _loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state = ck.attention_state(q[0], k, v, key_padding_mask=MASK[:, : k.shape[2]])
    return ck.latent_attention(q, k, v).pow(2).sum() + ck.attention_state(q, k, v, state=state).lse.sum()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_of_the_whole_graph(dynamic: bool, backend: str) -> None:
    torch._dynamo.reset()
    inputs = _inputs()
    compiled = torch.compile(_loss, fullgraph=True, dynamic=dynamic, backend=backend)
    wanted = torch.autograd.grad(_loss(*inputs), inputs)
    for ours, theirs in zip(torch.autograd.grad(compiled(*inputs), inputs), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_compile_of_the_reference() -> None:
    torch._dynamo.reset()
    inputs = _inputs()
    with ck.use_impl("reference"):
        torch.testing.assert_close(torch.compile(_loss, fullgraph=True, backend="aot_eager")(*inputs), _loss(*inputs))


def test_vmap(impl: str) -> None:
    q, k, v = torch.randn(4, 2, 2, 3, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 4, 5, 3)
    mapped = torch.vmap(lambda q, k, v: ck.latent_attention(q, k, v, key_padding_mask=MASK, impl=impl), in_dims=(0, None, 2))(q, k, v)
    for i in range(4):
        torch.testing.assert_close(mapped[i], ck.latent_attention(q[i], k, v[:, :, i], key_padding_mask=MASK, impl=impl))
    packed = torch.vmap(lambda q: ck.latent_attention(q, k[:1], k[:1], cu_seqlens=OFFSETS, impl=impl))(torch.randn(4, 3, 2, 3, 4))
    assert packed.shape == (4, 3, 2, 3, 4)


def test_vmap_of_a_gradient() -> None:
    queries, k, v = torch.randn(4, 2, 2, 3, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 3)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ck.latent_attention(q, k, v, impl="native").pow(2).sum()

    mapped = torch.vmap(torch.func.grad(loss, (0, 1, 2)), in_dims=(0, None, None))(queries, k, v)
    for i, q in enumerate(queries):
        inputs = tuple(t.detach().clone().requires_grad_() for t in (q, k, v))
        for ours, wanted in zip(mapped, torch.autograd.grad(loss(*inputs), inputs), strict=True):
            torch.testing.assert_close(ours[i], wanted)


def test_autocast(impl: str) -> None:
    q, k, v = (torch.randn(2, 2, n, 16, requires_grad=True) for n in (3, 50, 50))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ck.latent_attention(q, k.bfloat16(), v, impl=impl)
        state = ck.attention_state(q, k, v, impl=impl)
    assert out.dtype == torch.bfloat16 and state.out.dtype == torch.float32 and state.lse.dtype == torch.float64
    half = (t.bfloat16().float() for t in (q, k, v))
    torch.testing.assert_close(state.out, ck.attention_state(*half, impl="reference").out, rtol=0.02, atol=0.01)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), (q, k, v)))


def test_checkpointing(impl: str) -> None:
    inputs = _inputs()
    plain = torch.autograd.grad(ck.latent_attention(*inputs, impl=impl).pow(2).sum(), inputs)
    again = checkpoint(lambda *t: ck.latent_attention(*t, impl=impl), *inputs, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(again.pow(2).sum(), inputs), plain, strict=True):
        assert torch.equal(a, b)


def test_flops() -> None:
    q, k, v = _inputs()
    with FlopCounterMode(display=False) as forward:
        out = ck.latent_attention(q, k, v, impl="native")
    assert forward.get_total_flops() == 2 * (2 * 2 * 3 * 5) * (4 + 3)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == 2 * (2 * 2 * 3 * 5) * (3 * 4 + 2 * 3)
    with FlopCounterMode(display=False) as packed:
        ck.latent_attention(_leaf(3, 2, 3, 4), k[:1], v[:1], cu_seqlens=OFFSETS, impl="native")
    assert packed.get_total_flops() == 2 * (2 * 3 * 5) * (4 + 3)


def test_forward_mode_raises() -> None:
    """A gradient is right or it raises."""
    q, k, v = (t.detach() for t in _inputs())
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(lambda q: ck.latent_attention(q, k, v, impl="native"), (q,), (q,))
    with pytest.raises(RuntimeError, match="jvp"), forward_ad.dual_level():
        ck.latent_attention(forward_ad.make_dual(q, q), k, v, impl="native")
