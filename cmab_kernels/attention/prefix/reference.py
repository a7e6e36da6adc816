"""The definition of the states of all prefixes, in plain PyTorch.

Prefix t = 0 .. T - 1 is the first (t + 1) `every` keys; the last prefix is all N keys; T = ceil(N / every). The scores
are S_i = scale q k_i'. An incoming state (out_s, lse_s) counts as one more key of every prefix, with score lse_s and
value out_s:

    lse_t = log sum_{i in prefix t} exp(S_i)            out_t = sum_{i in prefix t} exp(S_i - lse_t) v_i

Gradient, with P_ti = exp(S_i - lse_t) for the keys of prefix t and 0 for the others, given dout_t and dlse_t:

    dv_i = sum_t P_ti dout_t          dS_i = sum_t P_ti (dout_t.v_i - dout_t.out_t + dlse_t)

Here each prefix is a separate set of keys, so that T L N scores are stored. Kernels need not store scores. Let chunk t
be the keys between prefix t - 1 and prefix t. Chunk t is part of the prefixes t' = t, t + 1, ..., and
P_t'i = exp(lse_t - lse_t') P_ti. The gradients from these prefixes therefore add up in a reverse scan,

    A_t = dout_t + exp(lse_t - lse_{t+1}) A_{t+1}       c_t = dlse_t - dout_t.out_t + exp(lse_t - lse_{t+1}) c_{t+1}

and the keys of chunk t have dv_i = P_ti A_t and dS_i = P_ti (A_t.v_i + c_t): the gradient of attention, with A_t in
place of dout. Since lse does not fall from one prefix to the next, no factor exceeds 1, whatever the logits. The
incoming state is a chunk before the first.
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


def prefix_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    state_out: Tensor | None,
    state_lse: Tensor | None,
    every: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of every prefix: (B, H, T, L, E) in `state_dtype`, (B, H, T, L) in float64."""
    prefixes = -(-key.shape[2] // every)
    q, k, v = (each_prefix(rows, prefixes) for rows in (query, key, value))
    states = AttentionState(*attention_reference(q, k, v, beyond_prefix(key, key_padding_mask, every), None, scale))
    if state_out is not None and state_lse is not None:
        states = merged(AttentionState(each_prefix(state_out, prefixes), each_prefix(state_lse, prefixes)), states)
    out, lse = (part.unflatten(0, (key.shape[0], prefixes)).transpose(1, 2) for part in states)
    return out, lse


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
) -> tuple[Tensor, ...]:
    """(dquery, dkey, dvalue, dstate_out, dstate_lse) as defined above, in the dtypes of the inputs.

    Without an incoming state, the last two are empty.
    """
    prefixes = out.shape[2]
    inputs = (query, key, value)
    q, k, v = (each_prefix(rows.to(state_dtype(rows.dtype)), prefixes) for rows in inputs)
    douts, dlses, outs, lses = (part.transpose(1, 2).flatten(0, 1) for part in (dout, dlse, out, lse))
    each = attention_backward_reference(
        douts, dlses, q, k, v, beyond_prefix(key, key_padding_mask, every), None, outs, lses, scale
    )
    grads = tuple(
        grad.unflatten(0, (query.shape[0], prefixes)).sum(1).to(like.dtype)
        for grad, like in zip(each[:3], inputs, strict=True)
    )
    if state_out is None or state_lse is None:
        return *grads, query.new_empty(0), query.new_empty(0)
    before = AttentionState(state_out.unsqueeze(2), state_lse.unsqueeze(2))
    down, slope = share_gradient(before, AttentionState(out, lse), dout, dlse)
    return *grads, down.sum(2).to(state_out.dtype), slope.sum(2)
