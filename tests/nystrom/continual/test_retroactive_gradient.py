"""Retroactive steps of exact attention that record a gradient: it flows through the sums of all queries of the window,
and is that of the definition."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cmab_kernels as ck
from cmab_kernels.nystrom.continual.gradient import function
from cmab_kernels.runtime.backends import imported

from .streams import last

pytestmark = pytest.mark.skipif(imported("nystrom.continual", "native") is None, reason="native code was not built")


def _inputs(length: int, widths: tuple[int, int] = (6, 5), size: float = 1.0, streams: int = 2) -> list[Tensor]:
    """Return the query, key and value tokens of a few streams of two heads."""
    width, value_width = widths
    tokens = [torch.randn(streams, 2, length, columns, dtype=torch.float64) for columns in (width, width, value_width)]
    tokens[1] *= size
    return [t.requires_grad_() for t in tokens]


def _start(inputs: list[Tensor], window: int) -> ck.ContinualAttentionState:
    return ck.continual_attention_init(*(t[:, :, :window] for t in inputs))


def _loss(inputs: Iterable[Tensor], impl: str, window: int, chunks: int | list[int]) -> Tensor:
    """Return a loss of the outputs of all steps, and of the rings and sums of some states. Check that steps of the
    kernel take up the sums of the step before."""
    inputs = [*inputs]
    state, total = _start(inputs, window), inputs[0].new_zeros(())
    for i, parts in enumerate(zip(*(t[:, :, window:].split(chunks, 2) for t in inputs), strict=True)):
        out, state = ck.continual_attention_step(state, *parts, impl=impl, output="retroactive")
        total = total + (out * torch.linspace(-1, 1 + i, out.numel(), dtype=out.dtype).view_as(out)).sum()
        assert impl == "reference" or not out.requires_grad or function.attached_sums(state) is state.sums
        if i % 3 == 1:
            total = total + sum((j + 1) * t.square().sum() for j, t in enumerate(_rings(state)))
            total = total + (state.sums[..., :-5] / state.sums[..., -5, None]).sin().sum()
    return total + out.square().sum()


def _rings(state: ck.ContinualAttentionState) -> list[Tensor]:
    tensors = ck.state_to_tensors(state)
    return [tensors[name] for name in ("queries", "keys", "values")]


def _close(ours: Any, wanted: Any, tolerance: float = 1e-12) -> None:
    for a, b in zip(ours, wanted, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1)


def _compare(inputs: list[Tensor], window: int, chunks: int | list[int], tolerance: float = 1e-12) -> None:
    ours, wanted = (torch.autograd.grad(_loss(inputs, impl, window, chunks), inputs) for impl in ("auto", "reference"))
    _close(ours, wanted, tolerance)


@pytest.mark.parametrize("chunk", [1, 4, 25])
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("window", [1, 3, 11, 40])
def test_a_chain_of_steps(window: int, size: float, chunk: int) -> None:
    """In 50 steps, all tokens of the first window leave. Calls with more tokens than the window are divided."""
    _compare(_inputs(window + 50, size=size), window, chunk)


@pytest.mark.parametrize("widths", [(1, 1), (17, 3), (9, 70)])
@pytest.mark.parametrize("window, chunks", [(40, [1, 2]), (9, [2, 1, 7, 3, 9, 1])], ids=["short", "ragged"])
def test_shapes(window: int, chunks: list[int], widths: tuple[int, int]) -> None:
    """In a short stream, most tokens of the first window stay."""
    _compare(_inputs(window + sum(chunks), widths), window, chunks)


def test_no_streams() -> None:
    inputs = _inputs(8, streams=0)
    found = torch.autograd.grad(_loss(inputs, "auto", 5, 1), inputs)
    assert [g.shape for g in found] == [t.shape for t in inputs]


def test_scheduled_rows() -> None:
    """In windows of more than 1,024 tokens, a row may live so long that it is recomputed."""
    _compare(_inputs(1033, (2, 1), streams=1), 1030, [2, 1])


def test_rows_slide_and_are_recomputed() -> None:
    """Key 7 has large logits. When it leaves, every row that holds it is recomputed; before, rows slide."""
    histories: list[Tensor] = []
    recorded = function.native().continual_attention_recorded_step

    def keep(*arguments: Any) -> Any:
        made = recorded(*arguments)
        histories.append(made[1])
        return made

    inputs = _inputs(30, streams=1)
    with torch.no_grad():
        inputs[0][..., 0], inputs[1][:, :, 7] = 3.0, 0.0
        inputs[1][:, :, 7, 0] = 20.0
    with mock.patch.object(function.native(), "continual_attention_recorded_step", keep):
        _compare(inputs, 6, 1)
    fresh = torch.stack([history[..., -1] for history in histories])
    assert fresh[0].eq(1).all() and fresh[..., -1].eq(1).all(), "the first step, and the rows of new queries"
    assert fresh[7].eq(1).all(), "key 7 has left"
    assert fresh[1:7, ..., :-1].eq(0).any()


@pytest.mark.parametrize("size", [1e3, 1e6, 1e15])
def test_huge_logits(size: float) -> None:
    """Where a logit cannot be subtracted reliably, every row is recomputed. Weights are then 0 or 1, or shared by equal
    keys, and so are gradients of values."""
    key = torch.randint(2, (1, 1, 20, 1)).double() * size
    one, value = torch.ones_like(key), torch.randn_like(key).requires_grad_()
    found = []
    for impl in ("auto", "reference"):
        state = ck.continual_attention_init(*(t[:, :, :6] for t in (one, key, value)), scale=1.0)
        out, _ = last(state, tuple(t[:, :, 6:] for t in (one, key, value)), 2, impl=impl, output="retroactive")
        found.append(torch.autograd.grad(out.square().sum(), value))
    _close(found[0], found[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    """The error is at most a small multiple of that of the definition in the same type."""
    inputs = [t.detach().to(dtype).requires_grad_() for t in _inputs(29)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    wanted = torch.autograd.grad(_loss(exact, "reference", 9, 4), exact)
    error = []
    for impl in ("auto", "reference"):
        found = torch.autograd.grad(_loss(inputs, impl, 9, 4), inputs)
        assert all(g.dtype == dtype for g in found)
        error.append([(a.double() - b).abs().max() / b.abs().max() for a, b in zip(found, wanted, strict=True)])
    assert all(ours <= 3 * theirs + 4 * torch.finfo(dtype).eps for ours, theirs in zip(*error, strict=True))


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_second_derivatives(size: float) -> None:
    inputs = _inputs(13, size=size)

    def second(impl: str) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(_loss(inputs, impl, 5, [2, 1, 2, 3]), inputs, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), inputs)

    _close(second("auto"), second("reference"), 1e-11)


def test_truncated_backpropagation() -> None:
    """A state without its graph is a constant, and its sums are taken up."""
    inputs = _inputs(30)

    def gradients(impl: str) -> tuple[Tensor, ...]:
        first, rest = (tuple(t[:, :, part] for t in inputs) for part in (slice(9, 20), slice(20, 30)))
        _, state = last(_start(inputs, 9), first, 2, impl=impl, output="retroactive")
        state = type(state)._make(f.detach() if isinstance(f, Tensor) else f for f in state)
        out, _ = last(state, rest, 3, impl=impl, output="retroactive")
        return torch.autograd.grad(out.square().sum(), inputs)

    _close(gradients("auto"), gradients("reference"))


@pytest.mark.parametrize("field", ["queries", "keys", "values", "sums"])
def test_a_state_whose_field_was_replaced(field: str) -> None:
    """The gradient is that of the definition, whatever a caller does to a state between two steps."""
    inputs = _inputs(21)
    leaf: list[Tensor] = []

    def gradients(impl: str) -> tuple[Tensor, ...]:
        tokens = tuple(t[:, :, 9:] for t in inputs)
        _, state = last(_start(inputs, 9), tuple(t[:, :, :5] for t in tokens), impl=impl, output="retroactive")
        if not leaf:
            leaf.append(getattr(state, field).detach().clone().requires_grad_())
        state = state._replace(**{field: leaf[0]})
        out, _ = last(state, tuple(t[:, :, 5:] for t in tokens), 3, impl=impl, output="retroactive")
        found = torch.autograd.grad(out.square().sum(), [*inputs, *leaf], allow_unused=True)
        return tuple(torch.zeros(()) if g is None else g for g in found)

    _close(gradients("auto"), gradients("reference"))


def test_forked_states_and_other_outputs() -> None:
    """Two streams go on from one state. Single outputs drop the sums, and the next retroactive step makes new ones."""
    inputs = _inputs(24)

    def gradients(impl: str) -> tuple[Tensor, ...]:
        _, state = last(_start(inputs, 7), tuple(t[:, :, 7:12] for t in inputs), 2, impl=impl, output="retroactive")
        total = inputs[0].new_zeros(())
        for turn, output in enumerate(("retroactive", "single")):
            tokens = tuple(t.roll(turn, 0)[:, :, 12:18] for t in inputs)
            _, fork = last(state, tokens, 2, impl=impl, output=output)
            out, _ = last(fork, tuple(t[:, :, 18:] for t in inputs), 3, impl=impl, output="retroactive")
            total = total + (turn + 1) * out.square().sum()
        return torch.autograd.grad(total, inputs)

    _close(gradients("auto"), gradients("reference"))


def test_streams_at_other_positions() -> None:
    """A step with a mask runs the definition, and leaves rows that are one token behind."""
    inputs, absent = _inputs(20), torch.tensor([True, False])

    def gradients(impl: str) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"impl": impl, "output": "retroactive"}
        _, state = last(_start(inputs, 5), tuple(t[:, :, 5:8] for t in inputs), **options)
        _, state = ck.continual_attention_step(
            state, *(t[:, :, 8:9] for t in inputs), key_padding_mask=absent, **options
        )
        out, _ = last(state, tuple(t[:, :, 9:] for t in inputs), 4, **options)
        return torch.autograd.grad(out.square().sum(), inputs)

    _close(gradients("auto"), gradients("reference"))


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpoint(reentrant: bool) -> None:
    inputs = _inputs(21)

    def run(*given: Tensor) -> Tensor:
        return _loss(given, "auto", 9, 4)

    checkpoint(run, *inputs, use_reentrant=reentrant).backward()
    _close([t.grad for t in inputs], torch.autograd.grad(_loss(inputs, "auto", 9, 4), inputs), 0.0)


def test_a_recorded_step_changes_nothing_that_is_kept() -> None:
    """The same step may be taken twice and differentiated twice, and has the output of a step without a gradient."""
    inputs = _inputs(12)
    options: dict[str, Any] = {"output": "retroactive"}
    token = tuple(t[:, :, 10:11] for t in inputs)
    _, state = ck.continual_attention_step(_start(inputs, 9), *(t[:, :, 9:10] for t in inputs), **options)
    before = [f.detach().clone() for f in state if isinstance(f, Tensor)]
    out, after = ck.continual_attention_step(state, *token, **options)
    again, _ = ck.continual_attention_step(state, *token, **options)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    assert not function.native().is_sole_owner(after)
    with torch.no_grad():
        last(type(after)._make(f.detach() if isinstance(f, Tensor) else f for f in after), token, **options)
        last(after, tuple(t[:, :, 10:] for t in inputs), **options)
    _close(torch.autograd.grad(out.sum(), inputs, retain_graph=True), first, 0.0)
    _close(torch.autograd.grad(again.sum(), inputs), first, 0.0)
    fields = [f for f in state if isinstance(f, Tensor)]
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(fields, before, strict=True)) if i != 4)  # spare
    with torch.no_grad():
        assert torch.equal(ck.continual_attention_step(state, *token, **options).out, out)
