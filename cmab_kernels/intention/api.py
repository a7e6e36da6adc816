"""Intention, regularised least squares as an attention layer: the public functions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..attention import latent_attention
from ..runtime.backends import choose, impl_for, kernel
from ..runtime.checks import (
    as_autocast,
    as_decay,
    as_they_are,
    check_choice,
    check_every,
    check_key_value,
    check_mask,
    check_offsets_shape,
    check_operands,
    mismatch,
    not_a_tensor,
    over_batch,
    refuse_negative,
    weights_of_heads,
)
from ..runtime.tracing import may_call_native
from .contract import ApplyRows, Gram, PrefixRidge, RidgeUpdate
from .dual import Dual
from .schema import apply_rows_op, check_weights, gram_op, heads_of, prefix_ridge_op, ridge_update_op
from .solve.api import RidgeSolution, penalty_of, solve_heads
from .state import RidgeState, check_ridge, decayed_ridge, in_chunks, subtract_ridge

FORMS = ("auto", "primal", "dual")


def intention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    *,
    form: str = "auto",
    weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Q (K'WK + alpha I)^-1 K'WV: a ridge regression of values on keys, evaluated at each query.

    Apart from the inputs, the memory of the primal form does not grow with N.

    Args:
        query: (B, H, M, D), or (H, M, D) shared over the batch. float64, float32, bfloat16 or float16.
        key: (B, H, N, D), any strides; N may be 0.
        value: (B, H, N, E).
        alpha: penalty >= 0: a number, or a tensor that broadcasts to (B, H). A negative penalty is
            a `ValueError`. The values of a tensor on a GPU are not read. There a negative penalty
            makes the result of its head NaN, and sets `info` of `solve_ridge` to 1.
        form: "primal" solves a D x D system and streams over the keys; "dual" solves an N x N system; "auto" takes the
            smaller system. Both forms give the same result, but the dual system of more than D keys is singular up to
            alpha, and loses digits as alpha falls. For 1,025 keys of width 17 in float64, the error of the dual form is
            1e-9 at alpha = 1e-3 and 1e-4 at alpha = 1e-8; the error of the primal form is 2e-15. On a GPU the dual form
            has kernels for up to 256 keys. "auto" counts masked keys as well. At alpha = 0 and N < D only the dual
            system can be regular, so padding to N >= D turns the result of "auto" into NaN.
        weights: weight of each key, >= 0: (B, N) or (B, H, N); None means 1. A negative weight is a `ValueError` on a
            CPU, and gives NaN on a GPU. Weights are rounded to float32 unless keys are float64; on a CPU a weight too
            large for float32 is a `ValueError`.
        key_padding_mask: (B, N) bool, True = ignore.
        cu_seqlens: (S + 1,) int32 or int64 offsets that rise from 0 to at most N. Key and value then have batch 1 and
            hold S sets of keys, one after the other: set s goes from cu_seqlens[s] to cu_seqlens[s + 1], and keys after
            the last set belong to none. A query (B, H, M, D), `alpha` and the result have batch S.
            The primal form solves for sets of any size; "dual" raises a `ValueError`. On a GPU the
            offsets are not read, because reading would make the program wait: wrong offsets make
            every result and gradient NaN there.
        impl: "auto", "reference", "native" or "triton": the implementation of the sums and of the products with rows.
            `regularised_solve` chooses its own implementation of the solve, which may be "cuda".

    Returns:
        (B, H, M, E) in the dtype of query. Differentiable to any order in query, key, value, weights and alpha. The
        system is solved in float64. If it is still singular (at alpha = 0), the result of that head is NaN; `info` of
        `solve_ridge` shows this.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.
        RuntimeError: `impl` cannot run here.

    Source: Exploring the Space of Key-Value-Query Models with Intention (Garnelo and Czarnecki), section 2.

    >>> x = torch.linspace(-1, 1, 50, dtype=torch.float64)
    >>> features = torch.stack([torch.ones_like(x), x, x**2], dim=-1)[None, None]
    >>> curve = (1 - 2 * x + 3 * x**2)[None, None, :, None]
    >>> at_two = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)[None, None, None]
    >>> f"{cmab_kernels.intention(at_two, features, curve, 1e-9).item():.4f}"
    '9.0000'
    """
    check_choice("form", form, FORMS)
    if query is None:
        raise TypeError(not_a_tensor("query", query))
    if cu_seqlens is not None and form == "dual":
        raise ValueError(mismatch("form", "'dual'", "auto or primal, as cu_seqlens packs sets of different sizes"))
    inputs = _inputs(query, key, value, weights, key_padding_mask, cu_seqlens)
    penalty = penalty_of(alpha, inputs.query.shape[:2], inputs.key.device)
    solver = impl_for(impl, "intention", "intention.solve")
    *_, length, width = inputs.key.shape
    with as_they_are(inputs.key.device):
        if form == "dual" or (form == "auto" and length < width and cu_seqlens is None):
            return _dual(inputs, penalty, impl, solver).intention(inputs.query, inputs.value)
        chosen = choose("intention", impl, inputs.query, inputs.key, inputs.value)
        weight, _, _ = solve_rows(
            inputs.key, inputs.value, inputs.weights, inputs.key_padding_mask, penalty, chosen, solver, cu_seqlens
        )
        return apply_rows_op(ApplyRows(inputs.query, weight, chosen))


def sigma_intention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    *,
    weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float = 1.0,
    impl: str = "auto",
) -> Tensor:
    """softmax(scale Q (K'WK + alpha I)^-1 K') V: attention with the queries multiplied by (K'WK + alpha I)^-1.

    Arguments, errors and gradients are those of `intention`; `scale` multiplies the scores. The dual system is solved
    if N < D and there are no weights. N counts masked keys as well. At alpha = 0 and N < D only the dual system can be
    regular, so padding to N >= D gives NaN. The attention is `latent_attention` with the given `impl` if attention has
    it, else with "auto". As alpha grows, the result for the queries alpha Q tends to the attention of Q with the same
    `scale`.

    >>> q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 4)
    >>> near = cmab_kernels.sigma_intention(1e6 * q, k, v, 1e6)
    >>> torch.allclose(near, cmab_kernels.latent_attention(q, k, v, scale=1.0), atol=1e-3)
    True
    """
    if query is None:
        raise TypeError(not_a_tensor("query", query))
    inputs = _inputs(query, key, value, weights, key_padding_mask)
    penalty = penalty_of(alpha, inputs.key.shape[:2], inputs.key.device)
    solver, attend = (impl_for(impl, "intention", other) for other in ("intention.solve", "attention"))
    *_, length, width = inputs.key.shape
    with as_they_are(inputs.key.device):
        if inputs.weights is None and 0 < length < width:
            scores = _dual(inputs, penalty, impl, solver).sigma_scores(inputs.query).to(inputs.query.dtype)
            one = torch.eye(length, dtype=scores.dtype, device=scores.device).expand(*inputs.key.shape[:2], -1, -1)
            return latent_attention(
                scores, one, inputs.value, key_padding_mask=inputs.key_padding_mask, scale=scale, impl=attend
            )
        chosen = choose("intention", impl, inputs.query, inputs.key, inputs.value)
        gram, _ = gram_op(
            Gram(
                inputs.key,
                inputs.value[..., :0],
                inputs.weights,
                inputs.key_padding_mask,
                parts=(True, False),
                impl=chosen,
            )
        )
        solved = solve_heads(gram, inputs.query.mT.double(), penalty, solver).weight.mT.to(inputs.query.dtype)
        return latent_attention(
            solved, inputs.key, inputs.value, key_padding_mask=inputs.key_padding_mask, scale=scale, impl=attend
        )


def ridge_state(
    key: Tensor,
    value: Tensor,
    *,
    state: RidgeState | None = None,
    decay: float | Tensor | None = None,
    weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> RidgeState:
    """The sums K'WK and K'WV over these keys, added to `state` if one is given. The cost depends on the new keys alone.

    Arguments and errors are those of `intention`. Products and sums are float64: after a million updates, in chunks of
    any size, the state equals the state of all keys at once. `state` is not changed. Gradients flow to key, value,
    weights and the state. With `cu_seqlens`, the result and `state` have batch S: the sums of each packed set.

    `decay` lets old keys fade: it multiplies the weight of every key in `state`, and so both sums. After t further
    calls a key has the weight decay^t. Like weights, it does not change `count`. `decay` is a number in (0, 1], or a
    tensor of such numbers that broadcasts to (B, H) and may require a gradient; None means 1. Other
    numbers raise a `ValueError`. On a GPU and in traces the numbers in a tensor are not checked,
    and wrong numbers make their sums NaN. Without `state`, `decay` has no effect.

    >>> key, value = torch.randn(1, 2, 1000, 8), torch.randn(1, 2, 1000, 3)
    >>> state = None
    >>> for k, v in zip(key.split(100, dim=2), value.split(100, dim=2)):
    ...     state = cmab_kernels.ridge_state(k, v, state=state)
    >>> weight, info = cmab_kernels.solve_ridge(state, alpha=0.1)
    >>> torch.allclose(key @ weight.float(), cmab_kernels.intention(key, key, value, 0.1), atol=1e-5)
    True
    """
    inputs = _inputs(None, key, value, weights, key_padding_mask, cu_seqlens)
    if state is not None:
        shape = (*heads_of(inputs.key, cu_seqlens), inputs.key.shape[-1], inputs.value.shape[-1])
        check_ridge(state, shape, inputs.key.device)
    if decay is not None:
        decay = as_decay(decay, heads_of(inputs.key, cu_seqlens), inputs.key.device)
        state = None if state is None else decayed_ridge(state, decay)
    chosen = choose("intention", impl, inputs.query, inputs.key, inputs.value)
    gram, moment, count = state or (None, None, None)
    update = RidgeUpdate(
        inputs.key, inputs.value, inputs.weights, inputs.key_padding_mask, cu_seqlens, gram, moment, count, chosen
    )
    return RidgeState(*ridge_update_op(update))


def prefix_ridge_states(
    key: Tensor,
    value: Tensor,
    *,
    every: int = 1,
    state: RidgeState | None = None,
    weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    impl: str = "auto",
) -> RidgeState:
    """The sums after every `every` keys, and after the last: `ridge_state` of all prefixes, in one pass over the keys.

    Arguments and errors are those of `ridge_state`. `every` is an int >= 1: the number of keys between one state and
    the next, counting masked keys. The results have an axis of length T = ceil(N / every): gram (B, H, T, D, D), moment
    (B, H, T, D, E), count (B, H, T). Each result includes `state` if one is given. Gradients flow as in `ridge_state`.
    On a CPU, the sums of each chunk are formed first, then accumulated in float64. This takes the memory of the results
    twice, and a copy of the rows if `every` does not divide N. On a GPU, chunks of fewer than 16 keys are accumulated
    while they are formed. With heads and prefixes flattened into one axis, `solve_ridge` accepts the states.

    >>> key, value = torch.randn(1, 2, 1000, 8), torch.randn(1, 2, 1000, 3)
    >>> states = cmab_kernels.prefix_ridge_states(key, value, every=300)
    >>> states.count[0, 0].tolist()
    [300, 600, 900, 1000]
    >>> flat = cmab_kernels.RidgeState(*(part.flatten(1, 2) for part in states))
    >>> weight, info = cmab_kernels.solve_ridge(flat, alpha=0.1)
    >>> second = cmab_kernels.intention(key, key[:, :, :600], value[:, :, :600], 0.1)
    >>> torch.allclose(key @ weight.unflatten(1, (2, 4))[:, :, 1].float(), second, atol=1e-5)
    True
    """
    inputs = _inputs(None, key, value, weights, key_padding_mask)
    every = check_every(every)
    batch, heads, length, width = inputs.key.shape
    if state is not None:
        check_ridge(state, (batch, heads, width, inputs.value.shape[-1]), inputs.key.device)
    chosen = choose("intention", impl, inputs.query, inputs.key, inputs.value)
    every = min(every, max(length, 1))
    before, moment_before, _ = state or (None, None, None)
    rows = PrefixRidge(
        inputs.key, inputs.value, inputs.weights, inputs.key_padding_mask, before, moment_before, every, chosen
    )
    # Only Triton has kernels for the sums over all prefixes.
    gram, moment = prefix_ridge_op(rows) if chosen == "triton" else _added_up(rows)
    count = _counts(inputs, every)
    return RidgeState(gram, moment, count if state is None else state.count.unsqueeze(2) + count)


def remove_ridge(
    state: RidgeState,
    key: Tensor,
    value: Tensor,
    *,
    weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    impl: str = "auto",
) -> RidgeState:
    """`state` without these keys, as if it had never seen them. The cost depends on the removed keys alone.

    Arguments and errors are those of `ridge_state`; removing more keys than the state has is a `ValueError`. The error
    of the sums is about 1e-16 of the removed sums; a state from which all keys were removed is
    exactly empty. If the remaining system is not positive definite, `info` of `solve_ridge` shows
    it.

    >>> key, value = torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 3)
    >>> state = cmab_kernels.remove_ridge(cmab_kernels.ridge_state(key, value), key[:, :, :20], value[:, :, :20])
    >>> torch.allclose(state.gram, cmab_kernels.ridge_state(key[:, :, 20:], value[:, :, 20:]).gram)
    True
    """
    removed = ridge_state(key, value, weights=weights, key_padding_mask=key_padding_mask, impl=impl)
    check_ridge(state, removed.moment.shape, removed.gram.device)
    left = subtract_ridge(state, removed)
    refuse_negative("state.count minus the number of removed keys", left.count)
    return left


def solve_ridge(state: RidgeState, alpha: float | Tensor, *, impl: str = "auto") -> RidgeSolution:
    """The ridge regression of the keys in a state: weight (B, H, D, E) = (G + alpha I)^-1 C in float64, and its `info`.

    `alpha` >= 0 as in `intention`; `impl` is "auto", "reference", "native", "cuda" or "triton" (`ValueError`
    otherwise). Differentiable in the state and alpha. `query @ weight.to(query.dtype)` is the result of `intention`.

    >>> state = cmab_kernels.ridge_state(torch.ones(1, 1, 4, 2), torch.randn(1, 1, 4, 1))
    >>> [cmab_kernels.solve_ridge(state, alpha=alpha).info.item() > 0 for alpha in (0.0, 1.0)]
    [True, False]
    """
    check_ridge(state)
    penalty = penalty_of(alpha, state.gram.shape[:2], state.gram.device)
    return solve_heads(state.gram, state.moment, penalty, impl)


class RidgeStep(NamedTuple):
    """The result of `ridge_step`."""

    solution: RidgeSolution
    """The regression of the keys in `state`: weight (B, H, D, E) float64, and its info (B, H)."""
    state: RidgeState
    """The sums that include the new keys: the state for the next step."""


def ridge_step(
    state: RidgeState,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    *,
    decay: float | Tensor | None = None,
    weights: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    impl: str = "auto",
) -> RidgeStep:
    """A step of a streaming regression: add these keys to `state` and solve again, in one native call on a CPU.

    The result equals, bit for bit, `ridge_state` with this `state`, followed by `solve_ridge` with `alpha`. Arguments,
    errors and gradients are those of the two functions. `state` is not changed. A stream begins with the state of
    `empty_ridge`. With a `decay` below 1 this is recursive least squares with a forgetting factor.

    >>> state, stream = cmab_kernels.empty_ridge(1, 2, 8, 3), torch.randn(1, 2, 100, 11)
    >>> for row in stream.split(1, dim=2):
    ...     (weight, info), state = cmab_kernels.ridge_step(state, row[..., :8], row[..., 8:], alpha=0.1)
    >>> both = cmab_kernels.intention(stream[..., :8], stream[..., :8], stream[..., 8:], 0.1)
    >>> torch.allclose(stream[..., :8] @ weight.float(), both, atol=1e-5), int(state.count[0, 0])
    (True, 100)
    """
    inputs = _inputs(None, key, value, weights, key_padding_mask)
    batch, heads, _, width = inputs.key.shape
    check_ridge(state, (batch, heads, width, inputs.value.shape[3]), inputs.key.device)
    penalty = penalty_of(alpha, (batch, heads), inputs.key.device)
    if decay is not None:
        state = decayed_ridge(state, as_decay(decay, (batch, heads), inputs.key.device))
    chosen = choose("intention", impl, inputs.query, inputs.key, inputs.value)
    update = RidgeUpdate(inputs.key, inputs.value, inputs.weights, inputs.key_padding_mask, None, *state, chosen)
    if may_call_native(chosen, *inputs, *state, penalty):
        check_weights(inputs)
        if isinstance(alpha, Tensor):
            refuse_negative("alpha", penalty)
        weight, info, gram, moment, count = kernel("intention", chosen, "ridge_step")(update, penalty)
        return RidgeStep(RidgeSolution(weight, info), RidgeState(gram, moment, count))
    new = RidgeState(*ridge_update_op(update))
    return RidgeStep(solve_heads(new.gram, new.moment, penalty, impl_for(impl, "intention", "intention.solve")), new)


class _Inputs(NamedTuple):
    """Validated arguments, in the dtype of autocast if it is on; weights are (B, H, N) in `state_dtype`.

    Callers pass the fields on by name: the compiler of torch 2.6 cannot slice a NamedTuple.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor | None
    key_padding_mask: Tensor | None


def _inputs(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> _Inputs:
    operands = {"key": key, "value": value} if query is None else {"query": query, "key": key, "value": value}
    check_operands(**operands)
    check_key_value(key, value)
    if cu_seqlens is not None:
        check_offsets_shape(cu_seqlens, key, "key")
    query = key if query is None else over_batch(query, key, heads_of(key, cu_seqlens)[0])
    check_mask(key_padding_mask, key)
    query, key, value = as_autocast(query, key, value)
    return _Inputs(query, key, value, weights_of_heads(weights, key), key_padding_mask)


def solve_rows(
    key: Tensor,
    value: Tensor,
    weights: Tensor | None,
    mask: Tensor | None,
    penalty: Tensor,
    chosen: str,
    solver: str,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(Omega, K'WK, info) with Omega = (K'WK + alpha I)^-1 K'WV, (B, H, D, E), in float64; info (B, H) as in
    `RidgeSolution`. The implementation `chosen` forms the sums, and `solver` solves."""
    gram, moment = gram_op(Gram(key, value, weights, mask, cu_seqlens, impl=chosen))
    weight, info = solve_heads(gram, moment, penalty, solver)
    return weight, gram, info


def _added_up(inputs: PrefixRidge) -> tuple[Tensor, ...]:
    """Return the sums over all prefixes: the accumulated sums of the chunks, plus the incoming sums
    if there are any."""
    key, value, weights, mask, gram, moment, every, impl = inputs
    check_weights(inputs)
    sums = gram_op(Gram(*in_chunks(key, value, weights, mask, every), exact=True, impl=impl))
    shape = (*key.shape[:2], -(-key.shape[2] // every))
    added = (part.squeeze(1).unflatten(0, shape).cumsum(2) for part in sums)
    return tuple(
        part if base is None else base.unsqueeze(2) + part for part, base in zip(added, (gram, moment), strict=True)
    )


def _counts(inputs: _Inputs, every: int) -> Tensor:
    """The number of unmasked keys in each prefix, (B, H, T) int64."""
    batch, heads, length, _ = inputs.key.shape
    device = inputs.key.device
    ends = torch.arange(every, length + every, every, device=device).clamp(max=length)
    if inputs.key_padding_mask is None:
        return ends.expand(batch, heads, -1).clone()
    present = (~inputs.key_padding_mask).cumsum(-1)
    return present[:, ends - 1].unsqueeze(1).expand(-1, heads, -1).clone()


def _dual(inputs: _Inputs, penalty: Tensor, impl: str, solver: str) -> Dual:
    check_weights(inputs)
    return Dual(inputs.key, inputs.weights, inputs.key_padding_mask, penalty, impl, solver)
