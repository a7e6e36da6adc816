"""Fused layers on the CPU with heads that are wider or narrower than those of the attention operators."""

from __future__ import annotations

import pytest
import torch

from cmab_kernels import attention_layer, explain, feed_forward_layer

pytestmark = pytest.mark.skipif(
    not explain("feed_forward_layer", torch.ones(1, 1), torch.ones(2, 1), torch.ones(1, 1))[0].usable,
    reason="the extension was not built",
)


def test_heads_may_be_wider_than_those_of_the_attention_operators() -> None:
    """A layer's heads have any width, also more than the 256 that attention by itself takes."""
    weights = [(torch.randn(320, 320, dtype=torch.float64) / 18).requires_grad_() for _ in range(4)]
    x = torch.randn(2, 5, 320, dtype=torch.float64, requires_grad=True)
    ours, right = (attention_layer(x, *weights, num_heads=1, impl=impl) for impl in ("native", "reference"))
    slopes = (torch.autograd.grad(result.sin().sum(), [x, *weights]) for result in (ours, right))
    torch.testing.assert_close(ours, right, rtol=0, atol=1e-12)
    torch.testing.assert_close(*slopes, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("width, heads, each", [(64, 1, 4), (64, 1, 1), (130, 1, 3), (7, 4, 16)])
def test_heads_may_be_much_narrower_than_the_layer(width: int, heads: int, each: int) -> None:
    """Gradients are right whichever of the two widths of the output projection has more padding:
    one was written past its memory."""
    shapes = [(2, 50, width), *[(heads * each, width)] * 3, (width, heads * each)]
    tensors = [(torch.randn(shape) / shape[-1] ** 0.5).requires_grad_() for shape in shapes]
    found = [
        torch.autograd.grad(attention_layer(*given, num_heads=heads, impl=impl).sin().sum(), given)
        for impl, given in (("native", tensors), ("reference", [t.detach().double().requires_grad_() for t in tensors]))
    ]
    for ours, right in zip(*found, strict=True):
        assert (ours - right).norm() <= 1e-5 * right.norm() + 1e-6


def test_gradients_of_biases_keep_their_digits_over_many_rows() -> None:
    """A bias sums as many terms as there are rows, all equal after a `.sum()`: one running sum would drift."""
    rows = 1_000_000
    bias = torch.zeros(2, requires_grad=True)
    y = feed_forward_layer(torch.randn(rows, 2), torch.randn(2, 2), torch.randn(2, 1), contract_bias=bias)
    (slope,) = torch.autograd.grad(y, bias, torch.full_like(y, 0.7))
    assert (slope.double() / (rows * torch.tensor(0.7).double()) - 1).abs().max() < 1e-6
