"""Steps that record a gradient, in O(m (D + E)) for each token: fixed landmarks, single outputs, native code.

The definition recomputes the sums from the window at every token, so its gradient costs O(n m). Here the gradient
flows through the sums, as the step computes them: a token gets the gradient of all later sums when it enters the
window, less that of the sums after it has left. Only a row that the step recomputed reads the window. A recorded step
writes to new memory, because autograd keeps what it read.

The gradient with respect to the tokens and the landmarks of a whole stream is that of the definition. It is so too if
the stream starts from any state: sums that do not come from a recorded step of the same rings and landmarks are
recomputed.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.autograd import gradient_of_formula
from ...runtime.backends import imported
from ...runtime.checks import refuse_not_finite
from ...runtime.tracing import is_observed, may_bypass_dispatcher
from ..reference import logits
from .state import ContinualNystromState, ring_of, window_of


class _Made(NamedTuple):
    """What native code returns for a recorded step."""

    result: tuple[Tensor, ContinualNystromState]
    history: Tensor
    """(B, H, t m, E + 3): after each token, a row of sums: Delta V, phi, the log-scale, and 1 if it was recomputed."""
    keys: Tensor
    """(B, H, r, D): the tokens that left the window, or if a row was recomputed the whole window before the step; then
    the t new tokens."""
    values: Tensor


def records(state: Any, *tokens: Tensor) -> bool:
    """Whether `recorded_step` computes a step that records a gradient. The definition computes all others: under a
    compiler, a tracer, a dispatch mode or a transform, in forward mode, and for subclasses of Tensor."""
    if not isinstance(state, ContinualNystromState) or not state.fixed or is_observed():
        return False
    if state.keys.device.type != "cpu" or state.scale.requires_grad:
        return False
    tensors = [*tokens, *[field for field in state if isinstance(field, Tensor)]]
    return (
        torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors)
        and may_bypass_dispatcher(*tensors)
        and _native() is not None
    )


@functools.cache
def _native() -> Any:
    """Return the module of native code; None if it was not built."""
    return imported("nystrom.continual", "native")


def recorded_step(
    state: ContinualNystromState, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ContinualNystromState]:
    """Return (out, state) with their gradients, for one output of each token."""
    outs = []
    for tokens in zip(*(token.split(state.window, 2) for token in (query, key, value)), strict=True):
        out, state = _recorded(state, *tokens)
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2), state


def _recorded(
    state: ContinualNystromState, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ContinualNystromState]:
    sums = state.sums if _has_attached_sums(state) else _constant_sums(state)
    plain: Any = [field.detach().contiguous() if isinstance(field, Tensor) else field for field in state]
    before = ContinualNystromState._make(plain)._replace(sums=sums.detach())
    made = _native().continual_nystrom_recorded_step(before, query.detach(), key.detach(), value.detach(), False)
    if made is None:
        refuse_not_finite(query=query, key=key, value=value)
        raise RuntimeError("continual_nystrom_step: 'native' refused a step that records a gradient; report this bug")
    landmarks = (state.landmark_queries, state.landmark_keys, state.inverse)
    rings = (state.queries, state.keys, state.values)
    out, queries, keys, values, sums, *_ = _Step.apply(
        before, _Made(*made), *rings, sums, *landmarks, query, key, value
    )
    after = made[0][1]._replace(queries=queries, keys=keys, values=values, sums=sums, scale=state.scale)
    return out, after._replace(
        landmark_queries=state.landmark_queries, landmark_keys=state.landmark_keys, inverse=state.inverse
    )


def _has_attached_sums(state: ContinualNystromState) -> bool:
    """Whether a recorded step made these sums together with these rings, and for these landmarks. Only then do they
    have the gradient of the sums of the window."""
    step: Any = state.sums.grad_fn
    return (
        step is not None
        and step is state.keys.grad_fn
        and step is state.values.grad_fn
        and getattr(step, "landmarks", lambda: None)() is state.landmark_queries
    )


def _constant_sums(state: ContinualNystromState) -> Tensor:
    """Return sums without a gradient. If the window or the landmarks have one, the next step recomputes all rows."""
    sums = state.sums.detach()
    if state.keys.requires_grad or state.values.requires_grad or state.landmark_queries.requires_grad:
        sums = sums.clone()
        sums[..., -1] = torch.finfo(sums.dtype).max
    return sums


class _Step(torch.autograd.Function):
    """A step whose results have been computed. The tokens that the gradient needs are results too, so that second
    derivatives flow through them."""

    @staticmethod
    def forward(ctx: Any, before: ContinualNystromState, made: _Made, *inputs: Tensor) -> tuple[Tensor, ...]:
        sums, near, far, inverse, query = inputs[3:8]
        out, after = made.result
        ctx.set_materialize_grads(False)
        ctx.window, ctx.scale, ctx.capacity = before.window, float(before.scale), before.keys.shape[2]
        ctx.landmarks = weakref.ref(near)
        ctx.save_for_backward(
            query, made.keys, made.values, sums, near, far, inverse, made.history, before.position
        )
        return out, after.queries, after.keys, after.values, after.sums, made.keys, made.values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dout, dqueries, dkeys, dvalues, dsums, *drows = grads
        *tensors, history, position = ctx.saved_tensors
        found: Any = (None,) * 7
        if dout is not None or dsums is not None:
            is_fast = not torch.is_grad_enabled() and may_bypass_dispatcher(dout, dsums)
            found = (_native_gradients if is_fast else _gradients)(
                tensors, history, ctx.window, ctx.scale, dout, dsums
            )
        dquery, *dtokens, dsums, dnear, dfar, dinverse = found
        # Second derivatives also come through the tokens that were kept.
        dtokens = [_sum(a, b) for a, b in zip(dtokens, drows, strict=True)]
        back = _Rings(position, ctx.window, ctx.capacity, tensors[0].shape[2])
        pairs = [back(ring, rows) for ring, rows in zip((dqueries, dkeys, dvalues), (None, *dtokens), strict=True)]
        (dqueries, dput), (dkeys, dkey), (dvalues, dvalue) = pairs
        every = (dqueries, dkeys, dvalues, dsums, dnear, dfar, dinverse, _sum(dquery, dput), dkey, dvalue)
        needed = zip(every, ctx.needs_input_grad[2:], strict=True)
        return None, None, *[grad if need else None for grad, need in needed]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class _Rings(NamedTuple):
    """The gradient of putting t tokens into a ring of `capacity` rows after `position` (B, H) tokens."""

    position: Tensor
    window: int
    capacity: int
    tokens: int

    def __call__(self, after: Tensor | None, rows: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the ring before the step and of the tokens, (B, H, C, *) and (B, H, t, *), from
        those of the ring after the step and of its `rows`: the oldest tokens of the window, then the new tokens."""
        n, t = self.window, self.tokens
        before = new = None
        if rows is not None:
            old, new = rows.split([rows.shape[2] - t, t], 2)
            before = F.pad(old, (0, 0, 0, n - old.shape[2]))
        if after is not None:
            kept, put = window_of(after, self.position + t, n).split([n - t, t], 2)
            before, new = _sum(before, F.pad(kept, (0, 0, t, 0))), _sum(new, put)
        return before if before is None else ring_of(before, self.position, self.capacity), new


def _native_gradients(
    tensors: list[Tensor], history: Tensor, window: int, scale: float, dout: Tensor | None, dsums: Tensor | None
) -> list[Tensor]:
    """Return the gradients of `tensors`, the first arguments of `_formula`."""
    wide = [tensor.to(history.dtype).contiguous() for tensor in tensors]
    names = ("query", "keys", "values", "sums", "landmark_queries", "landmark_keys", "inverse")
    found = [torch.empty_like(tensor) for tensor in wide]
    _native().continual_nystrom_step_backward(
        **dict(zip(names, wide, strict=True)),
        history=history,
        dout=None if dout is None else dout.to(history.dtype).contiguous(),
        dnew_sums=None if dsums is None else dsums.contiguous(),
        window=window,
        scale=scale,
        **{f"d{name}": grad for name, grad in zip(names, found, strict=True)},
    )
    return [grad.to(tensor.dtype) for grad, tensor in zip(found, tensors, strict=True)]


def _gradients(
    tensors: list[Tensor], history: Tensor, window: int, scale: float, dout: Tensor | None, dsums: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the same, differentiable to any order."""
    directions = [dout, None if dsums is None else dsums[..., : tensors[2].shape[-1] + 1]]

    def formula(*inputs: Tensor) -> list[Tensor]:
        results = _formula(*inputs, history=history, window=window, scale=scale)
        return [result for result, direction in zip(results, directions, strict=True) if direction is not None]

    return gradient_of_formula(formula, tensors, [direction for direction in directions if direction is not None])


def _formula(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sums: Tensor,
    landmark_queries: Tensor,
    landmark_keys: Tensor,
    inverse: Tensor,
    *,
    history: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the new Delta V and phi (B, H, m, E + 1) as functions of what the step read, with the log-
    scales and the choice of recomputed rows that are in its history."""
    wide, tokens, width = history.dtype, query.shape[2], values.shape[-1]
    before = keys.shape[2] - tokens
    rows = F.pad(values.to(wide), (0, 1), value=1.0)
    scores = logits(landmark_queries, keys.to(wide), scale)
    near = logits(query.to(wide), landmark_keys, scale).softmax(-1) @ inverse
    state, top = sums[..., : width + 1], sums[..., width + 1, None].detach()
    outs = []
    for i, after in enumerate(history.unflatten(2, (tokens, -1)).unbind(2)):
        scale_after, fresh = after[..., width + 1, None], after[..., width + 2, None] != 0

        def weigh(logit: Tensor, fresh: Tensor = fresh, base: Tensor = scale_after) -> Tensor:
            return (logit - base).masked_fill(fresh, 0.0).exp()

        come, gone = before + i, i
        state = state * weigh(top) + weigh(scores[..., come, None]) * rows[..., come, None, :]
        state = state - weigh(scores[..., gone, None]) * rows[..., gone, None, :]
        if before == window:
            made = (scores[..., i + 1 : come + 1] - scale_after).exp() @ rows[..., i + 1 : come + 1, :]
            state = made.where(fresh, state)
        top = scale_after
        outs.append(near[..., i, None, :] @ (state[..., :-1] / state[..., -1:]))
    return torch.cat(outs, 2).to(query.dtype), state
