"""What follows the first cross-attention of a block, in one native call: the same as its seven operators, derivatives included."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cmab_kernels import attention_layer, explain
from cmab_kernels.layers.block import SIZES, composed, latent_block

pytestmark = pytest.mark.skipif(
    not explain("feed_forward_layer", torch.ones(1, 1), torch.ones(2, 1), torch.ones(1, 1))[0].usable, reason="the extension was not built"
)
HEADS, EPS = 2, 1e-5
SHAPES = {
    "a few latents": (2, 5, 7, 8, 6),
    "odd widths": (3, 1, 3, 10, 5),
    "rows of several tiles": (2, 130, 61, 24, 33),
    "many pieces": (7, 128, 200, 16, 32),
}
"""Name -> B, L, M, C and the inner width of the feed-forward layers."""


def _tensors(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    batch, latents, block, width, inner = shape
    bias, square = (width,), (width, width)
    forward = [bias, bias, (2 * inner, width), (2 * inner,), (width, inner), bias]
    attend, across = ([*[bias] * norms, *[square] * 4, bias] for norms in (2, 4))
    parts = [square, bias, *forward, *attend, *forward, *across, *forward, *attend, *forward]
    shapes = [(batch, latents, width), (batch, HEADS, block, width // HEADS), (block, width), *parts]
    made = [torch.randn(s, dtype=torch.float64) / (s[-1] ** 0.5 if len(s) == 2 else 1.0) for s in shapes]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [t.to(wide if i == 1 else dtype).requires_grad_() for i, t in enumerate(made)]


def _fused(*tensors: Tensor) -> Tensor:
    return latent_block(*tensors[:3], tensors[3:], HEADS, EPS)


def _by_layer(*tensors: Tensor) -> Tensor:
    return composed(*tensors, num_heads=HEADS, eps=EPS)


def _close(ours: Sequence[Tensor], right: Sequence[Tensor], tolerance: float) -> None:
    for mine, wanted in zip(ours, right, strict=True):
        assert mine.dtype == wanted.dtype
        assert (mine - wanted).norm() <= tolerance * wanted.norm() + tolerance


def _results(function: Callable[..., Tensor], tensors: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, dy.to(result.dtype))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_one_call_is_seven_operators(shape: Sequence[int], dtype: torch.dtype) -> None:
    """Results and gradients err as little as those of the seven operators do; without a gradient, the result has the same bits."""
    tensors = _tensors(shape, dtype)
    assert len(tensors) == 3 + sum(SIZES)
    dy = torch.randn(shape[0], shape[1], shape[3])
    ours, theirs = (_results(function, tensors, dy) for function in (_fused, _by_layer))
    with torch.no_grad():
        assert torch.equal(_fused(*tensors), ours[0])
    right = _results(_by_layer, [t.double() for t in tensors], dy)
    largest = max(exact.norm() for exact in right)  # one key's weight is 1: gradients through it are differences that cancel to 0
    for mine, other, exact in zip(ours, theirs, right, strict=True):
        assert mine.dtype == other.dtype
        error, allowed = (mine - exact).norm(), 4 * (other - exact).norm() + 1e-12 + 4 * torch.finfo(dtype).eps * largest
        assert error <= allowed


def test_only_the_gradients_that_are_needed_are_made() -> None:
    for chosen in range(3 + sum(SIZES)):
        tensors = [t.detach().requires_grad_(i == chosen) for i, t in enumerate(_tensors(SHAPES["a few latents"]))]
        ours, right = (torch.autograd.grad(f(*tensors).sin().sum(), tensors[chosen])[0] for f in (_fused, _by_layer))
        _close([ours], [right], 1e-12)


def test_second_derivatives_are_those_of_the_definition() -> None:
    tensors = _tensors((1, 2, 3, 4, 3))
    seconds = []
    for function in (_fused, _by_layer):
        first = torch.autograd.grad(function(*tensors).sin().sum(), tensors, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), tensors))
    _close(*seconds, 1e-11)


def test_strides_and_threads_change_no_bit() -> None:
    tensors = [t.detach() for t in _tensors(SHAPES["rows of several tiles"], torch.float32)]
    apart = [t.repeat_interleave(2, -1)[..., ::2].requires_grad_() for t in tensors]
    found, threads = [], torch.get_num_threads()
    for given, number in ((tensors, 1), (apart, 1), (tensors, 2), (tensors, 3)):
        torch.set_num_threads(number)
        leaves = [t.detach().requires_grad_() if t.is_contiguous() else t for t in given]
        result = _fused(*leaves)
        found.append([result, *torch.autograd.grad(result.sin().sum(), leaves)])
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("empty", [(0, 5, 7, 8, 6), (2, 0, 7, 8, 6)], ids=["no batch", "no latents"])
def test_nothing_is_asked(empty: Sequence[int]) -> None:
    tensors = _tensors(empty)
    result = _fused(*tensors)
    assert result.shape == tensors[0].shape
    assert not any(g.any() for g in torch.autograd.grad(result.sum(), tensors))


def test_heads_may_be_wider_than_those_of_the_attention_operators() -> None:
    """A layer's heads have any width, also more than the 256 that attention by itself takes."""
    weights = [(torch.randn(320, 320, dtype=torch.float64) / 18).requires_grad_() for _ in range(4)]
    x = torch.randn(2, 5, 320, dtype=torch.float64, requires_grad=True)
    ours, right = (attention_layer(x, *weights, num_heads=1, impl=impl) for impl in ("native", "reference"))
    slopes = (torch.autograd.grad(result.sin().sum(), [x, *weights]) for result in (ours, right))
    _close([ours], [right], 1e-12)
    _close(*slopes, 1e-11)


@pytest.mark.parametrize("width, heads, each", [(64, 1, 4), (64, 1, 1), (130, 1, 3), (7, 4, 16)])
def test_heads_may_be_much_narrower_than_the_layer(width: int, heads: int, each: int) -> None:
    """Gradients are right whichever of the two widths of the output projection has more padding: one was written past its memory."""
    shapes = [(2, 50, width), *[(heads * each, width)] * 3, (width, heads * each)]
    tensors = [(torch.randn(shape) / shape[-1] ** 0.5).requires_grad_() for shape in shapes]
    found = [
        torch.autograd.grad(attention_layer(*given, num_heads=heads, impl=impl).sin().sum(), given)
        for impl, given in (("native", tensors), ("reference", [t.detach().double().requires_grad_() for t in tensors]))
    ]
    for ours, right in zip(*found, strict=True):
        assert (ours - right).norm() <= 1e-5 * right.norm() + 1e-6
