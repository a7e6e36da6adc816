"""Continual attention, one step at a time: the public functions for streams."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.backends import check_name, choose, imported
from ...runtime.checks import (
    as_autocast,
    as_they_are,
    autocasts,
    check_choice,
    check_dense,
    check_key_value,
    check_operands,
    fixed,
    kind_of,
    mismatch,
    refuse_not_finite,
)
from ...runtime.dtypes import default_scale, state_dtype
from ...runtime.setting import now
from ...runtime.tracing import as_row, extent, is_observed, is_profiled
from ..api import check_pinv, choose_landmarks, iterative_pinv
from ..reference import landmark_kernel, pinv_reference
from .gradient import recorded_step
from .reference import row_sums
from .schema import StepOperator, attention_step_op, carries_gradient, form_of, is_differentiated_step, nystrom_step_op
from .state import EXTRA_SUMS, ContinualAttentionState, ContinualNystromState, StepResult, check_state, remembered

OUTPUTS = ("single", "retroactive")
FAST = ("auto", "native")
"""The values of `impl` with which a step may take the fast path: native code, without checks in Python."""


def continual_nystrom_init(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_landmarks: int | None = None,
    *,
    landmarks: tuple[Tensor, Tensor] | None = None,
    pinv: str = "iterative",
    pinv_iterations: int = 6,
    scale: float | None = None,
) -> ContinualNystromState:
    """Return the state of continual Nyström attention after its first full window of n tokens.

    Args:
        query: (B, H, n, D). float64, float32, bfloat16 or float16; oldest token first.
        key: (B, H, n, D).
        value: (B, H, n, E).
        num_landmarks: m, 1 <= m <= n, for continual landmarks: the means of m segments of the window. A segment is
            complete every n / m tokens. Its mean then replaces the oldest landmark. When m does not divide n, the first
            `n % m` segments of each n tokens have one token more.
        landmarks: fixed landmarks (q~, k~), in place of `num_landmarks`. Each is (H, m, D) or (B, H, m, D).
        pinv, pinv_iterations, scale: as in `nystrom_attention`.

    Returns:
        A `ContinualNystromState`, differentiable in all inputs.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.

    Source: Continual Low-Rank Scaled Dot-product Attention (Carreto Picon et al.), section 3.

    >>> tokens = torch.randn(1, 4, 64, 16)
    >>> state = cmab_kernels.continual_nystrom_init(tokens, tokens, tokens, num_landmarks=8)
    >>> state.sums.shape, state.position
    (torch.Size([1, 4, 8, 21]), tensor([[64, 64, 64, 64]]))
    """
    query, key, value = _window(query, key, value)
    iterations = check_pinv(pinv, pinv_iterations)
    if pinv == "shared":
        raise ValueError(
            mismatch(
                "pinv", repr(pinv), "'iterative' or 'exact', because the streams of a batch do not depend on each other"
            )
        )
    with as_they_are(key.device):
        chosen = choose_landmarks(query, key, num_landmarks, landmarks, None)
        if landmarks is not None:
            if chosen.queries.shape[2] > key.shape[2]:
                allowed = f"at most {key.shape[2]}, the tokens of the window"
                raise ValueError(mismatch("landmarks[0]", f"{chosen.queries.shape[2]} landmarks", allowed))
            refuse_not_finite(**{"landmarks[0]": chosen.queries, "landmarks[1]": chosen.keys})
        factor = _scale(scale, key)
        gamma = landmark_kernel(chosen.queries, chosen.keys, None, factor)
        inverse = iterative_pinv(gamma, iterations) if iterations else pinv_reference(gamma, 0)
        sums = row_sums(chosen.queries, key, value, factor)
        # The caller may change its own tensors.
        own = (t.clone(memory_format=torch.contiguous_format) for t in (chosen.queries, chosen.keys))
        given: Any = (*own, inverse.contiguous())
        counts = (*_counts(factor, key), iterations, int(num_landmarks is None))
        return remembered(
            ContinualNystromState._make([*_rings(query, key, value), sums, torch.empty_like(sums), *given, *counts])
        )


def continual_nystrom_step(
    state: ContinualNystromState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    output: str = "single",
    impl: str = "auto",
) -> StepResult[ContinualNystromState]:
    """Advance the window by t >= 1 tokens. Each token costs O(m (D + E)), for a window of any length.

    Every landmark keeps its sums over the window with a log-scale. A step adds the new token and subtracts the oldest.
    The sums are recomputed from the window every 1,024 tokens. They are also recomputed when subtraction would lose
    digits: when the sum, or the size of its values, falls below half of its largest value so far (its peak). So the
    error stays bounded for finite logits of any size and streams of any length.

    Args:
        state: from `continual_nystrom_init` or an earlier step. The state does not change while you keep it, or keep a
            view of one of its tensors. A step reuses the memory of a state if the library made the state and only the
            caller's state holds its tensors (torch counts the references to a tensor and its storage). Otherwise the
            step copies the window. So delete older states, and clone a tensor that you take out of a state.
        query: (B, H, t, D), in the dtype of the state's window, any strides.
        key: (B, H, t, D).
        value: (B, H, t, E).
        key_padding_mask: (B,) bool, True where a row of the batch has no token in this step. Such a row keeps its state
            bit for bit, and its outputs are NaN. Its entries in query, key and value are not read. Then t <= n.
        output: "single": one output for each of the t tokens, over the window that ends with the token. "retroactive":
            the outputs of all n tokens of the window after the last token.
        impl: "auto", "reference", "native", "cuda" or "triton". A step that runs under a transform such as vmap always
            runs "reference", which costs O(n m) per token. A step that records a gradient does so too, unless it has
            no mask and "auto", "native" (on a CPU) or "triton" (on a GPU) has a fused backward pass for it.

    Returns:
        `StepResult(out, state)`, out in the dtype of query. Between replacements, continual landmarks lag behind the
        segment means of the window: a stream equals `nystrom_attention` with the same landmarks, not with the current
        segment means.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it, and the
            state is unchanged. Tokens must be finite. On a GPU this is not checked, because a check would synchronise.
            There, outputs are NaN while the window holds a token that is not finite.
        RuntimeError: `impl` cannot run here.

    While a CUDA graph is captured, a step updates the state in place and returns it. Each replay then takes the next
    step.

    >>> tokens = torch.randn(1, 4, 100, 16)
    >>> first, rest = tokens.split([64, 36], dim=2)
    >>> state = cmab_kernels.continual_nystrom_init(first, first, first, num_landmarks=8)
    >>> for token in rest.split(1, dim=2):
    ...     out, state = cmab_kernels.continual_nystrom_step(state, token, token, token)
    >>> out.shape, state.position
    (torch.Size([1, 4, 1, 16]), tensor([[100, 100, 100, 100]]))
    """
    if key_padding_mask is not None:
        return _masked(nystrom_step_op, ContinualNystromState, state, query, key, value, key_padding_mask, output, impl)
    return _step(nystrom_step_op, ContinualNystromState, state, query, key, value, output, impl)


def continual_attention_init(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None
) -> ContinualAttentionState:
    """Return the state of exact continual attention after its first full window of n tokens.

    Exact attention is the baseline for continual Nyström attention.

    Arguments and errors are those of `continual_nystrom_init`.

    >>> tokens = torch.randn(1, 4, 64, 16)
    >>> cmab_kernels.continual_attention_init(tokens, tokens, tokens).keys.shape
    torch.Size([1, 4, 65, 16])
    """
    query, key, value = _window(query, key, value)
    with as_they_are(key.device):
        none = key.new_zeros(*key.shape[:2], 0, value.shape[-1] + EXTRA_SUMS, dtype=state_dtype(key.dtype))
        parts = [*_rings(query, key, value), none, none.clone(), *_counts(_scale(scale, key), key)]
        return remembered(ContinualAttentionState._make(parts))


def continual_attention_step(
    state: ContinualAttentionState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    output: str = "single",
    impl: str = "auto",
) -> StepResult[ContinualAttentionState]:
    """Advance a window of exact softmax attention by t >= 1 tokens. Each token costs O(n (D + E)), for both kinds of
    output.

    Arguments, results and errors are those of `continual_nystrom_step`. A retroactive step computes the sums of all
    rows, in O(n^2 (D + E)), if it is the first step or follows single steps. Further retroactive steps update the sums,
    and recompute rows as `continual_nystrom_step` does.

    Source: Continual Transformers (Hedegaard et al.), eqs. 2 to 6 of Carreto Picon et al., with a log-scale for each
    row.

    >>> tokens = torch.randn(1, 4, 65, 16)
    >>> first, token = tokens.split([64, 1], dim=2)
    >>> state = cmab_kernels.continual_attention_init(first, first, first)
    >>> out, state = cmab_kernels.continual_attention_step(state, token, token, token)
    >>> window = tokens[:, :, 1:]
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(token, window, window), atol=1e-6)
    True
    """
    if key_padding_mask is not None:
        return _masked(
            attention_step_op, ContinualAttentionState, state, query, key, value, key_padding_mask, output, impl
        )
    return _step(attention_step_op, ContinualAttentionState, state, query, key, value, output, impl)


def _step(
    step: StepOperator, kind: type, state: Any, query: Tensor, key: Tensor, value: Tensor, output: str, impl: str
) -> StepResult:
    """Take a fast path if there is one: native code, which checks its arguments, or a kernel that has already run a
    step of this form.

    Otherwise take the path with checks. That path raises an error or runs the step. If a profiler is on, the step has a
    row in its profile."""
    retroactive = output == "retroactive"
    form = None
    is_seen = is_observed() or is_profiled() or (torch.is_grad_enabled() and carries_gradient(state, query, key, value))
    if is_seen and (recorded := _recorded(state, query, key, value, output, impl)):
        return recorded
    if isinstance(output, str) and isinstance(impl, str) and output in OUTPUTS and not is_seen:
        named = now().impl if impl == "auto" else impl  # a compiler does not trace this branch
        if named in FAST and (result := _native(step.name)(state, query, key, value, retroactive)) is not None:
            return result
        form = form_of(named, retroactive, state, query, key, value)
        if run := step.ready(form):
            return StepResult._make(run(state, query, key, value, retroactive))
    _check_step(kind, state, query, key, value, output)
    if autocasts(key.device):
        query, key, value = (t.to(state.keys.dtype) for t in (query, key, value))
    with as_they_are(key.device):
        if recorded := _recorded(state, query, key, value, output, impl, checked=True):
            return recorded
        chosen = _choose(state, impl, query, key, value)
        step.remember(form, chosen)
        with as_row(f"cmab::{step.name}"):
            return StepResult(*step(state, query, key, value, retroactive, chosen))


def _recorded(
    state: Any, query: Tensor, key: Tensor, value: Tensor, output: Any, impl: Any, checked: bool = False
) -> StepResult | None:
    """Return the result of a step that records a gradient, if a fused backward pass supports it."""
    if is_observed():
        return None
    if (
        not isinstance(impl, str)
        or not isinstance(output, str)
        or output not in OUTPUTS
        or not torch.is_grad_enabled()
        or not carries_gradient(state, query, key, value)
    ):
        return None
    named = now().impl if impl == "auto" else impl
    result = recorded_step(state, query, key, value, output == "retroactive", named, checked)
    return result and StepResult(*result)


def _masked(
    step: StepOperator,
    kind: type,
    state: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    absent: Any,
    output: str,
    impl: str,
) -> StepResult:
    """Do the same as `_step`, if the rows of the batch that are `absent` have no token."""
    retroactive = output == "retroactive"
    is_seen = is_observed() or is_profiled() or (torch.is_grad_enabled() and carries_gradient(state, query, key, value))
    known = isinstance(output, str) and isinstance(impl, str) and output in OUTPUTS
    if known and not is_seen and (now().impl if impl == "auto" else impl) in FAST:
        result = _native(step.name.replace("_step", "_masked_step"))(state, query, key, value, retroactive, absent)
        if result is not None:
            return result
    _check_step(kind, state, query, key, value, output)
    _check_absent(absent, state, key)
    if autocasts(key.device):
        query, key, value = (t.to(state.keys.dtype) for t in (query, key, value))
    with as_they_are(key.device):
        chosen = _choose(state, impl, query, key, value)
        with as_row(f"cmab::{step.name}"):
            return StepResult(*step.masked(state, query, key, value, retroactive, chosen, absent))


@functools.cache
def _native(name: str) -> Callable[..., Any]:
    """Return the native step, which returns None for arguments that need the path with checks. If native code was not
    built, the step always returns None."""
    native = imported("nystrom.continual", "native")
    return getattr(native, name) if native else lambda *_: None


def _choose(state: Any, impl: str, *tokens: Tensor) -> str:
    """Return the implementation of a step. Only "reference" combines continual landmarks with an exact
    pseudo-inverse."""
    check_name("nystrom.continual", impl)
    if is_differentiated_step(state, *tokens):
        return "reference"
    exact = isinstance(state, ContinualNystromState) and not state.fixed and state.pinv_iterations == 0
    if not exact:
        landmarks = (state.landmark_keys,) if isinstance(state, ContinualNystromState) else ()
        return choose("nystrom.continual", impl, *tokens, *landmarks)
    if impl not in ("auto", "reference"):
        why = 'only "reference" supports continual landmarks with pinv="exact"; use pinv="iterative" or fixed landmarks'
        raise RuntimeError(f"impl: {impl!r} cannot run here: {why}")
    return "reference"


# ---- checks


def _window(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return query, key and value of the first window, checked, and cast if autocast is on."""
    check_operands(query=query, key=key, value=value)
    check_key_value(key, value)
    if query.shape != key.shape:
        raise ValueError(mismatch("query", f"shape {tuple(query.shape)}", f"{tuple(key.shape)}, the shape of key"))
    if key.shape[2] == 0:
        raise ValueError(mismatch("key", "no token", "a first window of n >= 1 tokens"))
    refuse_not_finite(query=query, key=key, value=value)
    return as_autocast(query, key, value)


def _check_step(kind: type, state: Any, query: Tensor, key: Tensor, value: Tensor, output: str) -> None:
    check_choice("output", output, OUTPUTS)
    check_state(state, kind)
    check_operands(query=query, key=key, value=value)
    batch, heads, _, width = state.keys.shape
    for name, tensor, last in (("key", key, width), ("query", query, width), ("value", value, state.values.shape[-1])):
        tokens = key.shape[2] if key.dim() == 4 else 0
        if tokens == 0 or tensor.shape != (batch, heads, tokens, last):
            letter = "E" if name == "value" else "D"
            allowed = f"(B, H, t, {letter}) = ({batch}, {heads}, t, {last}) with t >= 1, as the state has it"
            raise ValueError(mismatch(name, f"shape {tuple(tensor.shape)}", allowed))
        if tensor.device != state.keys.device:
            raise ValueError(
                mismatch(
                    name,
                    f"device {tensor.device}",
                    f"{state.keys.device}, the device of the state; `move_state` moves it",
                )
            )
        if tensor.dtype != state.keys.dtype and not autocasts(tensor.device):
            raise TypeError(
                mismatch(name, tensor.dtype, f"{state.keys.dtype} as the state's window has; cast them alike")
            )


def _check_absent(absent: Any, state: Any, key: Tensor) -> None:
    if not isinstance(absent, Tensor):
        raise TypeError(mismatch("key_padding_mask", kind_of(absent), "a torch.Tensor or None"))
    check_dense("key_padding_mask", absent)
    if absent.dtype != torch.bool or absent.shape != key.shape[:1]:
        given = f"{absent.dtype} {tuple(absent.shape)}"
        raise ValueError(
            mismatch("key_padding_mask", given, f"torch.bool (B,) = ({key.shape[0]},), True where a row has no token")
        )
    if absent.device != key.device:
        raise ValueError(mismatch("key_padding_mask", f"device {absent.device}", f"{key.device}, the device of key"))
    if key.shape[2] > state.window:
        raise ValueError(
            mismatch("key", f"{key.shape[2]} tokens with a key_padding_mask", f"at most {state.window}, the window")
        )
    if key.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            mismatch("key_padding_mask", "a mask", "None while a CUDA graph is captured, where a step writes in place")
        )


# ---- parts of a new state


def _scale(scale: float | None, key: Tensor) -> Tensor:
    """Return the scale of a state: a number in the host's memory, whatever the default device is. A step then reads it
    without waiting."""
    factor = torch.tensor(
        default_scale(key.shape[-1]) if scale is None else fixed(scale), dtype=torch.float64, device="cpu"
    )
    refuse_not_finite(scale=factor)
    return factor


def _rings(*tokens: Tensor) -> Any:
    """Return the rings of a new state. Each ring has one spare row, so a step can write a token without changing the
    state before it."""
    return tuple(F.pad(t, (0, 0, 0, 1)).contiguous() for t in tokens)


def _counts(scale: Tensor, key: Tensor) -> Any:
    batch, heads, length, _ = map(extent, key.shape)
    return scale, torch.full((batch, heads), length, dtype=torch.int64, device=key.device), length
