"""The gradient of a step whose landmarks do not change, in O(m (D + E)) for each token, by native code.

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
from ...runtime.tracing import may_bypass_dispatcher
from ..reference import logits
from .state import ContinualNystromState, ring_of, window_of


def differentiable_step(
    state: ContinualNystromState, sums: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ContinualNystromState] | None:
    """Return (out, state) with their gradients, for at most n tokens and the landmarks of `state`, which do not change.

    `sums` takes the place of the sums of the state. Return None if native code does not support the arguments.
    """
    fields: Any = state
    queries, keys, values, _, _, near, far, inverse, scale, *_, fixed = fields
    plain = [*map(_plain, (queries, keys, values, sums)), *map(_plain, fields[4:-1])]
    before = ContinualNystromState._make([*plain, 1])
    # The step writes to new memory, as the names above are further references to the rings.
    made = native().continual_nystrom_recorded_step(before, _plain(query), _plain(key), _plain(value), False)
    if made is None:
        return None
    (out, after), *kept = made
    out, queries, keys, values, sums, *_ = _Step.apply(
        before, out, after, kept, queries, keys, values, sums, near, far, inverse, query, key, value
    )
    rest: Any = after[9:-1]
    new = (queries, keys, values, sums, after.spare, near, far, inverse, scale, *rest, fixed)
    return out, ContinualNystromState._make(new)


@functools.cache
def native() -> Any:
    """Return the module of native code; None if it was not built."""
    return imported("nystrom.continual", "native")


def _plain(field: Any) -> Any:
    return field.detach().contiguous() if isinstance(field, Tensor) else field


def attached_sums(state: ContinualNystromState) -> Tensor:
    """Return the state's sums if they have the gradient of the sums of the window: if a recorded step made them
    together with the rings, for these landmarks.

    Else return sums without a gradient. If the window or the landmarks have one, the next step recomputes all rows.
    """
    sums, keys, values, near = state.sums, state.keys, state.values, state.landmark_queries
    step: Any = sums.grad_fn
    if step is not None and step is keys.grad_fn and step is values.grad_fn:
        if getattr(step, "landmarks", lambda: None)() is near:
            return sums
    sums = sums.detach()
    if keys.requires_grad or values.requires_grad or near.requires_grad:
        sums = sums.clone()
        sums[..., -1] = torch.finfo(sums.dtype).max
    return sums


class _Step(torch.autograd.Function):
    """A step whose results have been computed. The tokens that the gradient needs are results too, so that second
    derivatives flow through them."""

    @staticmethod
    def forward(ctx: Any, before: Any, out: Tensor, after: Any, kept: list[Tensor], *inputs: Tensor) -> Any:
        history, keys, values = kept
        _, _, _, sums, near, far, inverse, query, _, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.window, ctx.scale, ctx.capacity = before.window, float(before.scale), before.keys.shape[2]
        ctx.landmarks = weakref.ref(near)
        ctx.save_for_backward(query, keys, values, sums, near, far, inverse, history, before.position)
        return out, after.queries, after.keys, after.values, after.sums, keys, values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, history, position = ctx.saved_tensors
        # The gradients of the tokens that were kept come from second derivatives.
        is_fast = grads[5] is grads[6] is None and not torch.is_grad_enabled() and may_bypass_dispatcher(*grads)
        found = (_native_gradients if is_fast else _gradients)(ctx, tensors, history, position, *grads)
        query, key, value, *others = found
        every = zip((*others, query, key, value), ctx.needs_input_grad[4:], strict=True)
        return None, None, None, None, *[grad if need else None for grad, need in every]


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


_NAMES = ("query", "keys", "values", "sums", "landmark_queries", "landmark_keys", "inverse")
_GRADS = ("dout", "dnew_queries", "dnew_keys", "dnew_values", "dnew_sums")


def _native_gradients(
    ctx: Any, tensors: list[Tensor], history: Tensor, position: Tensor, *grads: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of the new tokens, the rings, the sums, the landmarks and the inverse."""
    wide, narrow = history.dtype, tensors[0].dtype
    found = native().continual_nystrom_step_backward(
        **{name: tensor.to(wide).contiguous() for name, tensor in zip(_NAMES, tensors, strict=True)},
        history=history,
        **{
            name: grad if grad is None else grad.to(wide).contiguous()
            for name, grad in zip(_GRADS, grads[:5], strict=True)
        },
        position=position,
        window=ctx.window,
        capacity=ctx.capacity,
        scale=ctx.scale,
    )
    if narrow == wide:
        return found
    return [grad if grad is None else grad.to(narrow) for grad in found[:6]] + [*found[6:]]


def _gradients(
    ctx: Any, tensors: list[Tensor], history: Tensor, position: Tensor, *grads: Tensor | None
) -> list[Tensor | None]:
    """Return the same, differentiable to any order."""
    dout, dqueries, dkeys, dvalues, dsums, *more = grads
    directions = [dout, None if dsums is None else dsums[..., : tensors[2].shape[-1] + 1]]
    found: Any = [None] * len(tensors)
    if dout is not None or dsums is not None:

        def formula(*inputs: Tensor) -> list[Tensor]:
            results = _formula(*inputs, history=history, window=ctx.window, scale=ctx.scale)
            return [result for result, direction in zip(results, directions, strict=True) if direction is not None]

        found = gradient_of_formula(formula, tensors, [each for each in directions if each is not None])
    dquery, *rows, dsums, dnear, dfar, dinverse = found
    rows = [None, *(_sum(a, b) for a, b in zip(rows, more, strict=True))]
    back = _Rings(position, ctx.window, ctx.capacity, tensors[0].shape[2])
    pairs = [back(ring, read) for ring, read in zip((dqueries, dkeys, dvalues), rows, strict=True)]
    rings, (dput, dkey, dvalue) = zip(*pairs, strict=True)
    return [_sum(dquery, dput), dkey, dvalue, *rings, dsums, dnear, dfar, dinverse]


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
