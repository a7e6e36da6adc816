"""The gradients of continual steps whose landmarks do not change, by native code or Triton: O(m (D + E)) for each
token. Retroactive outputs of exact attention have a row of sums for each query of the window, in place of the m
landmarks.

The definition recomputes the sums from the window at every token, so its gradient costs O(n m). Here the gradient
flows through the sums, as the step computes them: a token gets the gradient of all later sums when it enters the
window, less that of the sums after it has left. Only a row that the step recomputed reads the window. A recorded step
writes to new memory, because autograd keeps what it read. So it also copies the rings, once for all its tokens.

The gradient with respect to the tokens and the landmarks of a whole stream is that of the
definition. This also holds for a stream that starts from any state: sums that do not come from a
recorded step of the same rings and landmarks are recomputed. Second derivatives are those of
`_nystrom_formula`, `_retroactive_formula` and `_attention_formula`.

Both implementations have `continual_nystrom_recorded_step` and `continual_attention_recorded_step`, which return
(result, history, *kept). Native code copies the tokens that the gradient reads, in the order of the stream, and keeps
only the copies. A GPU decides by itself which rows to recompute, so Triton keeps the rings after the step instead: they
have n + t rows, all tokens that the step read.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....runtime.autograd import gradient_of_formula
from ....runtime.backends import imported
from ....runtime.dtypes import state_dtype
from ....runtime.tracing import may_bypass_dispatcher
from ...reference import logits
from ..state import (
    EXTRA_SUMS,
    UNSURE,
    ContinualAttentionState,
    ContinualNystromState,
    ContinualState,
    ring_of,
    window_of,
)


def nystrom_step(
    code: Any, state: ContinualNystromState, sums: Tensor, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, ContinualNystromState] | None:
    """Return (out, state) with their gradients, for at most n tokens and the landmarks of `state`, which do not change.

    `sums` takes the place of the sums of the state. `code` is the module of an implementation. Return None if it does
    not support the arguments.
    """
    fields: Any = state
    queries, keys, values, _, _, near, far, inverse, scale, *_, fixed = fields
    before = ContinualNystromState._make([*map(_plain, (queries, keys, values, sums)), *map(_plain, fields[4:-1]), 1])
    made = code.continual_nystrom_recorded_step(before, *map(_plain_token, (query, key, value)), retroactive)
    if made is None:
        return None
    out, *new = _Step.apply(
        before, made, retroactive, query, key, value, queries, keys, values, sums, near, far, inverse
    )[:5]
    after: Any = made[0].state
    return out, ContinualNystromState._make([*new, after.spare, near, far, inverse, scale, *after[9:-1], fixed])


def attention_step(
    code: Any, state: ContinualAttentionState, query: Tensor, key: Tensor, value: Tensor, retroactive: bool
) -> tuple[Tensor, ContinualAttentionState] | None:
    """Do the same for exact attention, in O(n (D + E)) for each token. Single outputs use no sums."""
    rings = state.queries, state.keys, state.values
    sums = (attached_sums(state),) if retroactive else ()
    fields: Any = state
    before = ContinualAttentionState._make(map(_plain, (*rings, *(sums or fields[3:4]), *fields[4:])))
    made = code.continual_attention_recorded_step(before, *map(_plain_token, (query, key, value)), retroactive)
    if made is None:
        return None
    out, *new = _Step.apply(before, made, retroactive, query, key, value, *rings, *sums)[: 5 if retroactive else 4]
    after: Any = made[0].state
    return out, ContinualAttentionState._make([*new, *after[len(new) :]])


@functools.cache
def native() -> Any:
    """Return the module of native code; None if it was not built."""
    return imported("nystrom.continual", "native")


@functools.cache
def triton() -> Any:
    """Return the module of the Triton kernels; None if Triton cannot be imported."""
    return imported("nystrom.continual", "triton")


# A step writes to new memory if anything else refers to the rings. The callers of these functions
# do.


def _plain(field: Any) -> Any:
    if not isinstance(field, Tensor) or (type(field) is Tensor and field.is_contiguous()):
        return field
    return field.detach().contiguous()


def _plain_token(token: Tensor) -> Tensor:
    return token if type(token) is Tensor else token.detach()


def attached_sums(state: ContinualState) -> Tensor:
    """Return the state's sums if a recorded step made them together with the rings, for these
    landmarks. They then have the gradient of the sums over the window.

    Else return sums without a gradient. If the window or the landmarks have one, the next step recomputes all rows.
    """
    sums, keys, values = state.sums, state.keys, state.values
    queries = state.landmark_queries if isinstance(state, ContinualNystromState) else state.queries
    step: Any = sums.grad_fn
    known = getattr(step, "cmab_queries", None)
    if known is not None and known() is queries and step is keys.grad_fn and step is values.grad_fn:
        return sums
    sums = sums.detach()
    if keys.requires_grad or values.requires_grad or queries.requires_grad:
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
        ctx.step = Setting(query.shape[2], before.window, before.keys.shape[2], float(before.scale), retroactive)
        if others:  # the queries of the rows of sums
            ctx.cmab_queries = weakref.ref(others[1] if len(others) > 1 else after.queries)
        ctx.keeps_rings = not kept
        queries, keys, values = kept or (after.queries if retroactive else None, after.keys, after.values)
        ctx.position = before.position  # this may be an inference tensor, which cannot be saved
        last = after.sums if retroactive else None
        ctx.save_for_backward(query if queries is None else queries, keys, values, *others, last, history)
        return out, after.queries, after.keys, after.values, after.sums if others else None, *kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, last, history = ctx.saved_tensors
        # The gradients of the tokens that were read come from second derivatives.
        is_first = all(grad is None for grad in grads[5:]) and not torch.is_grad_enabled()
        if is_first and may_bypass_dispatcher(*grads):
            gradients: Any = partial(_triton_gradients if ctx.keeps_rings else _native_gradients, last)
        else:
            gradients = _gradients
            tensors[:3] = _in_order(ctx.step, tensors[:3], ctx.position) if ctx.keeps_rings else tensors[:3]
        found = gradients(ctx.step, tensors, history, ctx.position, *grads)
        needed = zip(found, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *[grad if need else None for grad, need in needed]


class Setting(NamedTuple):
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
        t, *). `after` is the gradient of the ring after the step, which has n + t rows. `rows` is the gradient of the
        rows that the step read: the oldest tokens of the window, then the new tokens."""
        n, t = self.window, self.tokens
        before = new = None
        if rows is not None:
            old, new = rows.split([rows.shape[2] - t, t], 2)
            before = F.pad(old, (0, 0, 0, n - old.shape[2]))
        if after is not None:
            kept, put = window_of(after, self.position + t, n + t).split([n, t], 2)
            before, new = _sum(before, kept), _sum(new, put)
        return before if before is None else ring_of(before, self.position, self.capacity), new


_NAMES = ("query", "keys", "values", "sums", "landmark_queries", "landmark_keys", "inverse")
_GRADS = ("dout", "dnew_queries", "dnew_keys", "dnew_values", "dnew_sums")


def _native_gradients(
    new_sums: Tensor | None,
    step: Setting,
    tensors: list[Tensor],
    history: Tensor | None,
    position: Tensor,
    *grads: Tensor | None,
) -> list[Tensor | None]:
    """Return the gradients of the new tokens and the rings, then those of the sums, the landmarks and the inverse.
    `new_sums` are those after the step, for retroactive outputs."""
    narrow, wide = tensors[0].dtype, state_dtype(tensors[0].dtype)
    given: Any = dict(zip(_NAMES, tensors, strict=False)) | dict(zip(_GRADS, grads, strict=False))
    given |= {} if history is None else {"new_sums": new_sums, "history": history}
    if narrow != wide or not all(tensor is None or tensor.is_contiguous() for tensor in given.values()):
        given = {name: tensor if tensor is None else tensor.to(wide).contiguous() for name, tensor in given.items()}
    if history is None:
        del given["dnew_sums"]
    kind = "nystrom" if "inverse" in given else "attention"
    found = getattr(native(), f"continual_{kind}_step_backward")(**given, position=position, **step._asdict())
    return [*_narrowed(found[:6], narrow), *found[6:]]


def _in_order(step: Setting, tensors: list[Tensor], position: Tensor) -> list[Tensor]:
    """Return the tokens that the step read, oldest first, from the rings after it."""
    return [
        window_of(ring, position + step.tokens, step.window + step.tokens) if ring.shape[2] > step.tokens else ring
        for ring in tensors
    ]


def _triton_gradients(
    new_sums: Any,
    step: Setting,
    tensors: list[Tensor],
    history: Tensor | None,
    position: Tensor,
    *grads: Tensor | None,
) -> list[Tensor | None]:
    """Return the same gradients by Triton. Retroactive outputs have large products of matrices, which torch does."""
    query, keys, values, *others = tensors
    dout, dqueries, dkeys, dvalues, dsums = (grad if grad is None else grad.contiguous() for grad in grads)
    rows: Tensor | None = None
    through: list[Tensor | None] = []
    if history is not None:
        sums, _, far, inverse = others
        columns = values.shape[-1] + 1
        dsums = torch.zeros_like(sums) if dsums is None else F.pad(dsums[..., :columns], (0, EXTRA_SUMS - 1))
        if step.retroactive and dout is not None:
            inputs = *_in_order(step, [query], position), far, inverse, new_sums[..., :columns]
            found: Any = gradient_of_formula(partial(_window_outputs, step), inputs, [dout])
            rows, *through, dlast = found
            dsums[..., :columns] += dlast
            dout = None
    landmarks = None if history is None else (*others, history)
    single = query.contiguous() if dout is not None else None
    given = single, keys, values, landmarks, position, dout, dkeys, dvalues, dsums
    dquery, *found, dfar, dinverse = triton().step_backward(step, *given)
    before, put = _Rings(position, step.window, step.capacity, step.tokens)(dqueries, rows)
    new, rings, marks = [_sum(dquery, put), *found[:2]], [before, *found[2:4]], found[4:]
    if history is None:
        return _narrowed([*new, *rings], query.dtype)
    return [*_narrowed([*new, *rings], query.dtype), dsums, *marks, *(through or (dfar, dinverse))]


def _narrowed(grads: Any, dtype: torch.dtype) -> Any:
    return [grad if grad is None or grad.dtype == dtype else grad.to(dtype) for grad in grads]


def _gradients(
    step: Setting, tensors: list[Tensor], history: Tensor | None, position: Tensor, *grads: Tensor | None
) -> list[Tensor | None]:
    """Return the same gradients, differentiable to any order."""
    dout, dqueries, dkeys, dvalues, dsums, *more = grads
    more = more or [None] * 3
    directions = [dout, None if dsums is None else dsums[..., : tensors[2].shape[-1] + 1]]
    found: Any = [None] * len(tensors)
    if dout is not None or dsums is not None:

        def formula(*inputs: Tensor) -> list[Tensor]:
            results = zip(_results(step, history, *inputs), directions, strict=False)
            return [result for result, direction in results if direction is not None]

        found = gradient_of_formula(formula, tensors, [each for each in directions if each is not None])
    rows = [_sum(a, b) for a, b in zip(found[:3], more, strict=True)]
    back = _Rings(position, step.window, step.capacity, step.tokens)
    pairs = [back(ring, read) for ring, read in zip((dqueries, dkeys, dvalues), rows, strict=True)]
    rings, new = zip(*pairs, strict=True)
    return [*new, *rings, *found[3:]]


def _results(step: Setting, history: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs, and Delta V and phi if the step has sums, as functions of the tensors that the step read."""
    if history is None:
        return (_attention_formula(step, *inputs),)
    has_landmarks = len(inputs) == len(_NAMES)
    return (_nystrom_formula if has_landmarks else _retroactive_formula)(step, history, *inputs)


def _attention_formula(step: Setting, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the outputs as a function of the tensors that the step read."""
    wide = state_dtype(query.dtype)
    scores = logits(query.to(wide), keys.to(wide), step.scale)
    windows = [slice(i + 1, i + 1 + step.window) for i in range(step.tokens)]
    outs = [
        scores[..., i, None, window].softmax(-1) @ values[..., window, :].to(wide) for i, window in enumerate(windows)
    ]
    return torch.cat(outs, 2).to(query.dtype)


def _window_outputs(step: Setting, query: Tensor, landmark_keys: Tensor, inverse: Tensor, sums: Tensor) -> Any:
    """Return the outputs of the window as a function of its queries, n + t rows, and of the sums after the step."""
    near = logits(query[..., step.tokens :, :].to(sums.dtype), landmark_keys, step.scale).softmax(-1)
    return ((near @ inverse @ _means(sums)).to(query.dtype),)


def _nystrom_formula(
    step: Setting,
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
    step read."""
    near = logits(query.to(history.dtype), landmark_keys, step.scale).softmax(-1) @ inverse
    states = list(_sums_after_tokens(step, history, landmark_queries, keys, values, sums, 0))
    if step.retroactive:
        out = near[..., step.tokens :, :] @ _means(states[-1])
    else:
        out = torch.cat([near[..., i, None, :] @ _means(state) for i, state in enumerate(states)], 2)
    return out.to(query.dtype), states[-1]


def _retroactive_formula(
    step: Setting, history: Tensor, queries: Tensor, keys: Tensor, values: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:
    """Do the same for retroactive outputs of exact attention, where Delta V and phi are (B, H, n, E + 1)."""
    *_, state = _sums_after_tokens(step, history, queries.to(history.dtype), keys, values, sums, 1)
    return _means(state).to(queries.dtype), state


def _sums_after_tokens(
    step: Setting, history: Tensor, queries: Tensor, keys: Tensor, values: Tensor, sums: Tensor, shift: int
) -> Iterator[Tensor]:
    """Yield Delta V and phi after each token as functions of the tensors that the step read. The log-scales and the
    choice of recomputed rows come from the history of the step. With every token, the rows move on by `shift` queries.
    """
    tokens, window, _, scale, _ = step
    wide, width, before = history.dtype, values.shape[-1], keys.shape[2] - tokens
    rows = F.pad(values.to(wide), (0, 1), value=1.0)
    all_scores = logits(queries, keys.to(wide), scale)
    records = history.unflatten(2, (tokens, -1)).unbind(2)
    count = records[0].shape[2]
    sums = F.pad(sums, (0, 0, 0, count - sums.shape[2]))  # exact attention may have no sums yet
    state, top = sums[..., : width + 1], sums[..., width + 1, None].detach()
    for i, after in enumerate(records):
        scale_after, fresh = after[..., -2, None], after[..., -1, None] != 0
        state, top = (F.pad(part[..., shift:, :], (0, 0, 0, shift)) for part in (state, top))
        scores = all_scores[..., shift * (i + 1) :, :][..., :count, :]

        def weigh(logit: Tensor, fresh: Tensor = fresh, base: Tensor = scale_after) -> Tensor:
            return (logit - base).masked_fill(fresh, 0.0).exp()

        come, gone = before + i, i
        state = state * weigh(top) + weigh(scores[..., come, None]) * rows[..., come, None, :]
        state = state - weigh(scores[..., gone, None]) * rows[..., gone, None, :]
        if before == window:
            made = (scores[..., i + 1 : come + 1] - scale_after).exp() @ rows[..., i + 1 : come + 1, :]
            state = made.where(fresh, state)
        top = scale_after
        yield state


def _means(state: Tensor) -> Tensor:
    return state[..., :-1] / state[..., -1:]
