"""Steps that record a gradient: those with a fused backward pass have the gradients of the definition, of any order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cmab_kernels as ck
from cmab_kernels.nystrom.continual.gradient import steps
from cmab_kernels.runtime.backends import imported

from .streams import last, step_of
from .test_native_refusals import BAD_LANDMARKS, BAD_STATES, BAD_TOKENS

pytestmark = pytest.mark.skipif(imported("nystrom.continual", "native") is None, reason="native code was not built")

N, LANDMARKS, WIDTH, VALUES = 9, 3, 6, 5


def _inputs(length: int, dtype: torch.dtype = torch.float64, size: float = 1.0, window: int = N) -> list[Tensor]:
    """Return the query, key and value tokens of two streams of two heads, and landmarks for each head."""
    tokens = [torch.randn(2, 2, window + length, width) for width in (WIDTH, WIDTH, VALUES)]
    landmarks = [torch.randn(2, LANDMARKS, WIDTH) for _ in range(2)]
    tokens[1] *= size
    return [t.to(dtype).requires_grad_() for t in (*tokens, *landmarks)]


def _start(inputs: list[Tensor], window: int = N, fixed: bool = True) -> Any:
    query, key, value = (t[:, :, :window] for t in inputs[:3])
    if not fixed:
        return ck.continual_nystrom_init(query, key, value, LANDMARKS)
    return ck.continual_nystrom_init(query, key, value, landmarks=(inputs[3], inputs[4]))


def _loss(
    inputs: list[Tensor], impl: str, chunk: int = 1, window: int = N, fixed: bool = True, output: str = "single"
) -> Tensor:
    """Return a loss of the outputs of all steps."""
    state, total = _start(inputs, window, fixed), torch.zeros((), dtype=inputs[0].dtype)
    for i, parts in enumerate(zip(*(t[:, :, window:].split(chunk, 2) for t in inputs[:3]), strict=True)):
        out, state = step_of(state)(state, *parts, impl=impl, output=output)
        total = total + (out * torch.linspace(-1, 1 + i, out.numel()).view_as(out)).sum() + out.square().sum()
    return total


def _close(ours: Any, wanted: Any, tolerance: float = 1e-12) -> None:
    for a, b in zip(ours, wanted, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the chunks that were stepped with a fused backward pass."""
    found: list[int] = []

    def counting(part: Callable[..., Any]) -> Callable[..., Any]:
        def counted(code: Any, state: Any, query: Tensor, *others: Any) -> Any:
            found.append(query.shape[2])
            return part(code, state, query, *others)

        return counted

    for name in ("_nystrom_part", "attention_step"):
        monkeypatch.setattr(steps, name, counting(getattr(steps, name)))
    return found


@pytest.mark.parametrize("chunk", [1, 4, 9, 25])
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("window", [3, 9, 40])
def test_a_chain_of_steps(chunk: int, size: float, window: int, fused: list[int]) -> None:
    """In 50 steps, all tokens of the first window leave. Sums of large logits are recomputed often."""
    inputs = _inputs(50, size=size, window=window)
    ours = torch.autograd.grad(_loss(inputs, "auto", chunk, window), inputs)
    assert sum(fused) == 50
    _close(ours, torch.autograd.grad(_loss(inputs, "reference", chunk, window), inputs))


@pytest.mark.parametrize("chunk", [1, 4, 25])
@pytest.mark.parametrize("output", ["single", "retroactive"])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("window", [3, 11])
def test_every_kind_of_nystrom_step(window: int, fixed: bool, output: str, chunk: int, fused: list[int]) -> None:
    """Segments of 11 tokens for three landmarks differ in length."""
    inputs = _inputs(50, window=window)
    leaves = inputs[: 5 if fixed else 3]
    ours = torch.autograd.grad(_loss(inputs, "auto", chunk, window, fixed, output), leaves)
    assert sum(fused) == 50
    _close(ours, torch.autograd.grad(_loss(inputs, "reference", chunk, window, fixed, output), leaves))


@pytest.mark.parametrize("chunk", [1, 4, 25])
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("window", [1, 3, 11])
def test_exact_attention(window: int, size: float, chunk: int, fused: list[int]) -> None:
    inputs = _inputs(50, size=size, window=window)
    ours = torch.autograd.grad(_attention_loss(inputs, "auto", chunk, window), inputs[:3])
    assert sum(fused) == 50
    _close(ours, torch.autograd.grad(_attention_loss(inputs, "reference", chunk, window), inputs[:3]))


def _attention_loss(inputs: list[Tensor], impl: str, chunk: int, window: int) -> Tensor:
    state = ck.continual_attention_init(*(t[:, :, :window] for t in inputs[:3]))
    total = torch.zeros((), dtype=torch.float64)
    for i, parts in enumerate(zip(*(t[:, :, window:].split(chunk, 2) for t in inputs[:3]), strict=True)):
        out, state = ck.continual_attention_step(state, *parts, impl=impl)
        total = total + (out * torch.linspace(-1, 1 + i, out.numel()).view_as(out)).sum() + out.square().sum()
    return total + ck.state_to_tensors(state)["queries"].square().sum()


@pytest.mark.parametrize("kind", ["fixed", "retroactive", "continual", "exact"])
def test_second_derivatives(kind: str) -> None:
    """Tokens leave the window, and all tokens and landmarks have gradients."""
    inputs = _inputs(8, window=5)
    leaves = inputs[: 5 if kind in ("fixed", "retroactive") else 3]

    def loss(impl: str) -> Tensor:
        if kind == "exact":
            return _attention_loss(inputs, impl, 2, 5)
        return _loss(inputs, impl, 2, 5, kind != "continual", "retroactive" if kind == "retroactive" else "single")

    def second(impl: str) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(loss(impl), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)  # type: ignore[arg-type]

    _close(second("auto"), second("reference"), 1e-11)


def test_truncated_backpropagation(fused: list[int]) -> None:
    """A state without its graph is a constant, also if later steps get new landmarks."""
    inputs = _inputs(30)
    new = [t.detach().clone().requires_grad_() for t in inputs[3:]]

    def gradients(impl: str, swapped: bool) -> tuple[Tensor, ...]:
        state = _start(inputs)
        tokens = tuple(t[:, :, N:] for t in inputs[:3])
        _, state = last(state, tuple(t[:, :, :12] for t in tokens), 2, impl=impl)
        state = type(state)._make(f.detach() if isinstance(f, Tensor) else f for f in state)
        if swapped:
            near, far = (t[None].expand(2, -1, -1, -1).contiguous() for t in new)
            state = state._replace(landmark_queries=near, landmark_keys=far)
        out, _ = last(state, tuple(t[:, :, 12:] for t in tokens), 3, impl=impl)
        return torch.autograd.grad(out.square().sum(), [*inputs[:3], *new][: 5 if swapped else 3])

    for swapped in (False, True):
        _close(gradients("auto", swapped), gradients("reference", swapped))
    assert fused


@pytest.mark.parametrize("field", ["keys", "values", "sums", "landmark_queries", "landmark_keys", "inverse"])
def test_a_state_whose_field_was_replaced(field: str) -> None:
    """The gradient is that of the definition, whatever a caller does to a state between two steps."""
    inputs = _inputs(12)
    leaf: list[Tensor] = []

    def gradients(impl: str) -> tuple[Tensor, ...]:
        tokens = tuple(t[:, :, N:] for t in inputs[:3])
        _, state = last(_start(inputs), tuple(t[:, :, :5] for t in tokens), impl=impl)
        if not leaf:
            leaf.append(getattr(state, field).detach().clone().requires_grad_())
        state = state._replace(**{field: leaf[0]})
        out, _ = last(state, tuple(t[:, :, 5:] for t in tokens), 3, impl=impl)
        found = torch.autograd.grad(out.square().sum(), [*inputs, *leaf], allow_unused=True)
        return tuple(torch.zeros(()) if g is None else g for g in found)

    _close(gradients("auto"), gradients("reference"))


def test_gradients_of_a_state(fused: list[int]) -> None:
    """A loss may read the rings of the last state, and of a state on the way."""
    inputs = _inputs(14)

    def gradients(impl: str) -> tuple[Tensor, ...]:
        state, total = _start(inputs), torch.zeros((), dtype=torch.float64)
        for i in range(14):
            out, state = ck.continual_nystrom_step(state, *(t[:, :, N + i : N + i + 1] for t in inputs[:3]), impl=impl)
            if i in (5, 13):
                rows = torch.arange(N + i + 1 - N, N + i + 1) % state.keys.shape[2]
                total = total + sum(ring[:, :, rows].square().sum() * (j + 1) for j, ring in enumerate(state[:3]))
        return torch.autograd.grad(total + out.sum(), inputs)

    _close(gradients("auto"), gradients("reference"))
    assert sum(fused) == 14


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpoint(reentrant: bool) -> None:
    inputs = _inputs(12)

    def run(*given: Tensor) -> Tensor:
        return _loss([*given], "auto", 4)

    checkpoint(run, *inputs, use_reentrant=reentrant).backward()
    _close([t.grad for t in inputs], torch.autograd.grad(_loss(inputs, "auto", 4), inputs), 0.0)


def test_streams_at_other_positions(fused: list[int]) -> None:
    """A step with a mask runs the definition, and leaves rows that are one token behind."""
    inputs = _inputs(20)
    absent = torch.tensor([True, False])

    def gradients(impl: str) -> tuple[Tensor, ...]:
        tokens = tuple(t[:, :, N:] for t in inputs[:3])
        _, state = last(_start(inputs), tuple(t[:, :, :3] for t in tokens), impl=impl)
        _, state = ck.continual_nystrom_step(state, *(t[:, :, 3:4] for t in tokens), key_padding_mask=absent, impl=impl)
        out, _ = last(state, tuple(t[:, :, 4:] for t in tokens), 5, impl=impl)
        return torch.autograd.grad(out.square().sum(), inputs)

    _close(gradients("auto"), gradients("reference"))
    assert sum(fused) == 19


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    """The error is at most a small multiple of that of the definition in the same type."""
    exact = _inputs(20)
    inputs = [t.detach().to(dtype).requires_grad_() for t in exact]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    wanted = torch.autograd.grad(_loss(exact, "reference", 4), exact)
    error = [
        [(a.double() - b).abs().max() / b.abs().max() for a, b in zip(found, wanted, strict=True)]
        for found in (torch.autograd.grad(_loss(inputs, impl, 4), inputs) for impl in ("auto", "reference"))
    ]
    assert all(ours <= 3 * theirs + 4 * torch.finfo(dtype).eps for ours, theirs in zip(*error, strict=True))


def test_a_batch_of_gradients() -> None:
    inputs = _inputs(5)
    out, _ = last(_start(inputs), tuple(t[:, :, N:] for t in inputs[:3]), 5)
    given = torch.randn(3, *out.shape, dtype=out.dtype)
    many = torch.autograd.grad(out, inputs, given, is_grads_batched=True, retain_graph=True)
    for i, one in enumerate(given):
        _close([g[i] for g in many], torch.autograd.grad(out, inputs, one, retain_graph=True))


def test_a_recorded_step_changes_nothing_that_is_kept() -> None:
    """The state before and the token do not change: the same step may be taken twice, and differentiated twice."""
    inputs = _inputs(3)
    token = tuple(t[:, :, N : N + 1] for t in inputs[:3])
    _, state = ck.continual_nystrom_step(_start(inputs), *token)
    before = [f.detach().clone() for f in state if isinstance(f, Tensor)]
    out, after = ck.continual_nystrom_step(state, *token)
    again, _ = ck.continual_nystrom_step(state, *token)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    with torch.no_grad():
        last(after, tuple(t[:, :, N:] for t in inputs[:3]))
    _close(torch.autograd.grad(out.sum(), inputs, retain_graph=True), first, 0.0)
    _close(torch.autograd.grad(again.sum(), inputs), first, 0.0)
    fields = [f for f in state if isinstance(f, Tensor)]
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(fields, before, strict=True)) if i != 4)  # spare
    with torch.no_grad():
        plain = ck.continual_nystrom_step(state, *token).out
    assert torch.equal(plain, out)


def test_a_token_that_is_not_finite() -> None:
    inputs = _inputs(1)
    token = [t[:, :, N:].detach().clone().requires_grad_() for t in inputs[:3]]
    with torch.no_grad():
        token[1][0, 0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="key: got a NaN or an infinity"):
        ck.continual_nystrom_step(_start(inputs), *token)


def _outcome(step: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return step(*arguments[:-1], output=arguments[-1]).out.shape
    except (ValueError, TypeError, RuntimeError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", ["fixed", "continual", "exact"])
def test_errors_are_those_of_other_steps(kind: str) -> None:
    """An argument that is not allowed raises the same error whether the step records a gradient or not."""
    inputs = [t.detach() for t in _inputs(2)]
    state = _start(inputs, fixed=kind == "fixed")
    if kind == "exact":
        state = ck.continual_attention_init(*(t[:, :, :N] for t in inputs[:3]))
    tokens = [t[:, :, N:] for t in inputs[:3]]

    def both(given: Any, tokens: list[Any], name: str) -> None:
        step: Any = ck.continual_attention_step if kind == "exact" else ck.continual_nystrom_step
        recorded = [
            t.detach().requires_grad_() if isinstance(t, Tensor) and t.dtype.is_floating_point else t for t in tokens
        ]
        for output in ("single", "retroactive", "all"):
            wanted = _outcome(step, given, *tokens, output)
            assert _outcome(step, given, *recorded, output) == wanted, (name, output)

    for name, odd in (BAD_STATES if kind == "exact" else BAD_STATES | BAD_LANDMARKS).items():
        both(odd(state), tokens, name)
    for name, bad in BAD_TOKENS.items():
        for place in range(3):
            both(state, [bad(t) if i == place else t for i, t in enumerate(tokens)], f"{name} {place}")


@pytest.mark.parametrize("kind", ["reference", "mode", "mask", "exact pinv", "transform", "forward mode"])
def test_what_runs_the_definition(kind: str, fused: list[int]) -> None:
    inputs = _inputs(1)
    state = _start(inputs)
    options: dict[str, Any] = {"impl": "reference"} if kind == "reference" else {}
    options |= {"key_padding_mask": torch.tensor([True, False])} if kind == "mask" else {}
    token = [t[:, :, N:] for t in inputs[:3]]
    if kind == "exact pinv":
        state = ck.continual_nystrom_init(*(t[:, :, :N] for t in inputs[:3]), num_landmarks=LANDMARKS, pinv="exact")

    def run(query: Tensor) -> Tensor:
        return ck.continual_nystrom_step(state, query, *token[1:], **options).out

    with FlopCounterMode(display=False) if kind == "mode" else contextlib.nullcontext():
        if kind == "transform":
            torch.func.grad(lambda query: run(query).sum())(token[0])
        elif kind == "forward mode":
            torch.func.jvp(run, (token[0],), (token[0],))
        else:
            assert run(token[0]).requires_grad
    assert not fused


@pytest.mark.parametrize("size", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_landmark_whose_logits_rise_far(dtype: torch.dtype, size: float) -> None:
    """The sums of the landmark that it replaces underflow. Windows of up to 4 tokens are always recomputed."""
    window, values = torch.zeros(1, 1, 5, 1, dtype=dtype), torch.tensor([0.0, 0, 0, 0, 5], dtype=dtype).requires_grad_()
    state = ck.continual_nystrom_init(window, window, window, num_landmarks=1, scale=1.0)
    for value in values:
        token = torch.full((1, 1, 1, 1), size, dtype=dtype)
        out, state = ck.continual_nystrom_step(state, token, token, value.view(1, 1, 1, 1))
    (gradient,) = torch.autograd.grad(out.sum(), values)
    torch.testing.assert_close(gradient, torch.full_like(gradient, 0.2))
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("name", ["continual step", "nystrom_attention"])
def test_second_derivatives_under_autocast(name: str) -> None:
    """The formula of the gradient runs in the dtypes of the kernel, whatever autocast does."""
    window, tokens = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 7, 4, requires_grad=True)

    def out() -> Tensor:
        if name == "nystrom_attention":
            return ck.nystrom_attention(tokens, tokens, tokens, 3)
        state = ck.continual_attention_init(window, window, window)
        return ck.continual_attention_step(state, tokens, tokens, tokens).out

    with torch.autocast("cpu", torch.bfloat16):
        (first,) = torch.autograd.grad(out().float().square().sum(), tokens, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), tokens)
    (first,) = torch.autograd.grad(out().square().sum(), tokens, create_graph=True)
    (right,) = torch.autograd.grad(first.square().sum(), tokens)
    assert (found - right).norm() < 0.1 * right.norm()
