"""Stacked blocks in one native call equal their definition, derivatives included, whatever is kept of the call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cmab_kernels import attention_layer, explain, feed_forward_layer
from cmab_kernels.layers import BlockStack, BlockStackRead, block_stack, block_stack_op, block_stack_read_op
from cmab_kernels.layers.reference import RESIDUALS
from cmab_kernels.layers.stack.reference import OF_BLOCK, OF_READING

pytestmark = pytest.mark.skipif(
    not explain("block_stack", torch.ones(1, 1, 1))[0].usable,
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
_residual = "input"


@pytest.fixture(autouse=True, params=RESIDUALS)
def residual(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test for both forms of the residual."""
    monkeypatch.setattr(sys.modules[__name__], "_residual", request.param)
    form: str = request.param
    return form


def _parameters(width: int, block: int, inner: int) -> list[tuple[int, ...]]:
    bias, square = (width,), (width, width)
    forward = [bias, bias, (2 * inner, width), (2 * inner,), (width, inner), bias]
    attend, across = ([*[bias] * norms, *[square] * 4, bias] for norms in (2, 4))
    return [(block, width), *across, *forward, *attend, *forward, *across, *forward, *attend, *forward]


def _given(shape: Sequence[int], dtype: torch.dtype = torch.float64, *, reads: bool = True, depth: int = 2) -> Given:
    """The arguments of `_run`: x, inputs and their mask or `attended`, and the parameters of the blocks."""
    batch, latents, block, rows, width, inner = shape
    first = (batch, rows, width) if reads else (depth * batch, HEADS, block, width // HEADS)
    shapes = [(batch, latents, width), first, *_parameters(width, block, inner) * depth]
    made = [torch.randn(s, dtype=torch.float64) / (s[-1] ** 0.5 if len(s) == 2 else 1.0) for s in shapes]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, read, *parameters = (t.to(wide if i == 1 and not reads else dtype).requires_grad_() for i, t in enumerate(made))
    return [x, read, torch.rand(batch, rows) < 0.3, None, *parameters] if reads else [x, None, None, read, *parameters]


def _run(
    x: Tensor,
    inputs: Tensor | None,
    mask: Tensor | None,
    attended: Tensor | None,
    *parameters: Tensor,
    all_blocks: bool = False,
    impl: str = "native",
) -> Tensor:
    options: dict[str, Any] = {"num_heads": HEADS, "eps": EPS, "residual": _residual, "all_blocks": all_blocks}
    return block_stack(x, inputs, parameters, attended=attended, key_padding_mask=mask, **options, impl=impl)


def _updated(
    x: Tensor, inputs: Tensor, mask: Tensor | None, state: Any, parameters: Sequence[Tensor], impl: str = "native"
) -> list[Tensor]:
    """y, and the state after the inputs."""
    given = BlockStack(x, inputs, mask, *state, tuple(parameters), HEADS, EPS, _residual, impl=impl)
    return list(block_stack_op(given)[:3])


def _by_layer(
    x: Tensor, inputs: Tensor | None, mask: Tensor | None, attended: Tensor | None, *parameters: Tensor
) -> Tensor:
    """Return the latents that one operator after the other computes."""
    given = iter(parameters)

    def forward(rows: Tensor) -> Tensor:
        scale, shift, expand, expand_bias, contract, bias = islice(given, 6)
        biases = {"expand_bias": expand_bias, "contract_bias": bias}
        return feed_forward_layer(rows, expand, contract, norm=(scale, shift, EPS), residual=_residual, **biases)

    def attend(rows: Tensor, context: Tensor | None = None, ignore: Tensor | None = None) -> Tensor:
        norms: dict[str, Any] = {"norm": (*islice(given, 2), EPS)}
        if context is not None:
            norms |= {"context": context, "context_norm": (*islice(given, 2), EPS), "key_padding_mask": ignore}
        *weights, bias = islice(given, 5)
        return attention_layer(rows, *weights, num_heads=HEADS, output_bias=bias, residual=_residual, **norms)

    outs = [None] * (len(parameters) // OF_BLOCK) if attended is None else attended.chunk(len(parameters) // OF_BLOCK)
    for out in outs:
        block = next(given).expand(len(x), -1, -1)
        if out is None:
            m = attend(block, inputs, mask)
        else:
            scale, shift, *_, weight, bias = islice(given, 9)
            rows = F.layer_norm(block, block.shape[-1:], scale, shift, EPS) if _residual == "normed" else block
            m = rows + F.linear(out.transpose(1, 2).flatten(2).to(x.dtype), weight, bias)
        m = forward(attend(forward(m)))
        x = forward(attend(forward(attend(x, m))))
    return x


_defined = partial(_run, impl="reference")
_each, _each_defined = partial(_run, all_blocks=True), partial(_defined, all_blocks=True)


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
    assert len(given) == 4 + 2 * OF_BLOCK
    dy = torch.randn(*shape[:2], shape[4])
    ours, theirs = (_results(function, given, dy) for function in (_run, _by_layer))
    right = _results(_defined, [t.double() if t is not None and t.is_floating_point() else t for t in given], dy)
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
    y, out, _ = _updated(x, inputs, mask, (None, None), parameters)
    assert torch.equal(y, _run(x, inputs, mask, None, *parameters))
    with torch.no_grad():
        assert torch.equal(y, _run(x, None, None, out, *parameters))


def test_chunks_and_their_states_are_the_whole() -> None:
    x, inputs, mask, _, *parameters = _given(SHAPES["rows of several tiles"])
    whole = _updated(x, inputs, mask, (None, None), parameters)
    state: tuple[Tensor | None, Tensor | None] = (None, None)
    for first, last in ((0, 5), (5, 5), (5, 33)):
        y, *state = _updated(x, inputs[:, first:last], mask[:, first:last], tuple(state), parameters)
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
        ours, right = (_results(_run, one, torch.ones(2, 5, 8)) for one in (dirty, clean))
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
            assert torch.autograd.grad(_run(*given).sum(), given[chosen], allow_unused=True)[0] is None
            continue
        ours, right = (
            torch.autograd.grad(f(*given).sin().sum(), given[chosen], materialize_grads=True)[0]
            for f in (_run, _defined)
        )
        _close([ours], [right], 1e-12)


@both
@pytest.mark.parametrize("depth", [1, 3])
def test_the_latents_after_every_block(reads: bool, depth: int) -> None:
    """Results between blocks, and their gradients, equal those of the operators, whether anything is kept or not."""
    given = _given(SHAPES["rows of several tiles"], reads=reads, depth=depth)
    dy = torch.randn(depth, *given[0].shape, dtype=torch.float64)
    _close(_results(_each, given, dy), _results(_each_defined, given, dy), 1e-12)
    plain = [t if t is None else t.detach() for t in given]
    every = _run(*plain, all_blocks=True)
    assert torch.equal(every, _each(*given).detach()) and torch.equal(every[-1], _run(*plain))


def test_the_state_alone_is_that_of_an_update() -> None:
    x, inputs, mask, _, *parameters = (
        t if t is None else t.detach() for t in _given(SHAPES["rows of several tiles"], depth=3)
    )
    readings = [t for k in range(3) for t in parameters[k * OF_BLOCK : k * OF_BLOCK + OF_READING]]
    state: tuple[Any, Any] = (None, None)
    for chunk, hidden in zip(inputs.split(20, 1), mask.split(20, 1), strict=True):
        _, *right = _updated(x, chunk, hidden, state, parameters)
        state = block_stack_read_op(BlockStackRead(chunk, hidden, *state, tuple(readings), HEADS, EPS, "native"))
        assert all(torch.equal(a, b) for a, b in zip(state, right, strict=True))


@both
@pytest.mark.parametrize("all_blocks", [False, True])
def test_second_derivatives_are_those_of_the_definition(reads: bool, all_blocks: bool) -> None:
    given = _given((1, 2, 3, 3, 4, 3), reads=reads)
    seconds = []
    for function in (_each, _each_defined) if all_blocks else (_run, _defined):
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
        result = _run(*leaves)
        slopes = torch.autograd.grad(result.sin().sum(), _floating(leaves), materialize_grads=True)
        found.append([result.detach(), *slopes, _run(*one)])
    torch.set_num_threads(threads)
    assert torch.equal(found[0][0], found[0][-1])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@both
def test_operations_are_those_of_the_layers(reads: bool) -> None:
    """The counts of a training step are equal for one set, because no layer computes its queries more than once."""
    given, counts = _given(SHAPES["one set"], torch.float32, reads=reads), []
    for function in (_run, _by_layer):
        with FlopCounterMode(display=False) as counter:
            function(*given).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_the_gradient_of_a_state_before_the_inputs_is_that_of_the_definition() -> None:
    """The loss contains y and the state after the inputs."""
    x, inputs, _, _, *parameters = _given((1, 2, 3, 5, 4, 3), depth=1)
    first, rest = (
        BlockStackRead(part, None, None, None, tuple(parameters[:8]), HEADS, EPS) for part in inputs.split(3, 1)
    )
    found = []
    for impl in ("native", "reference"):
        state = block_stack_read_op(first._replace(impl=impl))
        after = block_stack_read_op(rest._replace(state_out=state[0], state_lse=state[1], impl=impl))
        y = _updated(x, rest.inputs, None, state, parameters, impl=impl)[0]
        total = y.sin().sum() + sum(part.sin().sum() for part in after)
        found.append(torch.autograd.grad(total, [inputs, *parameters[:8]]))
    _close(*found, 1e-12)


@pytest.mark.parametrize("all_blocks", [False, True])
def test_the_result_may_be_written_to_before_the_backward_pass(all_blocks: bool) -> None:
    given = _given(SHAPES["a few latents"])
    y = _run(*given, all_blocks=all_blocks)
    right = torch.autograd.grad(y.sum(), _floating(given), retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(y.mul_(2.0).sum() / 2.0, _floating(given)), right))
