"""The definition of the states of all prefixes, in plain PyTorch.

There are T = ceil(N / every) prefixes t = 0 .. T - 1. Prefix t consists of the first (t + 1)
`every` keys, and the last prefix of all N keys. The scores are S_i = scale q k_i' + b_i, where the
bias b_i is 0 if there is none. Chunk t consists of the keys that prefix t has and prefix t - 1
lacks. The number f_t (`log_decay`, or 0) is added, before chunk t, to the scores of all earlier
keys. In prefix t, the keys of chunk j then have the scores S_i + F_tj with F_tj = f_{j+1} + ... +
f_t. An incoming state (out_s, lse_s) counts as one more key of every prefix, in a chunk before the
first, with score lse_s and value out_s:

    lse_t = log sum_{i in prefix t} exp(S_i + F_tj)     out_t = sum_{i in prefix t} exp(S_i + F_tj - lse_t) v_i

This is the recurrence exp(lse_t) = exp(f_t + lse_{t-1}) + sum_{i in chunk t} exp(S_i).

Gradient, with P_ti = exp(S_i + F_tj - lse_t) for the keys of prefix t and 0 for the others, given dout_t and dlse_t:

    dv_i = sum_t P_ti dout_t          dS_ti = P_ti (dout_t.v_i - dout_t.out_t + dlse_t)
    db_i = sum over queries and t of dS_ti
    df_u = sum over queries, t >= u and the keys i of chunks before u of dS_ti, with the incoming state as a key

Here each prefix is a separate set of keys, so that T L N scores are stored. Kernels need not store scores. Chunk t is
part of the prefixes t' = t, t + 1, ..., and P_t'i = s_t+1 ... s_t' P_ti with the share s_t =
exp(lse_{t-1} + f_t - lse_t) of the keys before chunk t. The gradients from these prefixes therefore
add up in a reverse scan,

    A_t = dout_t + s_{t+1} A_{t+1}                      c_t = dlse_t - dout_t.out_t + s_{t+1} c_{t+1}

and the keys of chunk t have dv_i = P_ti A_t and dS_i = P_ti (A_t.v_i + c_t): the gradient of attention, with A_t in
place of dout. By the recurrence, no share exceeds 1, for any logits. The gradient of f_t is that of
a key with the score lse_{t-1} + f_t and the value out_{t-1}: df_t is the sum of s_t (A_t.out_{t-1}
+ c_t) over the queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.dtypes import state_dtype
from ..reference import attention_backward_reference, attention_reference
from ..state import AttentionState, merged, share_gradient


def each_prefix(tensor: Tensor, prefixes: int) -> Tensor:
    """(B, ...) repeated for every prefix: (B T, ...)."""
    return tensor.unsqueeze(1).expand(-1, prefixes, *tensor.shape[1:]).flatten(0, 1)


def beyond_prefix(key: Tensor, key_padding_mask: Tensor | None, every: int) -> Tensor:
    """(B T, N) bool, True where key i is not in prefix t of batch element b, or is masked."""
    batch, _, length, _ = key.shape
    prefixes = -(-length // every)
    chunk = torch.arange(length, device=key.device) // every
    beyond = (chunk > torch.arange(prefixes, device=key.device).unsqueeze(-1)).repeat(batch, 1)
    return beyond if key_padding_mask is None else beyond | each_prefix(key_padding_mask, prefixes)


def _chunk_of_key(key: Tensor, every: int) -> Tensor:
    return torch.arange(key.shape[2], device=key.device) // every


def _faded(log_decay: Tensor) -> Tensor:
    """F_tj (B, H, T, T + 1) for j = -1, the incoming state, to T - 1. The sums start at chunk t, so
    that rounding affects old keys more than new keys."""
    prefixes = log_decay.shape[-1]
    each = log_decay[..., None, :].expand(*log_decay.shape, prefixes).tril()
    return torch.nn.functional.pad(each.flip(-1).cumsum(-1).flip(-1), (0, 1))


def _biases(
    key: Tensor, beyond: Tensor, key_bias: Tensor | None, log_decay: Tensor | None, every: int
) -> tuple[Tensor | None, Tensor | float]:
    """Return the biases b_i + F_tj of each prefix less their maximum, (B T, H, N) in `state_dtype`,
    and this maximum, (B T, H, 1) in float64. The biases are None if there is neither b nor F.
    Because of the subtraction, only biases of faded keys are rounded."""
    prefixes = -(-key.shape[2] // every)
    if log_decay is None or not prefixes:
        return None if key_bias is None else each_prefix(key_bias, prefixes), 0.0
    faded = _faded(log_decay)[..., 1:].index_select(-1, _chunk_of_key(key, every))
    bias = (faded if key_bias is None else key_bias[:, :, None] + faded).transpose(1, 2).flatten(0, 1)
    top = bias.detach().masked_fill(beyond[:, None], -torch.inf).amax(-1, keepdim=True)
    top = top.masked_fill(~top.isfinite(), 0.0)
    return (bias - top).to(state_dtype(key.dtype)), top


def _held_before(state_out: Tensor, state_lse: Tensor, prefixes: int, log_decay: Tensor | None) -> AttentionState:
    """The incoming state with its decay in each prefix, with the shapes (B, H, T, L, E) and (B, H,
    T, L)."""
    out, lse = (part.unsqueeze(2).expand(-1, -1, prefixes, *part.shape[2:]) for part in (state_out, state_lse))
    return AttentionState(out, lse if log_decay is None else lse + _faded(log_decay)[..., :1])


def prefix_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    state_out: Tensor | None,
    state_lse: Tensor | None,
    every: int,
    scale: float,
    key_bias: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of every prefix: (B, H, T, L, E) in `state_dtype`, (B, H, T, L) in float64."""
    prefixes = -(-key.shape[2] // every)
    q, k, v = (each_prefix(rows, prefixes) for rows in (query, key, value))
    beyond = beyond_prefix(key, key_padding_mask, every)
    biases, top = _biases(key, beyond, key_bias, log_decay, every)
    out, lse = attention_reference(q, k, v, beyond, None, scale, biases)
    parts = (part.unflatten(0, (key.shape[0], prefixes)).transpose(1, 2) for part in (out, lse + top))
    states = AttentionState(*parts)
    if state_out is not None and state_lse is not None:
        states = merged(_held_before(state_out, state_lse, prefixes, log_decay), states)
    return states.out, states.lse


def prefix_attention_backward_reference(
    dout: Tensor,
    dlse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    state_out: Tensor | None,
    state_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    every: int,
    scale: float,
    key_bias: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(dquery, dkey, dvalue, dstate_out, dstate_lse, dkey_bias, dlog_decay) as defined above, in the dtypes of the
    inputs.

    The gradient of a tensor that is not given is empty.
    """
    prefixes = out.shape[2]
    inputs = (query, key, value)
    q, k, v = (each_prefix(rows.to(state_dtype(rows.dtype)), prefixes) for rows in inputs)
    douts, dlses, outs, lses = (part.transpose(1, 2).flatten(0, 1) for part in (dout, dlse, out, lse))
    beyond = beyond_prefix(key, key_padding_mask, every)
    biases, top = _biases(key, beyond, key_bias, log_decay, every)
    each = attention_backward_reference(douts, dlses, q, k, v, beyond, None, outs, lses - top, scale, biases)
    grads = tuple(
        grad.unflatten(0, (query.shape[0], prefixes)).sum(1).to(like.dtype)
        for grad, like in zip(each[:3], inputs, strict=True)
    )
    nothing = query.new_empty(0)
    down, slope = nothing, nothing
    if state_out is not None and state_lse is not None:
        before = _held_before(state_out, state_lse, prefixes, log_decay)
        down, slope = share_gradient(before, AttentionState(out, lse), dout, dlse)
    of_biases = each[3].unflatten(0, (query.shape[0], prefixes)) if each[3].dim() == 3 else each[3]  # (B, T, H, N)
    dlog_decay = nothing
    if log_decay is not None:
        of_chunks = of_biases.new_zeros(*out.shape[:3], prefixes, dtype=torch.float64).index_add(
            -1, _chunk_of_key(key, every), of_biases.transpose(1, 2).double()
        )
        of_older = torch.nn.functional.pad(of_chunks.cumsum(-1), (1, 0))[..., :-1]  # (B, H, T, u): of chunks before u
        of_older = of_older if state_out is None else of_older + slope.sum(-1)[..., None]
        dlog_decay = of_older.tril().sum(-2)
    return (
        *grads,
        nothing if state_out is None else down.sum(2).to(state_out.dtype),
        nothing if state_out is None else slope.sum(2),
        nothing if key_bias is None else of_biases.sum(1),
        dlog_decay,
    )
