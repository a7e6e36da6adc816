"""The definition equals torch's: layers equal the modules that they replace, and their operations are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import cmab_kernels as ck
from cmab_kernels.nn import CrossAttention


def _close(ours: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_attention_is_that_of_torch(impl: str, own: bool, masked: bool) -> None:
    """The layer with torch's packed weights equals `nn.MultiheadAttention` between a norm and a sum,
    also with padding in x itself."""
    theirs, norm = (
        nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64),
        nn.LayerNorm(12, dtype=torch.float64),
    )
    for parameter in (*theirs.parameters(), *norm.parameters()):
        nn.init.normal_(parameter, std=0.5)
    x, context = (torch.randn(2, n, 12, dtype=torch.float64, requires_grad=True) for n in (5, 9))
    normed = norm(x)
    seen = normed if own else context
    mask = torch.rand(seen.shape[:2]) < 0.4 if masked else None
    right = x + theirs(normed, seen, seen, key_padding_mask=mask, need_weights=False)[0]
    (q, k, v), (qb, kb, vb) = (packed.chunk(3) for packed in (theirs.in_proj_weight, theirs.in_proj_bias))
    ours = ck.attention_layer(
        *(x, q, k, v, theirs.out_proj.weight),
        **{"query_bias": qb, "key_bias": kb, "value_bias": vb, "output_bias": theirs.out_proj.bias},
        norm=(norm.weight, norm.bias, norm.eps),
        context=None if own else context,
        key_padding_mask=mask,
        num_heads=3,
        impl=impl,
    )
    _close(ours, right)
    leaves = [x, *norm.parameters(), *theirs.parameters(), *(() if own else (context,))]
    for mine, other in zip(*(torch.autograd.grad(y.sin().sum(), leaves) for y in (ours, right)), strict=True):
        _close(mine, other)


def test_a_row_that_sees_nothing_is_itself(impl: str) -> None:
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(4, 4), torch.randn(4)
    everything = torch.ones(2, 3, dtype=torch.bool)
    y = ck.attention_layer(x, *(weight,) * 4, output_bias=bias, num_heads=2, key_padding_mask=everything, impl=impl)
    assert torch.equal(y, x + bias)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 0, 4), (2, 3, 5, 4)])
def test_any_number_of_dimensions(impl: str, shape: tuple[int, ...]) -> None:
    x, expand, contract = torch.randn(shape), torch.randn(6, 4), torch.randn(4, 6)
    y = ck.feed_forward_layer(x, expand, contract, activation="relu", impl=impl)
    torch.testing.assert_close(y, x + (x @ expand.T).relu() @ contract.T)


def test_no_rows_of_any_strides(impl: str) -> None:
    """torch treats an empty tensor as contiguous, whatever its strides."""
    x, expand, contract = torch.randn(3, 8)[:0, ::2].requires_grad_(), torch.randn(6, 8)[:, ::2], torch.randn(6, 4).T
    y = ck.feed_forward_layer(x, expand, contract, activation="relu", impl=impl)
    assert y.shape == torch.autograd.grad(y.sum(), x)[0].shape == (0, 4)
    context, square = torch.randn(2, 3, 8)[:, :0, ::2], torch.randn(4, 4)
    x = torch.randn(2, 3, 8)[..., ::2].requires_grad_()
    for latents in (x, x[:0], x[:, :0]):
        y = ck.attention_layer(latents, *(square,) * 4, context=context[: len(latents)], num_heads=2, impl=impl)
        assert y.shape == torch.autograd.grad(y.sum(), latents)[0].shape == latents.shape


def test_flops(native: str) -> None:
    """Each product counts two operations; the backward pass counts those that the needed gradients take."""
    x = torch.randn(2, 5, 4, requires_grad=True)
    weights = [torch.randn(*shape, requires_grad=True) for shape in ((6, 4), (6, 4), (8, 4), (4, 8))]
    with FlopCounterMode(display=False) as forward:
        y = ck.attention_layer(x, *weights, num_heads=2, impl=native)
    projections, scores = 2 * 5 * 4 * (6 + 6 + 8 + 8), 2 * 5 * 5 * (6 + 8)
    assert forward.get_total_flops() == 2 * (projections + scores)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(y.sum(), [x, *weights], retain_graph=True)
    assert backward.get_total_flops() == 2 * (2 * projections + 2 * scores + 2 * 5 * 5 * 6)
    y = ck.attention_layer(x.detach(), *(w.detach() for w in weights[:3]), weights[3], num_heads=2, impl=native)
    with FlopCounterMode(display=False) as least:
        y.sum().backward()
    assert least.get_total_flops() == 2 * 2 * 5 * 4 * 8
    expand, contract = torch.randn(6, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = ck.feed_forward_layer(x, expand, contract, impl=native)
    assert forward.get_total_flops() == 2 * 10 * 4 * (6 + 3)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert backward.get_total_flops() == 2 * 10 * 2 * 4 * (6 + 3)


def test_third_derivatives_with_a_norm(impl: str) -> None:
    """The derivatives of reverse mode equal those of forward mode, which torch's own LayerNorm fails."""
    x, along = torch.randn(2, 2, 3, dtype=torch.float64), torch.randn(2, 2, 3, dtype=torch.float64)
    square, norm = torch.randn(3, 3, dtype=torch.float64), (torch.randn(3).double(), torch.randn(3).double(), 1e-5)

    def layers(x: Tensor) -> Tensor:
        attended = ck.attention_layer(x, *(square,) * 4, norm=norm, num_heads=1, impl=impl)
        return ck.feed_forward_layer(attended, square, square, norm=norm, activation="gelu", impl=impl).sin().sum()

    def forward(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.func.jvp(function, (x,), (along,))[1]

    y = x.clone().requires_grad_()
    ours = layers(y)
    for _ in range(3):
        (slope,) = torch.autograd.grad(ours, y, create_graph=True)
        ours = (slope * along).sum()
    torch.testing.assert_close(ours, forward(forward(forward(layers)))(x), rtol=1e-9, atol=1e-9)


def test_gradients_of_weights_for_each_sample(impl: str) -> None:
    """vmap over samples with shared weights gives each sample its own gradients of them."""
    x, context = torch.randn(3, 2, 5, 4, dtype=torch.float64), torch.randn(3, 2, 6, 4, dtype=torch.float64)
    square, expand = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 4), (8, 4)))

    def loss(square: Tensor, expand: Tensor, x: Tensor, context: Tensor) -> Tensor:
        attended = ck.attention_layer(x, *(square,) * 4, context=context, num_heads=2, impl=impl)
        return ck.feed_forward_layer(attended, expand, square, impl=impl).square().sum()

    gradient = torch.func.grad(loss, (0, 1))
    each = torch.vmap(gradient, in_dims=(None, None, 0, 0))(square, expand, x, context)
    for i in range(3):
        for ours, right in zip(each, gradient(square, expand, x[i], context[i]), strict=True):
            _close(ours[i], right)


class _Zeros(TorchDispatchMode):
    """Counts how many tensors of zeros are made."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "zeros" in func.__name__
        return func(*args, **(kwargs or {}))


class _StopsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        return None


def test_a_backward_pass_makes_no_gradients_of_what_was_kept(native: str) -> None:
    """Keys and values that were kept have no gradient. A gradient of zeros would take as much memory as the keys and
    values."""
    layer, x, context = (
        CrossAttention(8, 2),
        torch.randn(3, 4, 8, requires_grad=True),
        torch.randn(3, 5, 8, requires_grad=True),
    )
    y = layer(x, context)
    with _Zeros() as zeros:
        y.backward(torch.ones_like(y))
    assert zeros.count == 0
    assert context.grad is not None
    x.grad = context.grad = None
    _StopsGradients.apply(layer(x, context)).sum().backward()
    assert x.grad is None
    assert context.grad is None
