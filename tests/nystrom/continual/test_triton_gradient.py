"""The gradients of recorded steps in Triton's interpreter. tests/test_interpreter.py runs this file with
TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.nystrom.continual import triton as kernels
from cmab_kernels.nystrom.continual.gradient import function, steps
from cmab_kernels.testing import guarded_results

from .streams import last, step_of

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"

KINDS = ["fixed", "continual", "exact"]
NAMES = ("query", "key", "value", "landmark queries", "landmark keys")


@pytest.fixture(autouse=True)
def margins() -> Iterator[None]:
    """Put results between margins of memory, and check at the end of the test that no kernel wrote to the margins."""
    with guarded_results():
        yield


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the chunks whose gradient Triton computed."""
    found: list[int] = []
    backward = kernels.step_backward

    def counted(step: Any, *arguments: Any) -> Any:
        found.append(step.tokens)
        return backward(step, *arguments)

    monkeypatch.setattr(kernels, "step_backward", counted)
    return found


def _stream(
    kind: str, window: int, length: int, widths: tuple[int, int, int] = (3, 6, 5), size: float = 1.0, batch: int = 2
) -> list[Tensor]:
    """Return the query, key and value tokens of a few streams, and fixed landmarks, with gradients."""
    landmarks, width, value_width = widths
    inputs = [torch.randn(batch, 1, window + length, columns) for columns in (width, width, value_width)]
    inputs += [torch.randn(1, landmarks, width) for _ in range(2)] if kind == "fixed" else []
    inputs[1] *= size
    return [t.double().requires_grad_() for t in inputs]


def _start(kind: str, inputs: list[Tensor], window: int, landmarks: int = 3) -> Any:
    first = [t[:, :, :window] for t in inputs[:3]]
    if kind == "exact":
        return ck.continual_attention_init(*first)
    if kind == "continual":
        return ck.continual_nystrom_init(*first, num_landmarks=landmarks)
    return ck.continual_nystrom_init(*first, landmarks=(inputs[3], inputs[4]))


def _loss(
    kind: str, inputs: list[Tensor], window: int, impl: str, chunk: int, output: str = "single", landmarks: int = 3
) -> Tensor:
    """Return a loss of the outputs of all steps, and of the rings of the last state."""
    state, total = _start(kind, inputs, window, landmarks), torch.zeros((), dtype=inputs[0].dtype)
    for i, parts in enumerate(zip(*(t[:, :, window:].split(chunk, 2) for t in inputs[:3]), strict=True)):
        out, state = step_of(state)(state, *parts, impl=impl, output=output)
        total = total + (out * torch.linspace(-1, 1 + i, out.numel()).view_as(out)).sum() + out.square().sum()
    rings = ck.state_to_tensors(state)
    return total + rings["queries"].square().sum() + (rings["keys"] * rings["values"][..., :1]).sum()


def _close(ours: Any, wanted: Any, tolerance: float = 1e-12) -> None:
    for name, a, b in zip(NAMES, ours, wanted, strict=False):
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1), name
    assert len(ours) == len(wanted)


def _compare(kind: str, inputs: list[Tensor], window: int, chunk: int, output: str, landmarks: int = 3) -> None:
    ours, wanted = (
        torch.autograd.grad(_loss(kind, inputs, window, impl, chunk, output, landmarks), inputs)
        for impl in ("triton", "reference")
    )
    _close(ours, wanted)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("kind, output", [("fixed", "single"), ("continual", "retroactive"), ("exact", "single")])
def test_a_chain_of_steps(kind: str, output: str, size: float, chunk: int, fused: list[int]) -> None:
    """All tokens of the first window leave, and the rings wrap. Sums of large logits are recomputed often."""
    _compare(kind, _stream(kind, 5, 9, size=size), 5, chunk, output)
    assert sum(fused) == 9


@pytest.mark.parametrize("kind, output", [("fixed", "retroactive"), ("continual", "single")])
def test_other_kinds_of_nystrom_steps(kind: str, output: str, fused: list[int]) -> None:
    """The segments of 7 tokens for 3 landmarks differ in length, and parts end with them."""
    _compare(kind, _stream(kind, 7, 12), 7, 12, output)
    assert sum(fused) == 12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "window, widths",
    [(1, (1, 1, 1)), (21, (19, 9, 70)), (40, (5, 70, 3))],
    ids=["one of everything", "tiles of rows and of values", "tiles of keys and of the window"],
)
def test_shapes(window: int, widths: tuple[int, int, int], kind: str, fused: list[int]) -> None:
    _compare(kind, _stream(kind, window, 3, widths, batch=1), window, 2, "single", widths[0])
    assert sum(fused) == 3


@pytest.mark.parametrize("size", [1e3, 1e6, 1e15])
def test_huge_logits(size: float, fused: list[int]) -> None:
    """Where a logit cannot be subtracted reliably, every row is recomputed. Weights are then 0 or 1, or shared by equal
    keys, and so are gradients of values."""
    key = torch.tensor([1.0, -1, 1, 1, -1, 1, -1, -1, -1, 1]).double().view(1, 1, 10, 1) * size
    one, value = torch.ones_like(key), torch.randn_like(key).requires_grad_()
    found = []
    for impl in ("triton", "reference"):
        tokens = [t[:, :, :4] for t in (one, key, value)]
        state = ck.continual_nystrom_init(*tokens, landmarks=(one[:, 0, :1],) * 2, scale=1.0)
        out, _ = last(state, tuple(t[:, :, 4:] for t in (one, key, value)), 2, impl=impl)
        found.append(torch.autograd.grad(out.sum(), value))
    _close(*found)
    assert sum(fused) == 6


def test_rows_slide_and_are_recomputed() -> None:
    """The comparisons above would prove little if all rows were recomputed, or none."""
    kept: list[Tensor] = []
    recorded = kernels.continual_nystrom_recorded_step

    def keep(*arguments: Any) -> Any:
        result, history = recorded(*arguments)
        kept.append(history[..., -1])
        return result, history

    inputs = _stream("fixed", 5, 9, size=30.0)
    with mock.patch.object(kernels, "continual_nystrom_recorded_step", keep):
        _loss("fixed", inputs, 5, "triton", 4)
    assert kept[0][:, :, :3].eq(1).all(), "the first window came from the definition"
    later = torch.cat(kept, 2)[:, :, 3:]
    assert later.eq(0).any() and later.eq(1).any()


@pytest.mark.parametrize("kind", ["fixed", "retroactive", "continual", "exact"])
def test_second_derivatives(kind: str) -> None:
    output = "retroactive" if kind == "retroactive" else "single"
    kind = "fixed" if kind == "retroactive" else kind
    inputs = _stream(kind, 4, 6, batch=1)

    def second(impl: str) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(_loss(kind, inputs, 4, impl, 2, output), inputs, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), inputs)

    _close(second("triton"), second("reference"), 1e-11)


def test_truncated_backpropagation(fused: list[int]) -> None:
    """A state without its graph is a constant, also if later steps get new landmarks."""
    inputs = _stream("fixed", 5, 9)
    new = [t.detach().clone().requires_grad_() for t in inputs[3:]]

    def gradients(impl: str, swapped: bool) -> tuple[Tensor, ...]:
        _, state = last(_start("fixed", inputs, 5), tuple(t[:, :, 5:9] for t in inputs[:3]), 2, impl=impl)
        state = type(state)._make(f.detach() if isinstance(f, Tensor) else f for f in state)
        if swapped:
            near, far = (t[None].expand(2, -1, -1, -1).contiguous() for t in new)
            state = state._replace(landmark_queries=near, landmark_keys=far)
        out, _ = last(state, tuple(t[:, :, 9:] for t in inputs[:3]), 3, impl=impl)
        return torch.autograd.grad(out.square().sum(), [*inputs[:3], *new][: 5 if swapped else 3])

    for swapped in (False, True):
        _close(gradients("triton", swapped), gradients("reference", swapped))
    assert fused


@pytest.mark.parametrize("field", ["queries", "keys", "values", "sums", "landmark_queries", "landmark_keys", "inverse"])
def test_a_state_whose_field_was_replaced(field: str) -> None:
    """The gradient is that of the definition, whatever a caller does to a state between two steps. A loss may read a
    state on the way."""
    inputs = _stream("fixed", 5, 6, batch=1)
    leaf: list[Tensor] = []

    def gradients(impl: str) -> tuple[Tensor, ...]:
        _, state = last(_start("fixed", inputs, 5), tuple(t[:, :, 5:8] for t in inputs[:3]), impl=impl)
        if not leaf:
            leaf.append(getattr(state, field).detach().clone().requires_grad_())
        way = sum((i + 1) * t.square().sum() for i, t in enumerate(list(ck.state_to_tensors(state).values())[:3]))
        state = state._replace(**{field: leaf[0]})
        out, _ = last(state, tuple(t[:, :, 8:] for t in inputs[:3]), 3, impl=impl, output="retroactive")
        found = torch.autograd.grad(out.square().sum() + way, [*inputs, *leaf], allow_unused=True)
        return tuple(torch.zeros(()) if g is None else g for g in found)

    _close(gradients("triton"), gradients("reference"))


def test_streams_at_other_positions(fused: list[int]) -> None:
    """A step with a mask runs the definition, and leaves rows that are one token behind."""
    inputs, absent = _stream("fixed", 5, 8), torch.tensor([True, False])

    def gradients(impl: str) -> tuple[Tensor, ...]:
        tokens = tuple(t[:, :, 5:] for t in inputs[:3])
        _, state = last(_start("fixed", inputs, 5), tuple(t[:, :, :3] for t in tokens), impl=impl)
        _, state = ck.continual_nystrom_step(state, *(t[:, :, 3:4] for t in tokens), key_padding_mask=absent, impl=impl)
        out, _ = last(state, tuple(t[:, :, 4:] for t in tokens), 2, impl=impl)
        return torch.autograd.grad(out.square().sum(), inputs)

    _close(gradients("triton"), gradients("reference"))
    assert sum(fused) == 7


@pytest.mark.parametrize("output", ["single", "retroactive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_narrow_types(dtype: torch.dtype, output: str) -> None:
    """The error is at most a small multiple of that of the definition in the same type."""
    inputs = [t.detach().to(dtype).requires_grad_() for t in _stream("fixed", 5, 8)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    wanted = torch.autograd.grad(_loss("fixed", exact, 5, "reference", 4, output), exact)
    error = []
    for impl in ("triton", "reference"):
        found = torch.autograd.grad(_loss("fixed", inputs, 5, impl, 4, output), inputs)
        assert all(g.dtype == dtype for g in found)
        error.append([(a.double() - b).abs().max() / b.abs().max() for a, b in zip(found, wanted, strict=True)])
    assert all(ours <= 3 * theirs + 4 * torch.finfo(dtype).eps for ours, theirs in zip(*error, strict=True))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns first": lambda t: t.mT.contiguous().mT,
    "step 2": lambda t: t.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_no_bit(layout: str) -> None:
    """The layouts of the tokens and of the gradient of the outputs change no bit."""
    inputs = [t.detach() for t in _stream("fixed", 5, 3)]
    slope = torch.randn(2, 1, 3, 5, dtype=torch.float64)

    def gradients(arranged: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = [arranged(t[:, :, 5:]).requires_grad_() for t in inputs[:3]]
        out, _ = ck.continual_nystrom_step(_start("fixed", inputs, 5), *leaves, impl="triton")
        return torch.autograd.grad(out, leaves, arranged(slope))

    _close(gradients(LAYOUTS[layout]), gradients(lambda t: t), 0.0)


def test_a_recorded_step_changes_nothing_that_is_kept() -> None:
    """The same step may be taken twice and differentiated twice, and later steps do not write to what it read."""
    inputs = _stream("fixed", 5, 3)
    token = tuple(t[:, :, 5:6] for t in inputs[:3])
    _, state = ck.continual_nystrom_step(_start("fixed", inputs, 5), *token, impl="triton")
    before = [f.detach().clone() for f in state if isinstance(f, Tensor)]
    out, after = ck.continual_nystrom_step(state, *token, impl="triton")
    again, _ = ck.continual_nystrom_step(state, *token, impl="triton")
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    assert not function.native() or not function.native().is_sole_owner(after)
    with torch.no_grad():
        last(type(after)._make(f.detach() if isinstance(f, Tensor) else f for f in after), token, impl="triton")
        last(after, tuple(t[:, :, 5:] for t in inputs[:3]), impl="triton")
    _close(torch.autograd.grad(out.sum(), inputs, retain_graph=True), first, 0.0)
    _close(torch.autograd.grad(again.sum(), inputs), first, 0.0)
    fields = [f for f in state if isinstance(f, Tensor)]
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(fields, before, strict=True)) if i != 4)  # spare
    with torch.no_grad():
        assert torch.equal(ck.continual_nystrom_step(state, *token, impl="triton").out, out)


@pytest.mark.parametrize("why", ["mask", "wide values", "retroactive exact", "exact pinv", "transform", "reference"])
def test_what_runs_the_definition(why: str, fused: list[int]) -> None:
    inputs = _stream("continual", 5, 1, (3, 6, 513 if why == "wide values" else 5))
    state = _start("exact" if why == "retroactive exact" else "continual", inputs, 5)
    options: dict[str, Any] = {"impl": "reference" if why in ("reference", "exact pinv") else "triton"}
    options |= {"key_padding_mask": torch.tensor([True, False])} if why == "mask" else {}
    options |= {"output": "retroactive"} if why == "retroactive exact" else {}
    if why == "exact pinv":
        state = ck.continual_nystrom_init(*(t[:, :, :5] for t in inputs), num_landmarks=3, pinv="exact")
    token = [t[:, :, 5:] for t in inputs]

    def loss(query: Tensor) -> Tensor:
        return step_of(state)(state, query, *token[1:], **options).out.nan_to_num().sum()

    if why == "transform":
        torch.func.grad(loss)(token[0])
    else:
        torch.autograd.grad(loss(token[0]), inputs)
    assert not fused


def test_who_is_asked() -> None:
    """Triton runs by its name, after the checks. "auto" runs native code on a CPU."""
    inputs = _stream("fixed", 5, 1)
    state, token = _start("fixed", inputs, 5), [t[:, :, 5:] for t in inputs[:3]]
    asked = {
        (impl, checked): steps._supporting(state, *token, impl, checked)
        for impl in ("auto", "native", "triton", "cuda", "reference")
        for checked in (False, True)
    }
    assert asked.pop(("triton", True)) is kernels
    assert all(asked.pop((impl, checked)) is function.native() for impl in ("auto", "native") for checked in (0, 1))
    assert set(asked.values()) == {None}
    with pytest.raises(ValueError, match="value: got shape"):
        ck.continual_nystrom_step(state, *token[:2], token[2][..., :3], impl="triton")
