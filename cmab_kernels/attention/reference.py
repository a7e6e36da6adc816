"""The definition of latent cross-attention, in plain PyTorch.

A query row q sees the keys k_i with the values v_i. The scores are S_i = scale q k_i' + b_i, where
the bias b_i is 0 if there is none. A key with a bias of -inf is not seen.

    lse = log sum_i exp(S_i)            out = sum_i exp(S_i - lse) v_i

(Constant Memory Attention Block, Feng et al.; online softmax, Milakov and Gimelshein). Without any key, out = 0 and
lse = -inf. Gradient, with P_i = exp(S_i - lse), given dout and dlse:

    dV = P' dout      dS = P * (dout V' - rowsum(dout * out) + dlse)      dQ = scale dS K      dK = scale dS' Q
    db_i = sum over the queries of dS_i

This definition stores all L x N scores. The kernels are tested against it, and it provides the derivatives of second
and higher order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..runtime.dtypes import state_dtype


def ignored_keys(
    key: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None, key_bias: Tensor | None = None
) -> Tensor | None:
    """(B, 1, N) bool, with a bias (B, H, N), True where batch element b may not see key i; None if every element sees
    all keys."""
    ignore = None if key_padding_mask is None else key_padding_mask[:, None]
    if cu_seqlens is not None:
        position = torch.arange(key.shape[2], device=key.device)
        outside = ((position < cu_seqlens[:-1, None]) | (position >= cu_seqlens[1:, None]))[:, None]
        ignore = outside if ignore is None else outside | ignore
    if key_bias is not None:
        excluded = key_bias == -math.inf
        ignore = excluded if ignore is None else excluded | ignore
    return ignore


def visible(key: Tensor, ignore: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Keys or values (B, H, N, *) in `dtype`, with zeros for ignored keys, so that a NaN in padding has no effect."""
    key = key.to(dtype)
    return key if ignore is None else key.masked_fill(ignore[..., None], 0.0)


def attention_scores(
    query: Tensor, key: Tensor, ignore: Tensor | None, scale: float, key_bias: Tensor | None = None
) -> Tensor:
    """The scores S (B, H, L, N), -inf where a key is ignored."""
    scores = scale * (query @ key.mT)
    if key_bias is not None:
        scores = scores + key_bias[..., None, :]
    return scores if ignore is None else scores.masked_fill(ignore[..., None, :], -math.inf)


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the definition above; out in `state_dtype`, lse in float64."""
    dtype = state_dtype(query.dtype)
    ignore = ignored_keys(key, key_padding_mask, cu_seqlens, key_bias)
    value = visible(value, ignore, dtype)
    scores = attention_scores(query.to(dtype), visible(key, ignore, dtype), ignore, scale, key_bias)
    if scores.shape[-1] == 0:
        return scores @ value, scores.sum(-1).double() - math.inf  # no keys: 0 and -inf, still attached to the graph
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    weight = (scores - top).exp()
    total = weight.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (top.double() + total.double().log()).masked_fill(empty, -math.inf)
    return weight / total @ value, lse.squeeze(-1)


def attention_backward_reference(
    dout: Tensor,
    dlse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dquery, dkey, dvalue, dkey_bias) by the formula above, in the dtypes of query, key, value and key_bias.

    `out` and `lse` may include an earlier state. Without a bias, the last is empty.
    """
    dtype = out.dtype
    ignore = ignored_keys(key, key_padding_mask, cu_seqlens, key_bias)
    q, k, v = query.to(dtype), visible(key, ignore, dtype), visible(value, ignore, dtype)
    seen = lse.masked_fill(lse == -math.inf, 0.0)[..., None]
    weight = (attention_scores(q, k, ignore, scale, key_bias).double() - seen).exp().to(dtype)
    dweight = dout @ v.mT - (dout * out).sum(-1, keepdim=True) + dlse[..., None].to(dtype)
    dscores = scale * weight * dweight
    dkey, dvalue = dscores.mT @ q, weight.mT @ dout
    dbias = query.new_empty(0) if key_bias is None else (weight * dweight).sum(-2)
    if cu_seqlens is not None:  # sets share one row of keys, and a key gets a gradient from its own set only
        dkey, dvalue = dkey.sum(0, keepdim=True), dvalue.sum(0, keepdim=True)
        dbias = dbias if key_bias is None else dbias.sum(0, keepdim=True)
    return (dscores @ k).to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), dbias
