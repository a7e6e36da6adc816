"""The definition of Intention, in plain PyTorch.

Keys k_i with values v_i, weights w_i >= 0 (1 by default) and a penalty alpha >= 0 determine two sums and a solution:

    G = K'WK = sum_i w_i k_i' k_i        C = K'WV = sum_i w_i k_i' v_i        Omega = (G + alpha I)^-1 C

    intention        out = Q Omega                                     primal, D x D
                     out = Q K' Y,  Y = (W K K' + alpha I)^-1 W V      dual, N x N
    sigma-intention  out = softmax(scale Q (G + alpha I)^-1 K') V

The primal and the dual form give the same result (push-through identity). Source: Exploring the
Space of Key-Value-Query Models with Intention (Garnelo and Czarnecki). The gradients, given dG and
dC, with S = dG + dG', are

    u_i = S k_i + dC v_i     y_i = dC' k_i
    dk_i = w_i u_i           dv_i = w_i y_i           dw_i = (k_i.S k_i) / 2 + k_i.(dC v_i)

Each packed set has its own sums. This definition reads all rows for each set, and masks the rows of
the other sets. So it needs temporaries of all rows for each set.

The solve and its gradient are defined in `solve/reference.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.dtypes import state_dtype
from .state import in_chunks


def rows_of(rows: Tensor, key_padding_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows (B, H, N, *) in `dtype`, with zeros for masked rows, so that a NaN in padding has no effect."""
    rows = rows.to(dtype)
    return rows if key_padding_mask is None else rows.masked_fill(key_padding_mask[:, None, :, None], 0.0)


def weights_of(weights: Tensor | None, key_padding_mask: Tensor | None, dtype: torch.dtype) -> Tensor | float:
    """Weights as a column (B, H, N, 1) in `dtype`, with zeros for masked keys; the number 1 if `weights` is None."""
    return 1.0 if weights is None else rows_of(weights.unsqueeze(-1), key_padding_mask, dtype)


def _outside_set(key: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """(S, N) bool, True where set s does not have row i, or the row is masked."""
    position = torch.arange(key.shape[2], device=key.device)
    outside = (position < cu_seqlens[:-1, None]) | (position >= cu_seqlens[1:, None])
    return outside if key_padding_mask is None else outside | key_padding_mask


def gram_reference(
    key: Tensor,
    value: Tensor,
    weights: Tensor | None,
    key_padding_mask: Tensor | None,
    exact: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(K'WK, K'WV) in float64; the products are formed in float64 if `exact`, else in `state_dtype`."""
    if cu_seqlens is not None:
        key_padding_mask = _outside_set(key, key_padding_mask, cu_seqlens)
    dtype = torch.float64 if exact else state_dtype(key.dtype)
    k, v = rows_of(key, key_padding_mask, dtype), rows_of(value, key_padding_mask, dtype)
    weighted = (weights_of(weights, key_padding_mask, dtype) * k).mT
    return (weighted @ k).double(), (weighted @ v).double()


def gram_backward_reference(
    dgram: Tensor,
    dmoment: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None,
    key_padding_mask: Tensor | None,
    exact: bool,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dkey, dvalue, dweights) by the formula above; dweights (B, H, N) also if `weights` is None, which means 1."""
    if cu_seqlens is not None:
        outside = _outside_set(key, key_padding_mask, cu_seqlens)
        of_sets = gram_backward_reference(dgram, dmoment, key, value, weights, outside, exact)
        hidden = outside[:, None, :, None]
        dkey, dvalue = (part.masked_fill(hidden, 0.0).sum(0, keepdim=True) for part in of_sets[:2])
        return dkey, dvalue, of_sets[2].masked_fill(hidden[..., 0], 0.0).sum(0, keepdim=True)
    dtype = torch.float64 if exact else state_dtype(key.dtype)
    k, v = rows_of(key, key_padding_mask, dtype), rows_of(value, key_padding_mask, dtype)
    w = weights_of(weights, key_padding_mask, dtype)
    slope, dmoment = (dgram + dgram.mT).to(dtype), dmoment.to(dtype)
    u, y = k @ slope + v @ dmoment.mT, k @ dmoment
    dweights = ((k * u).sum(-1) + (y * v).sum(-1)) / 2
    return (w * u).to(key.dtype), (w * y).to(value.dtype), dweights.to(state_dtype(key.dtype))


def prefix_ridge_backward_reference(
    dgram: Tensor,
    dmoment: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None,
    key_padding_mask: Tensor | None,
    every: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients (dkey, dvalue, dweights, dgram, dmoment) of the sums over all prefixes.

    The last two belong to the incoming state, which all sums include. The keys of a chunk are part of the prefix that
    ends with it, and of all later prefixes. The gradient of the chunk's sums is therefore the sum of the incoming
    gradients of these prefixes.
    """
    (batch, heads, length, _), value_width = key.shape, value.shape[-1]
    slope, dmoments = (part.flip(2).cumsum(2).flip(2).flatten(0, 2).unsqueeze(1) for part in (dgram, dmoment))
    chunks = gram_backward_reference(
        slope, dmoments, *in_chunks(key, value, weights, key_padding_mask, every), exact=True
    )
    dkey, dvalue, dweights = (
        chunk.reshape(batch, heads, dgram.shape[2] * every, width)[:, :, :length]
        for chunk, width in zip(chunks, (key.shape[-1], value_width, 1), strict=True)
    )
    return dkey, dvalue, dweights.squeeze(-1), dgram.sum(2), dmoment.sum(2)


def apply_rows_reference(query: Tensor, weight: Tensor) -> Tensor:
    """query @ weight in the dtype of query; the products are formed in `state_dtype`."""
    dtype = state_dtype(query.dtype)
    return (query.to(dtype) @ weight.to(dtype)).to(query.dtype)
