"""Latent cross-attention with a mergeable state: the public functions."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..runtime.backends import choose, is_available, kernel
from ..runtime.checks import (
    as_autocast,
    as_decay,
    as_flag,
    check_broadcast,
    check_floats,
    check_key_value,
    check_mask,
    check_offsets_shape,
    check_operands,
    fixed,
    mismatch,
    not_a_tensor,
    over_batch,
)
from ..runtime.dtypes import default_scale, state_dtype
from ..runtime.tracing import is_differentiated, may_bypass_dispatcher, may_call_native
from .contract import Attention
from .schema import attention_op
from .state import AttentionState, Removal, check_mergeable, check_state, decayed, merged, subtract_state


def latent_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    key_bias: Tensor | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Tensor:
    """softmax(scale Q K') V for few queries and any number of keys. Memory does not grow with the number of keys.

    Args:
        query: (B, H, L, D), or (H, L, D) shared over the batch. float64, float32, bfloat16 or float16.
        key: (B, H, N, D), any strides; N may be 0.
        value: (B, H, N, E).
        key_padding_mask: (B, N) bool, True = ignore, as in `torch.nn.MultiheadAttention`.
        cu_seqlens: (S + 1,) int32 or int64 offsets that rise from 0 to at most N. Key and value then have batch 1 and
            hold S sets of keys, one after the other: set s goes from cu_seqlens[s] to cu_seqlens[s + 1]. Rows from
            cu_seqlens[S] on belong to no set: they are never read, and their gradients are 0. A query (B, H, L, D) and
            the result have batch S. key_padding_mask is then (1, N). On a GPU the offsets are not read, because reading
            would make the program wait: wrong offsets make every result and gradient NaN there.
        scale: factor of the scores; None means D ** -0.5.
        key_bias: a floating tensor that broadcasts to (B, H, N), with the heads of key: it is added to every score of
            its key, after the scale. log(w) gives a key the weight w. Broadcast axes are not
            expanded in memory. A key with a bias of -inf is ignored. A bias of NaN or +inf gives
            NaN in every row that sees the key. Biases are added in float32 (float64 for float64
            inputs).
        enable_gqa: as in torch's `scaled_dot_product_attention`, query and result may have a multiple of the heads Hk
            of key and value: head h reads the keys of head h // (H / Hk). The keys are read once for all heads of a
            group, and not copied.
        impl: "auto", "reference", "native" or "triton".

    Returns:
        (B, H, L, E) in the dtype of query; 0 where a query sees no key. Differentiable to any order in query, key,
        value and key_bias.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or values; the message names it.
        RuntimeError: `impl` cannot run here.

    Source: Memory Efficient Neural Processes via Constant Memory Attention Block (Feng et al., ICML 2024), section 4.

    >>> latents, points = torch.randn(4, 16, 8), torch.randn(2, 4, 1000, 8)
    >>> cmab_kernels.latent_attention(latents, points, points).shape
    torch.Size([2, 4, 16, 8])
    >>> counts = torch.full((1000,), 3.0)  # how often each point counts
    >>> weighted = cmab_kernels.latent_attention(latents, points, points, key_bias=counts.log())
    >>> thrice = points.repeat(1, 1, 3, 1)
    >>> torch.allclose(weighted, cmab_kernels.latent_attention(latents, thrice, thrice), atol=1e-5)
    True
    >>> cmab_kernels.latent_attention(torch.randn(8, 16, 8), points, points, enable_gqa=True).shape
    torch.Size([2, 8, 16, 8])
    """
    inputs = _inputs(query, key, value, key_padding_mask, cu_seqlens, scale, key_bias, enable_gqa)
    return _heads_apart(_state(inputs, None, impl).out.to(inputs.query.dtype), inputs.groups)


def attention_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    state: AttentionState | None = None,
    decay: float | Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    key_bias: Tensor | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> AttentionState:
    """The attention state of these keys, merged with `state` if one is given. The cost depends on the new keys alone.

    Arguments and errors are those of `latent_attention`. `state` summarises other keys for the same queries: out (B, H,
    L, E) in float32 (float64 for float64 inputs) and lse (B, H, L) in float64. `state` is not changed. Gradients flow
    to query, key, value, key_bias and the state's `out` and `lse`. A row whose lse is -inf is
    empty, whatever `out` holds. On the CPU, an lse of +inf raises a `ValueError`, and so does an
    lse of NaN in a row whose `out` holds numbers. On a GPU and in traces such an lse makes its row
    NaN.

    `decay` lets old keys fade: it multiplies the weight exp(S) of every key in `state`, and so adds log(decay) to its
    logit S and to the state's lse. After t further calls a key has the weight decay^t exp(S). `decay` is a number in
    (0, 1], or a tensor of such numbers that broadcasts to (B, H, L) and may require a gradient;
    None means 1. Other numbers raise a `ValueError`. On a GPU and in traces the numbers in a tensor
    are not checked, and wrong numbers give NaN in their rows. Without `state`, `decay` has no
    effect.

    >>> latents, points = torch.randn(4, 16, 8), torch.randn(2, 4, 1000, 8)
    >>> state = None
    >>> for chunk in points.split(100, dim=2):
    ...     state = cmab_kernels.attention_state(latents, chunk, chunk, state=state)
    >>> torch.allclose(state.out, cmab_kernels.latent_attention(latents, points, points), atol=1e-5)
    True
    """
    inputs = _inputs(query, key, value, key_padding_mask, cu_seqlens, scale, key_bias, enable_gqa)
    if state is not None:
        _check_incoming(state, inputs)
    if decay is not None:
        decay = as_decay(decay, _rows_of(inputs), inputs.query.device)
        state = None if state is None else decayed(state, decay)
    return _state_of_heads(_state(inputs, state, impl), inputs.groups)


def merge_states(first: AttentionState, *others: AttentionState) -> AttentionState:
    """The state of the union of disjoint sets of keys; associative and commutative up to rounding, differentiable.

    lse = log sum_i exp(lse_i), out = sum_i exp(lse_i - lse) out_i, with weights in float64. Every state must have the
    shapes, dtypes and device of the first (`ValueError`, `TypeError`). A state is empty where its lse is -inf: it has
    weight 0 there, whatever its `out` holds. The merge of empty states is empty. On the CPU, an lse of
    +inf raises a `ValueError`, and so does an lse of NaN in a row whose `out` holds numbers. On a GPU
    and in traces such an lse makes its row NaN.

    >>> q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
    >>> halves = [cmab_kernels.attention_state(q, k[:, :, s], v[:, :, s]) for s in (slice(0, 5), slice(5, 10))]
    >>> merged = cmab_kernels.merge_states(*halves)
    >>> torch.allclose(merged.out, cmab_kernels.attention_state(q, k, v).out, atol=1e-6)
    True
    """
    states = (first, *others)
    for position, state in enumerate(states):
        check_mergeable(state, f"states[{position}]", first if position else None)
    return union(*states)


def union(first: AttentionState, *others: AttentionState) -> AttentionState:
    """`merge_states` for states that are already checked."""
    states = (first, *others)
    chosen = "native" if first.out.device.type == "cpu" and is_available("attention", "native") else "reference"
    if not others or not may_call_native(chosen, *(part for state in states for part in state)):
        return merged(*states)  # also for a single state, because its empty rows may hold any numbers
    merge = kernel("attention", "native", "merge_states")
    for other in others:
        first = AttentionState(*merge(*first, *other))
    return first


def remove_from_state(
    state: AttentionState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    key_bias: Tensor | None = None,
    enable_gqa: bool = False,
    impl: str = "auto",
) -> Removal:
    """`state` without these keys, as if it had never seen them. The cost depends on the removed keys alone.

    Arguments and errors are those of `attention_state`, and keys need the `key_bias` that they were added with.
    `reliable` (B, H, L) says which rows can be trusted. It is False where less than sqrt(eps) of a row's mass is left:
    cancellation then costs more than half of the digits. A row with no mass left becomes empty. `reliable` is also
    False where removed keys have logits near the largest one and less than 32 eps abs(lse) of the
    mass is left. This rest may be a rounding error, because logits may have been computed in
    another way when the keys were added. Logits beyond 2^18 in float32 and 2^47 in float64 always
    meet this condition on the mass.

    >>> q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
    >>> state = cmab_kernels.attention_state(q, k, v)
    >>> state, reliable = cmab_kernels.remove_from_state(state, q, k[:, :, :4], v[:, :, :4])
    >>> rest = cmab_kernels.attention_state(q, k[:, :, 4:], v[:, :, 4:])
    >>> torch.allclose(state.out, rest.out, atol=1e-4), bool(reliable.all())
    (True, True)
    """
    inputs = _inputs(query, key, value, key_padding_mask, None, scale, key_bias, enable_gqa)
    _check_incoming(state, inputs)
    chosen = choose("attention", impl, inputs.query, inputs.key, inputs.value)
    tensors = *state, inputs.query, inputs.key, inputs.value, inputs.key_padding_mask, inputs.key_bias
    if chosen != "reference" and not is_differentiated(*tensors) and may_bypass_dispatcher(*tensors):
        out, lse, reliable = (
            _heads_apart(part, inputs.groups)
            for part in kernel("attention", chosen, "attention_removal")(_contract(inputs, state, chosen))
        )
        return Removal(AttentionState(out, lse), reliable)
    return subtract_state(state, _state_of_heads(_state(inputs, None, impl), inputs.groups))


class _Inputs(NamedTuple):
    """Validated arguments, in the dtype of autocast if it is on; query is (B, Hk, L, D), expanded over the batch.

    All query heads that read the same key head are joined to one head: L is `groups` times the
    number of queries of a head. Callers pass the fields on by name: the compiler of torch 2.6
    cannot slice a NamedTuple.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None
    cu_seqlens: Tensor | None
    key_bias: Tensor | None
    scale: float
    groups: int


def _rows_of(inputs: _Inputs) -> tuple[int, int, int]:
    """The caller's sizes (B, H, L)."""
    batch, heads, latents, _ = inputs.query.shape
    return batch, heads * inputs.groups, latents // inputs.groups


def _check_incoming(state: AttentionState, inputs: _Inputs) -> None:
    query = inputs.query
    check_state(state, (*_rows_of(inputs), inputs.value.shape[3]), state_dtype(query.dtype), query.device)


def _heads_together(part: Tensor, groups: int) -> Tensor:
    """(B, H, L, ...) as (B, H / groups, groups L, ...): a view, unless the heads lie apart in memory."""
    if groups == 1:
        return part
    batch, heads, latents = part.shape[:3]
    return part.reshape(batch, heads // groups, groups * latents, *part.shape[3:])


def _heads_apart(part: Tensor, groups: int) -> Tensor:
    """(B, Hk, L, ...) as (B, groups Hk, L / groups, ...), a view of a result."""
    if groups == 1:
        return part
    batch, heads, latents = part.shape[:3]
    return part.reshape(batch, groups * heads, latents // groups, *part.shape[3:])


def _state_of_heads(state: AttentionState, groups: int) -> AttentionState:
    return AttentionState(*(_heads_apart(part, groups) for part in state)) if groups > 1 else state


def _state(inputs: _Inputs, state: AttentionState | None, impl: str) -> AttentionState:
    """The state of the keys, merged with `state` unless that is None."""
    chosen = choose("attention", impl, inputs.query, inputs.key, inputs.value)
    return AttentionState(*attention_op(_contract(inputs, state, chosen)))


def _contract(inputs: _Inputs, state: AttentionState | None, impl: str) -> Attention:
    out, lse = (None, None) if state is None else (_heads_together(part, inputs.groups) for part in state)
    return Attention(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.key_padding_mask,
        inputs.cu_seqlens,
        out,
        lse,
        inputs.key_bias,
        inputs.scale,
        impl,
    )


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    key_bias: Tensor | None,
    enable_gqa: bool,
) -> _Inputs:
    check_operands(query=query, key=key, value=value)
    check_key_value(key, value)
    sets = key.shape[0] if cu_seqlens is None else check_offsets_shape(cu_seqlens, key, "key")
    groups = _groups(query, key, enable_gqa)
    query = over_batch(query, key, sets, groups, _NAME_GQA)
    check_mask(key_padding_mask, key)
    query, key, value = as_autocast(_heads_together(query, groups), key, value)
    scale = default_scale(key.shape[-1]) if scale is None else fixed(scale)
    if key_bias is not None:
        key_bias = of_keys(key_bias, key)
    return _Inputs(query, key, value, key_padding_mask, cu_seqlens, key_bias, scale, groups)


def of_keys(key_bias: Tensor, key: Tensor) -> Tensor:
    """A bias that broadcasts to (B, H, N) as a view of that shape, in `state_dtype`. Raise if it does not fit."""
    if not isinstance(key_bias, Tensor):
        raise TypeError(not_a_tensor("key_bias", key_bias, "a floating torch.Tensor"))
    check_floats("key_bias", key_bias)
    check_broadcast("key_bias", key_bias, key.shape[:3], key.device)
    return key_bias.to(key.device, state_dtype(key.dtype)).expand(key.shape[:3])


_NAME_GQA = "; with enable_gqa=True a query may have a multiple of the heads of key"


def _groups(query: Tensor, key: Tensor, enable_gqa: bool) -> int:
    """How many heads of the query read one head of the key."""
    if enable_gqa is False or not as_flag("enable_gqa", enable_gqa):
        return 1
    given, heads = query.shape[-3] if query.dim() in (3, 4) else key.shape[1], key.shape[1]
    if given == heads:
        return 1
    if not heads or not given or given % heads:
        raise ValueError(mismatch("query", f"{given} heads", f"a multiple of {heads}, the heads of key"))
    return given // heads
