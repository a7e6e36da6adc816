"""Stacked blocks in one native call equal their operators one after the other, derivatives included."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cmab_kernels import explain
from cmab_kernels.layers.block import (
    PARTS,
    Settings,
    attended_blocks,
    composed,
    differentiated_blocks,
    read_blocks,
    updated_blocks,
)
from cmab_kernels.layers.reference import RESIDUALS

pytestmark = pytest.mark.skipif(
    not explain("feed_forward_layer", torch.ones(1, 1), torch.ones(2, 1), torch.ones(1, 1))[0].usable,
    reason="the extension was not built",
)
HEADS, EPS = 2, 1e-5
SHAPES = {
    "a few latents": (2, 5, 7, 9, 8, 6),
    "odd widths": (3, 1, 3, 70, 10, 5),
    "rows of several tiles": (2, 130, 61, 33, 24, 33),
    "many pieces": (7, 128, 200, 50, 16, 32),
    "one set": (1, 135, 70, 33, 24, 33),
}
"""Name -> B, L, M, N, C and the inner width of the feed-forward layers."""
Given = list[Any]
_settings = Settings(HEADS, EPS, "input")


@pytest.fixture(autouse=True, params=RESIDUALS)
def residual(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test for both forms of the residual."""
    monkeypatch.setattr(sys.modules[__name__], "_settings", Settings(HEADS, EPS, request.param))
    form: str = request.param
    return form


def _parameters(width: int, block: int, inner: int) -> list[tuple[int, ...]]:
    bias, square = (width,), (width, width)
    forward = [bias, bias, (2 * inner, width), (2 * inner,), (width, inner), bias]
    attend, across = ([*[bias] * norms, *[square] * 4, bias] for norms in (2, 4))
    return [(block, width), *across, *forward, *attend, *forward, *across, *forward, *attend, *forward]


def _given(shape: Sequence[int], dtype: torch.dtype = torch.float64, *, reads: bool = True, depth: int = 2) -> Given:
    """The arguments of `composed`: x, inputs and their mask or `attended`, and the parameters of the blocks."""
    batch, latents, block, rows, width, inner = shape
    first = (batch, rows, width) if reads else (depth * batch, HEADS, block, width // HEADS)
    shapes = [(batch, latents, width), first, *_parameters(width, block, inner) * depth]
    made = [torch.randn(s, dtype=torch.float64) / (s[-1] ** 0.5 if len(s) == 2 else 1.0) for s in shapes]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, read, *parameters = (t.to(wide if i == 1 and not reads else dtype).requires_grad_() for i, t in enumerate(made))
    return [x, read, torch.rand(batch, rows) < 0.3, None, *parameters] if reads else [x, None, None, read, *parameters]


def _fused(
    x: Tensor,
    inputs: Tensor | None,
    mask: Tensor | None,
    attended: Tensor | None,
    *parameters: Tensor,
    all_blocks: bool = False,
) -> Tensor:
    if attended is not None:
        return attended_blocks(x, attended, parameters, _settings, all_blocks=all_blocks)
    assert inputs is not None
    return differentiated_blocks(x, inputs, mask, parameters, _settings, all_blocks=all_blocks)


def _passing(
    x: Tensor,
    inputs: Tensor | None,
    mask: Tensor | None,
    attended: Tensor | None,
    *parameters: Tensor,
    all_blocks: bool = False,
) -> Tensor:
    """The same results when nothing is kept."""
    if attended is not None:
        return attended_blocks(x, attended, parameters, _settings, all_blocks=all_blocks)
    assert inputs is not None
    return updated_blocks(x, inputs, mask, (None, None), parameters, _settings, all_blocks=all_blocks)[0]


def _by_layer(*given: Any, all_blocks: bool = False) -> Tensor:
    return composed(*given, settings=_settings, all_blocks=all_blocks)


_each, _each_by_layer = partial(_fused, all_blocks=True), partial(_by_layer, all_blocks=True)


def _floating(given: Given) -> list[Tensor]:
    return [t for t in given if t is not None and t.is_floating_point()]


def _close(ours: Sequence[Tensor], right: Sequence[Tensor], tolerance: float) -> None:
    for mine, wanted in zip(ours, right, strict=True):
        assert mine.dtype == wanted.dtype
        assert (mine - wanted).norm() <= tolerance * wanted.norm() + tolerance


def _results(function: Callable[..., Tensor], given: Given, dy: Tensor) -> list[Tensor]:
    leaves = [t if t is None or not t.is_floating_point() else t.detach().requires_grad_() for t in given]
    result = function(*leaves)
    return [
        result.detach(),
        *torch.autograd.grad(result, _floating(leaves), dy.to(result.dtype), materialize_grads=True),
    ]


both = pytest.mark.parametrize("reads", [True, False], ids=["inputs", "attended"])


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_one_call_is_its_operators(shape: Sequence[int], dtype: torch.dtype, reads: bool) -> None:
    """The errors of results and gradients are as small as those of the operators."""
    given = _given(shape, dtype, reads=reads)
    assert len(given) == 4 + 2 * sum(PARTS)
    dy = torch.randn(*shape[:2], shape[4])
    ours, theirs = (_results(function, given, dy) for function in (_fused, _by_layer))
    right = _results(_by_layer, [t.double() if t is not None and t.is_floating_point() else t for t in given], dy)
    largest = max(exact.norm() for exact in right)  # if one key's weight is 1, gradients through it cancel to 0
    for mine, other, exact in zip(ours, theirs, right, strict=True):
        assert mine.dtype == other.dtype
        error, allowed = (
            (mine - exact).norm(),
            4 * (other - exact).norm() + 1e-12 + 4 * torch.finfo(dtype).eps * largest,
        )
        assert error <= allowed


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nothing_kept_changes_no_bit(shape: Sequence[int]) -> None:
    x, inputs, mask, _, *parameters = _given(shape, torch.float32)
    y, out, _ = updated_blocks(x, inputs, mask, (None, None), parameters, _settings)
    assert torch.equal(y, _fused(x, inputs, mask, None, *parameters))
    with torch.no_grad():
        assert torch.equal(y, _fused(x, None, None, out, *parameters))


def test_chunks_and_their_states_are_the_whole() -> None:
    x, inputs, mask, _, *parameters = _given(SHAPES["rows of several tiles"])
    whole = updated_blocks(x, inputs, mask, (None, None), parameters, _settings)
    state: tuple[Tensor | None, Tensor | None] = (None, None)
    for first, last in ((0, 5), (5, 5), (5, 33)):
        y, *state = updated_blocks(x, inputs[:, first:last], mask[:, first:last], tuple(state), parameters, _settings)
    _close([y, *state], whole, 1e-12)


def test_ignored_inputs_are_not_read() -> None:
    """A NaN in an ignored row reaches no result and no gradient; the row's own gradient is 0.

    This also holds if all rows are ignored.
    """
    for share in (0.5, 1.0):
        given = _given(SHAPES["a few latents"])
        mask = torch.rand(2, 9) < share
        clean, dirty = (
            [given[0], given[1].detach().masked_fill(mask.unsqueeze(-1), v), mask, *given[3:]] for v in (0.0, torch.nan)
        )
        ours, right = (_results(_fused, one, torch.ones(2, 5, 8)) for one in (dirty, clean))
        assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))
        assert not ours[2][mask].any()


@both
def test_only_the_gradients_that_are_needed_are_made(reads: bool, residual: str) -> None:
    many = len(_given(SHAPES["a few latents"], reads=reads, depth=1))
    for chosen in range(many):
        given = [t if t is None else t.detach() for t in _given(SHAPES["a few latents"], reads=reads, depth=1)]
        if given[chosen] is None or not given[chosen].is_floating_point():
            continue
        given[chosen].requires_grad_()
        # Without inputs, the call has only the output projection of the first cross-attention, and the norm of its
        # residual.
        if not reads and (4 if residual == "input" else 6) < chosen <= 4 + 7:
            assert torch.autograd.grad(_fused(*given).sum(), given[chosen], allow_unused=True)[0] is None
            continue
        ours, right = (
            torch.autograd.grad(f(*given).sin().sum(), given[chosen], materialize_grads=True)[0]
            for f in (_fused, _by_layer)
        )
        _close([ours], [right], 1e-12)


@both
@pytest.mark.parametrize("depth", [1, 3])
def test_the_latents_after_every_block(reads: bool, depth: int) -> None:
    """Results between blocks, and their gradients, equal those of the operators, whether anything is kept or not."""
    given = _given(SHAPES["rows of several tiles"], reads=reads, depth=depth)
    dy = torch.randn(depth, *given[0].shape, dtype=torch.float64)
    _close(_results(_each, given, dy), _results(_each_by_layer, given, dy), 1e-12)
    plain = [t if t is None else t.detach() for t in given]
    every = _passing(*plain, all_blocks=True)
    assert torch.equal(every, _each(*given).detach()) and torch.equal(every[-1], _passing(*plain))


def test_the_state_alone_is_that_of_an_update() -> None:
    x, inputs, mask, _, *parameters = (
        t if t is None else t.detach() for t in _given(SHAPES["rows of several tiles"], depth=3)
    )
    readings = [t for k in range(3) for t in parameters[k * sum(PARTS) : k * sum(PARTS) + 8]]
    state: tuple[Any, Any] = (None, None)
    for chunk, hidden in zip(inputs.split(20, 1), mask.split(20, 1), strict=True):
        _, *right = updated_blocks(x, chunk, hidden, state, parameters, _settings)
        state = read_blocks(chunk, hidden, state, readings, _settings)
        assert all(torch.equal(a, b) for a, b in zip(state, right, strict=True))


@both
@pytest.mark.parametrize("all_blocks", [False, True])
def test_second_derivatives_are_those_of_the_definition(reads: bool, all_blocks: bool) -> None:
    given = _given((1, 2, 3, 3, 4, 3), reads=reads)
    seconds = []
    for function in (_each, _each_by_layer) if all_blocks else (_fused, _by_layer):
        first = torch.autograd.grad(
            function(*given).sin().sum(), _floating(given), create_graph=True, materialize_grads=True
        )
        seconds.append(
            torch.autograd.grad(sum(g.square().sum() for g in first), _floating(given), materialize_grads=True)
        )
    _close(*seconds, 1e-11 * max(float(g.norm()) for g in seconds[1]))


@both
@pytest.mark.parametrize("shape", ["rows of several tiles", "one set"])
def test_strides_and_threads_change_no_bit(reads: bool, shape: str) -> None:
    """Keeping intermediate results changes no bit either. Each thread takes its own sets, blocks or rows."""
    given = [t if t is None else t.detach() for t in _given(SHAPES[shape], torch.float32, reads=reads)]
    apart = [t if t is None else t.repeat_interleave(2, -1)[..., ::2] for t in given]
    found, threads = [], torch.get_num_threads()
    for one, number in ((given, 1), (apart, 1), (given, 2), (given, 3), (given, 5)):
        torch.set_num_threads(number)
        leaves = [t if t is None or not t.is_floating_point() else t.detach().requires_grad_() for t in one]
        result = _fused(*leaves)
        slopes = torch.autograd.grad(result.sin().sum(), _floating(leaves), materialize_grads=True)
        found.append([result.detach(), *slopes, _passing(*one)])
    torch.set_num_threads(threads)
    assert torch.equal(found[0][0], found[0][-1])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
