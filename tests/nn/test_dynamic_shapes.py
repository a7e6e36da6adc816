"""Modules under `torch.compile(dynamic=True)`: a few graphs serve batches and lengths of any size, with the results of
eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmab_kernels as ck
from cmab_kernels import nn as ours

DIM, HEADS, WINDOW = 16, 4, 6
FEW: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
Inputs = Callable[[int, int], tuple[Tensor, ...]]


def tokens(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, DIM)


def latents_and_context(batch: int, length: int) -> tuple[Tensor, ...]:
    return tokens(batch, 8), tokens(batch, length)


def window(batch: int, _: int) -> tuple[Tensor, ...]:
    return (tokens(batch, WINDOW),)


class Output(nn.Module):
    """The first result of a module with torch's signature, for self-attention."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(x, x, x, need_weights=False)[0]
        return result


class Windowed(Output):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(x, need_weights=False)[0]
        return result


CASES: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "CMAB": (lambda: ours.CMAB(DIM, 8, HEADS), lambda b, n: (tokens(b, n), tokens(b, 8))),
    "CMAB, shared latents": (lambda: ours.CMAB(DIM, 8, HEADS), lambda b, n: (tokens(b, n), tokens(1, 8)[0])),
    "CMABStack": (lambda: ours.CMABStack(DIM, 8, HEADS, 2), lambda b, n: (tokens(b, n), tokens(1, 8)[0])),
    "LatentLayer": (lambda: ours.LatentLayer(DIM, HEADS, 32), latents_and_context),
    "CrossAttention": (lambda: ours.CrossAttention(DIM, HEADS), latents_and_context),
    "SelfAttention": (lambda: ours.SelfAttention(DIM, HEADS), lambda b, n: (tokens(b, n),)),
    "FeedForward": (lambda: ours.FeedForward(DIM, 32), lambda b, n: (tokens(b, n),)),
    "TransformerEncoderLayer": (
        lambda: ours.TransformerEncoderLayer(DIM, HEADS, 32, **FEW),
        lambda b, n: (tokens(b, n),),
    ),
    "TransformerDecoderLayer": (lambda: ours.TransformerDecoderLayer(DIM, HEADS, 32, **FEW), latents_and_context),
    "InformerEncoderLayer": (
        lambda: ours.InformerEncoderLayer(DIM, HEADS, 32, **FEW),
        lambda b, n: (tokens(b, n + 20),),
    ),
    "MultiheadAttention": (
        lambda: Output(ours.MultiheadAttention(DIM, HEADS, batch_first=True)),
        lambda b, n: (tokens(b, n),),
    ),
    "MultiheadIntention": (
        lambda: Output(ours.MultiheadIntention(DIM, HEADS, batch_first=True)),
        lambda b, n: (tokens(b, n),),
    ),
    "NystromAttention": (
        lambda: Output(ours.NystromAttention(DIM, HEADS, batch_first=True, num_landmarks=4)),
        lambda b, n: (tokens(b, n + 8),),
    ),
    "ContinualAttention": (
        lambda: Windowed(ours.ContinualAttention(DIM, HEADS, batch_first=True, sequence_len=WINDOW)),
        window,
    ),
    "ContinualNystromAttention": (
        lambda: Windowed(
            ours.ContinualNystromAttention(DIM, HEADS, batch_first=True, sequence_len=WINDOW, num_landmarks=3)
        ),
        window,
    ),
    "ContinualEncoderLayer": (lambda: ours.ContinualEncoderLayer(DIM, HEADS, 32, **FEW, sequence_len=WINDOW), window),
    "RetroactiveEncoderLayer": (
        lambda: ours.RetroactiveEncoderLayer(DIM, HEADS, 32, **FEW, sequence_len=WINDOW),
        window,
    ),
}


OF_OTHERS = (
    *("CMAB, shared latents", "CMABStack", "LatentLayer"),
    *("TransformerEncoderLayer", "TransformerDecoderLayer", "ContinualEncoderLayer", "RetroactiveEncoderLayer"),
)
"""Modules whose parts are other modules of this list."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in OF_OTHERS else name for name in CASES]
)
def test_any_size(name: str) -> None:
    """One graph serves all sizes."""
    assert _graphs(name, (2, 5), (3, 7), (5, 64)) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_OTHERS])
def test_sizes_of_1(name: str) -> None:
    """For torch, a size of 1 is a constant, so it has its own graph."""
    assert _graphs(name, (2, 5), (1, 1)) <= 2


def _graphs(name: str, *sizes: tuple[int, int]) -> int:
    """Compile a module, compare its results for these batches and lengths, and return the number of graphs."""
    torch.manual_seed(0)
    make, inputs = CASES[name]
    module, graphs = make(), []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for batch, length in sizes:
        given = inputs(batch, length)
        torch.testing.assert_close(compiled(*given), module(*given), rtol=1e-5, atol=1e-6)
    return len(graphs)


LATER = {name: pytest.mark.thorough if name == "NystromAttention" else pytest.mark.nightly for name in CASES}
"""Module -> the tier of its training; all but one are nightly, because Inductor takes 10 s each."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in LATER.items()])
def test_training_at_any_size(name: str) -> None:
    """Inductor also compiles the gradients, for lengths that segments divide evenly and for other lengths."""
    torch.manual_seed(0)
    make, inputs = CASES[name]
    module = make().double()
    compiled = torch.compile(module, dynamic=True)
    for batch, length in ((2, 5), (3, 8)):
        given = tuple(each.double().requires_grad_() for each in inputs(batch, length))
        learnt = [*given, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
        ours, wanted = (
            torch.autograd.grad(f(*given).square().sum(), learnt, allow_unused=True) for f in (compiled, module)
        )
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.thorough
def test_widths_of_any_size() -> None:
    """Inductor compiles projections whose heads and widths are symbols, for keys and values of another width."""

    def attended(*given: Tensor) -> Tensor:
        return ck.projected_attention_state(*given).out

    compiled = torch.compile(attended, dynamic=True, fullgraph=True)
    for heads, width, value_width in ((2, 4, 5), (3, 6, 2)):
        shapes = (heads, 3, width), (2, 7, 6), (heads * width, 6), (heads * value_width, 6)
        given = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
        ours, wanted = (torch.autograd.grad(f(*given).square().sum(), given) for f in (compiled, attended))
        torch.testing.assert_close(ours, wanted)


EXPORTED_BY_ALL = ("ContinualEncoderLayer", "RetroactiveEncoderLayer")
"""The modules that torch 2.6 can also export: it does not support dynamic sizes in an autograd Function."""


@pytest.mark.parametrize("name", CASES)
def test_exported(name: str) -> None:
    """`torch.export` records one program for any batch and number of tokens."""
    if not hasattr(torch.compiler, "is_exporting") and name not in EXPORTED_BY_ALL:
        pytest.skip("this torch exports no autograd Function for dynamic sizes")
    make, inputs = CASES[name]
    module = make().eval()
    first, *others = (inputs(batch, length) for batch, length in ((2, 8), (3, 9), (5, 64)))
    vary = [
        {
            dim: torch.export.Dim.DYNAMIC
            for dim, sizes in enumerate(zip(a.shape, b.shape, strict=True))
            if sizes[0] != sizes[1]
        }
        for a, b in zip(first, others[0], strict=True)
    ]
    program = torch.export.export(module, first, dynamic_shapes=tuple(vary)).module()
    for given in others:
        torch.testing.assert_close(program(*given), module(*given), rtol=1e-5, atol=1e-6)
