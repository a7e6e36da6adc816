"""The gradients of continual steps whose landmarks do not change, by native code: O(m (D + E)) for each token.

The definition recomputes the sums from the window at every token, so its gradient costs O(n m). Here the gradient
flows through the sums, as the step computes them: a token gets the gradient of all later sums when it enters the
window, less that of the sums after it has left. Only a row that the step recomputed reads the window. A recorded step
writes to new memory, because autograd keeps what it read. So it also copies the rings, once for all its tokens.

The gradient with respect to the tokens and the landmarks of a whole stream is that of the
definition. This also holds for a stream that starts from any state: sums that do not come from a
recorded step of the same rings and landmarks are recomputed. Second derivatives are those of
`_nystrom_formula` and `_attention_formula`.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....runtime.autograd import gradient_of_formula
from ....runtime.backends import imported
from ....runtime.dtypes import state_dtype
from ....runtime.tracing import may_bypass_dispatcher
from ...reference import logits
from ..state import EXTRA_SUMS, UNSURE, ContinualAttentionState, ContinualNystromState, ring_of, window_of


def nystrom_step(
    state: ContinualNystromState, sums: Tensor, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, ContinualNystromState] | None:
    """Return (out, state) with their gradients, for at most n tokens and the landmarks of `state`, which do not change.

    `sums` takes the place of the sums of the state. Return None if native code does not support the arguments.
    """
    fields: Any = state
    queries, keys, values, _, _, near, far, inverse, scale, *_, fixed = fields
    before = ContinualNystromState._make([*map(_plain, (queries, keys, values, sums)), *map(_plain, fields[4:-1]), 1])
    made = native().continual_nystrom_recorded_step(before, *map(_plain_token, (query, key, value)), retroactive)
    if made is None:
        return None
    out, *new, _, _, _ = _Step.apply(
        before, made, retroactive, query, key, value, queries, keys, values, sums, near, far, inverse
    )
    after: Any = made[0].state
    return out, ContinualNystromState._make([*new, after.spare, near, far, inverse, scale, *after[9:-1], fixed])


def attention_step(
    state: ContinualAttentionState, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ContinualAttentionState] | None:
    """Do the same for exact attention with single outputs, in O(n (D + E)) for each token."""
    rings = state.queries, state.keys, state.values
    before = ContinualAttentionState._make(map(_plain, state))
    made = native().continual_attention_recorded_step(before, *map(_plain_token, (query, key, value)), False)
    if made is None:
        return None
    out, *new, _, _, _, _ = _Step.apply(before, made, False, query, key, value, *rings)
    after: Any = made[0].state
    return out, ContinualAttentionState._make([*new, *after[3:]])


@functools.cache
def native() -> Any:
    """Return the module of native code; None if it was not built."""
    return imported("nystrom.continual", "native")


# A step writes to new memory if anything else refers to the rings. The callers of these functions
# do.


def _plain(field: Any) -> Any:
    if not isinstance(field, Tensor) or (type(field) is Tensor and field.is_contiguous()):
        return field
    return field.detach().contiguous()


def _plain_token(token: Tensor) -> Tensor:
    return token if type(token) is Tensor else token.detach()


def attached_sums(state: ContinualNystromState) -> Tensor:
    """Return the state's sums if a recorded step made them together with the rings, for these
    landmarks. They then have the gradient of the sums over the window.

    Else return sums without a gradient. If the window or the landmarks have one, the next step recomputes all rows.
    """
    sums, keys, values, near = state.sums, state.keys, state.values, state.landmark_queries
    step: Any = sums.grad_fn
    landmarks = getattr(step, "cmab_landmarks", None)
    if landmarks is not None and landmarks() is near and step is keys.grad_fn and step is values.grad_fn:
        return sums
    sums = sums.detach()
    if keys.requires_grad or values.requires_grad or near.requires_grad:
        sums = sums.clone()
        sums[..., 1 - EXTRA_SUMS] = UNSURE
    return sums


class _Step(torch.autograd.Function):
    """A step whose results have been computed. The tokens that the gradient reads are results too, so that second
    derivatives flow through them."""

    @staticmethod
    def forward(ctx: Any, before: Any, made: Any, retroactive: bool, *inputs: Tensor) -> Any:
        (out, after), history, *kept = made
        query, others = inputs[0], inputs[6:]
        ctx.set_materialize_grads(False)
        ctx.step = _Setting(query.shape[2], before.window, before.keys.shape[2], float(before.scale), retroactive)
        if others:
            ctx.cmab_landmarks = weakref.ref(others[1])
        read = query if kept[0] is None else kept[0]
        ctx.position = before.position  # this may be an inference tensor, which cannot be saved
        ctx.save_for_backward(read, *kept[1:], *others, history)
        return out, after.queries, after.keys, after.values, after.sums if others else None, *kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, history = ctx.saved_tensors
        # The gradients of the tokens that were read come from second derivatives.
        is_first = all(grad is None for grad in grads[5:]) and not torch.is_grad_enabled()
        gradients = _native_gradients if is_first and may_bypass_dispatcher(*grads) else _gradients
        found = gradients(ctx.step, tensors, history, ctx.position, *grads)
        needed = zip(found, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *[grad if need else None for grad, need in needed]


class _Setting(NamedTuple):
    """The numbers of a step, by their names in native code."""

    tokens: int
    window: int
    capacity: int
    """Rows of the rings before the step."""
    scale: float
    retroactive: bool


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class _Rings(NamedTuple):
    """The gradient of putting t tokens into a ring of `capacity` rows after `position` (B, H) tokens."""

    position: Tensor
    window: int
    capacity: int
    tokens: int

    def __call__(self, after: Tensor | None, rows: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the ring before the step, (B, H, C, *), and of the tokens, (B, H,
        t, *). `after` is the gradient of the ring after the step. `rows` is the gradient of the
        rows that the step read: the oldest tokens of the window, then the new tokens."""
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
    step: _Setting, tensors: list[Tensor], history: Tensor | None, position: Tensor, *grads: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of the new tokens and the rings, then those of the sums, the landmarks and the inverse."""
    narrow, wide = tensors[0].dtype, state_dtype(tensors[0].dtype)
    given: Any = dict(zip(_NAMES, tensors, strict=False)) | dict(zip(_GRADS, grads, strict=False))
    if narrow != wide or not all(tensor is None or tensor.is_contiguous() for tensor in given.values()):
        given = {name: tensor if tensor is None else tensor.to(wide).contiguous() for name, tensor in given.items()}
    if history is None:
        del given["dnew_sums"]
        return _narrowed(
            native().continual_attention_step_backward(**given, position=position, **step._asdict()), narrow
        )
    found = native().continual_nystrom_step_backward(**given, history=history, position=position, **step._asdict())
    return [*_narrowed(found[:6], narrow), *found[6:]]


def _narrowed(grads: Any, dtype: torch.dtype) -> Any:
    return [grad if grad is None or grad.dtype == dtype else grad.to(dtype) for grad in grads]


def _gradients(
    step: _Setting, tensors: list[Tensor], history: Tensor | None, position: Tensor, *grads: Tensor | None
) -> list[Tensor | None]:
    """Return the same gradients, differentiable to any order."""
    dout, dqueries, dkeys, dvalues, dsums, *more = grads
    directions = [dout, None if dsums is None else dsums[..., : tensors[2].shape[-1] + 1]]
    found: Any = [None] * len(tensors)
    if dout is not None or dsums is not None:

        def formula(*inputs: Tensor) -> list[Tensor]:
            results = (
                [_attention_formula(step, *inputs)] if history is None else _nystrom_formula(step, history, *inputs)
            )
            return [result for result, direction in zip(results, directions, strict=False) if direction is not None]

        found = gradient_of_formula(formula, tensors, [each for each in directions if each is not None])
    rows = [_sum(a, b) for a, b in zip(found[:3], more, strict=True)]
    back = _Rings(position, step.window, step.capacity, step.tokens)
    pairs = [back(ring, read) for ring, read in zip((dqueries, dkeys, dvalues), rows, strict=True)]
    rings, new = zip(*pairs, strict=True)
    return [*new, *rings, *found[3:]]


def _attention_formula(step: _Setting, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the outputs as a function of the tensors that the step read."""
    wide = state_dtype(query.dtype)
    scores = logits(query.to(wide), keys.to(wide), step.scale)
    windows = [slice(i + 1, i + 1 + step.window) for i in range(step.tokens)]
    outs = [
        scores[..., i, None, window].softmax(-1) @ values[..., window, :].to(wide) for i, window in enumerate(windows)
    ]
    return torch.cat(outs, 2).to(query.dtype)


def _nystrom_formula(
    step: _Setting,
    history: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sums: Tensor,
    landmark_queries: Tensor,
    landmark_keys: Tensor,
    inverse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the new Delta V and phi (B, H, m, E + 1) as functions of the tensors that the
    step read. The log-scales and the choice of recomputed rows come from its history."""
    tokens, window, _, scale, retroactive = step
    wide, width, before = history.dtype, values.shape[-1], keys.shape[2] - step.tokens
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
        if not retroactive:
            outs.append(near[..., i, None, :] @ (state[..., :-1] / state[..., -1:]))
    if retroactive:
        outs.append(near[..., tokens:, :] @ (state[..., :-1] / state[..., -1:]))
    return torch.cat(outs, 2).to(query.dtype), state
