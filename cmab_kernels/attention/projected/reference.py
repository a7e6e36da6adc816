"""The definition of attention over projected inputs, in plain PyTorch.

For each of K stacked blocks, with rows x of the inputs, and x^ = x, or with a norm
x^ = (x - mean) / sqrt(variance + eps):

    (k, v) = x^ W' + b          (out, lse) = the attention of the block's queries over k and v

The rows of W (H D + H E, C) are the projections to the keys of all heads, then the projections to the values. The api
folds a LayerNorm with weight w and bias u into W and b: LN(x) W' + b = x^ (W w)' + (W u + b).
The gradient, given dk and dv of the attention, joined to dy:

    dW = dy' x^      db = sum dy      dx^ = sum over blocks of dy W
    dx = (dx^ - mean(dx^) - x^ mean(dx^ x^)) / sqrt(variance + eps)

This definition stores keys, values and all scores. The kernels are tested against it, and it provides the derivatives
of second and higher order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import attention_backward_reference, attention_reference


def normed_rows(
    inputs: Tensor, key_padding_mask: Tensor | None, eps: float | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """x^ (B, N, C) in `dtype`, and 1 / sqrt(variance + eps) (B, N, 1), None without a norm. Ignored rows x are 0."""
    rows = inputs.to(dtype)
    if key_padding_mask is not None:
        rows = rows.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
    if eps is None:
        return rows, None
    centred = rows - rows.mean(-1, keepdim=True)
    factor = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * factor, factor


def projected_heads(normed: Tensor, weight: Tensor, bias: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Keys (B, H, N, D) and values (B, H, N, E) of one block: the projections of normed (B, N, C) by weight (H D + H E,
    C)."""
    projected = normed @ weight.mT + bias
    split = (heads * width, projected.shape[-1] - heads * width)
    key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in projected.split(split, dim=-1))
    return key, value


def projected_attention_reference(
    query: Tensor,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    eps: float | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the definition above, stacked over the K blocks of query (K, B, H, L, D), weight (K, P, C) and bias
    (K, P)."""
    _, _, heads, _, width = query.shape
    normed, _ = normed_rows(inputs, key_padding_mask, eps, weight.dtype)
    blocks = [
        attention_reference(q, *projected_heads(normed, w, b, heads, width), key_padding_mask, cu_seqlens, scale)
        for q, w, b in zip(query.unbind(), weight.unbind(), bias.unbind(), strict=True)
    ]
    out, lse = zip(*blocks, strict=True)
    return torch.stack(out), torch.stack(lse)


def projected_attention_backward_reference(
    dout: Tensor,
    dlse: Tensor,
    query: Tensor,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    eps: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dquery, dinputs, dweight, dbias) by the formula above. `out` and `lse` may include an earlier state."""
    _, _, heads, _, width = query.shape
    normed, factor = normed_rows(inputs, key_padding_mask, eps, weight.dtype)
    dnormed, parts = torch.zeros_like(normed), []
    for i in range(query.shape[0]):
        key, value = projected_heads(normed, weight[i], bias[i], heads, width)
        dquery, *dheads, _ = attention_backward_reference(
            dout[i], dlse[i], query[i], key, value, key_padding_mask, cu_seqlens, out[i], lse[i], scale
        )
        dprojected = torch.cat([part.transpose(1, 2).flatten(2) for part in dheads], -1)
        dnormed = dnormed + dprojected @ weight[i]
        parts.append((dquery, (dprojected.mT @ normed).sum(0), dprojected.sum((0, 1))))
    if factor is not None:
        slope = dnormed - dnormed.mean(-1, keepdim=True) - normed * (dnormed * normed).mean(-1, keepdim=True)
        dnormed = slope * factor
    if key_padding_mask is not None:
        dnormed = dnormed.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
    dquery, dweight, dbias = (torch.stack(part) for part in zip(*parts, strict=True))
    return dquery, dnormed.to(inputs.dtype), dweight, dbias
