"""The states of all prefixes on the CPU: calls into csrc/prefix, which fills the tensors that are allocated here."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.dtypes import state_dtype
from ...runtime.extension import load
from ..native import unsupported as unsupported
from .contract import PrefixAttention, PrefixAttentionBackward

_C = load()


def prefix_forward(inputs: PrefixAttention) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of every prefix."""
    query, key, value, mask, state_out, state_lse, key_bias, log_decay, every, scale, _ = inputs
    batch, heads, latents, _ = query.shape
    shape = (batch, heads, -(-key.shape[2] // every), latents)
    out = query.new_empty((*shape, value.shape[3]), dtype=state_dtype(query.dtype))
    lse = query.new_empty(shape, dtype=torch.float64)
    _C.prefix_forward(
        query=query,
        key=key,
        value=value,
        key_padding_mask=mask,
        state_out=state_out,
        state_lse=state_lse,
        key_bias=key_bias,
        log_decay=log_decay,
        every=every,
        scale=scale,
        out=out.flatten(2, 3),
        lse=lse.flatten(2, 3),
    )
    return out, lse


def prefix_backward(inputs: PrefixAttentionBackward) -> tuple[Tensor, ...]:
    """Return (dquery, dkey, dvalue, dstate_out, dstate_lse, dkey_bias, dlog_decay), contiguous; tensors that are not in
    `needs` are empty.

    `dout` and `dlse` are copied if their prefixes and queries are not evenly spaced in memory.
    """
    dout, dlse, query, key, value, mask, *state, out, lse, key_bias, log_decay, every, scale, needs, _ = inputs
    state_out, state_lse = state
    like = (query, key, value, state_out, state_lse, key_bias, log_decay)
    grads = tuple(
        query.new_empty(0) if t is None or not need else t.new_empty(t.shape)
        for t, need in zip(like, needs, strict=True)
    )
    names = ("dquery", "dkey", "dvalue", "dstate_out", "dstate_lse", "dkey_bias", "dlog_decay")
    _C.prefix_backward(
        query=query,
        key=key,
        value=value,
        key_padding_mask=mask,
        state_out=state_out,
        state_lse=state_lse,
        key_bias=key_bias,
        log_decay=log_decay,
        every=every,
        scale=scale,
        dout=dout.flatten(2, 3),
        dlse=dlse.flatten(2, 3),
        out=out.contiguous().flatten(2, 3),
        lse=lse.contiguous().flatten(2, 3),
        **{name: grad if need else None for name, grad, need in zip(names, grads, needs, strict=True)},
    )
    return grads
