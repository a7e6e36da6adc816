"""The definition of both layers, in plain PyTorch.

Each layer computes a result from norm(x), where norm is LayerNorm or the identity, and adds this result to r. The
residual "input" is r = x, as in a pre-norm Transformer; "normed" is r = norm(x), as in the authors' code of CMAB.

With linear(x; W, b) = x W' + b, as in `torch.nn.Linear`, the feed-forward layer is

    hidden = linear(norm(x); expand)        y = r + linear(activation(hidden); contract)

where "geglu" takes hidden = [a, gate] to a * gelu(gate) (GLU Variants Improve Transformer, Shazeer), and gelu(z) = z
Phi(z) with the distribution function Phi of N(0, 1). The attention layer is, per head,

    Q = linear(norm(x); query)      K = linear(norm(context); key)      V = linear(norm(context); value)
    out = softmax(scale Q K') V     y = r + linear(out; output)         lse = log of the sums of the softmax

(Attention Is All You Need, Vaswani et al.). Where a row may see no key, out is 0 and lse is -inf. Without a context,
context is x.

The computation is in `state_dtype`, with one rounding at the end. Autograd through these lines defines the gradients;
kernels are tested against them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.dtypes import state_dtype


def geglu(hidden: Tensor) -> Tensor:
    """a * gelu(gate) for hidden = [a, gate], (..., 2 F) -> (..., F)."""
    features, gate = hidden.chunk(2, dim=-1)
    return features * F.gelu(gate)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"geglu": geglu, "gelu": F.gelu, "relu": F.relu}
"""The name of each activation -> its function."""

RESIDUALS = ("input", "normed")
"""The tensor to which a layer adds its result: its input, or its input after the norm."""


def in_dtype(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    """The tensors in `dtype`; None stays None."""
    return [None if t is None else t.to(dtype) for t in tensors]


def layer_norm(rows: Tensor, parameters: Sequence[Any], eps: float) -> Tensor:
    """LayerNorm of each row, with `parameters` weight and bias; without a weight, the rows are returned unchanged.

    The formula is written out because torch's LayerNorm has wrong third derivatives, and a forward-mode derivative with
    wrong second derivatives.
    """
    weight, bias = parameters
    if weight is None:
        return rows
    centred = rows - rows.mean(-1, keepdim=True)
    scaled = weight * centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return scaled if bias is None else scaled + bias


def feed_forward_reference(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    expand_weight: Tensor,
    expand_bias: Tensor | None,
    contract_weight: Tensor,
    contract_bias: Tensor | None,
    eps: float,
    activation: str,
    residual: str,
) -> Tensor:
    """y of the definition above, for rows x (..., C)."""
    dtype = state_dtype(x.dtype)
    expand, contract = in_dtype(dtype, expand_weight, expand_bias), in_dtype(dtype, contract_weight, contract_bias)
    rows, *norm = in_dtype(dtype, x, norm_weight, norm_bias)
    normed = layer_norm(rows, norm, eps)
    hidden = F.linear(normed, *expand)
    return ((normed if residual == "normed" else rows) + F.linear(ACTIVATIONS[activation](hidden), *contract)).to(
        x.dtype
    )


def attention_layer_reference(
    x: Tensor,
    context: Tensor | None,
    key_padding_mask: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    context_norm_weight: Tensor | None,
    context_norm_bias: Tensor | None,
    query_weight: Tensor,
    query_bias: Tensor | None,
    key_weight: Tensor,
    key_bias: Tensor | None,
    value_weight: Tensor,
    value_bias: Tensor | None,
    output_weight: Tensor,
    output_bias: Tensor | None,
    num_heads: int,
    scale: float,
    eps: float,
    context_eps: float,
    residual: str,
    keep: bool,
) -> tuple[Tensor, ...]:
    """(y, query, key, value, out, lse) of the definition above; all but y are empty unless `keep`."""
    dtype = state_dtype(x.dtype)
    rows, *norm = in_dtype(dtype, x, norm_weight, norm_bias)
    if context is None:
        seen, context_norm, context_eps = rows, norm, eps
    else:
        seen, *context_norm = in_dtype(dtype, context, context_norm_weight, context_norm_bias)
    if key_padding_mask is not None:  # a NaN in padding has no effect
        seen = seen.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
    normed, normed_context = layer_norm(rows, norm, eps), layer_norm(seen, context_norm, context_eps)
    query = F.linear(normed, *in_dtype(dtype, query_weight, query_bias))
    key = F.linear(normed_context, *in_dtype(dtype, key_weight, key_bias))
    value = F.linear(normed_context, *in_dtype(dtype, value_weight, value_bias))
    heads = [t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (query, key, value)]
    out, lse = attend(heads, key_padding_mask, scale)
    added = F.linear(out.transpose(1, 2).flatten(-2), *in_dtype(dtype, output_weight, output_bias))
    y = (normed if residual == "normed" else rows) + added
    kept = (query, key, value, out, lse)
    return y.to(x.dtype), *(kept if keep else (t.new_empty(0) for t in kept))


def attend(heads: Sequence[Tensor], ignore: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of heads (B, H, L, D), (B, H, N, D) and (B, H, N, E); `ignore` (B, N) is True at ignored keys."""
    query, key, value = heads
    scores = scale * (query @ key.mT)
    if scores.shape[-1] == 0:
        return scores @ value, scores.sum(-1).double() - math.inf  # no keys: 0 and -inf, still attached to the graph
    if ignore is not None:
        scores = scores.masked_fill(ignore[:, None, None, :], -math.inf)
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    weight = (scores - top).exp()
    total = weight.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (top.double() + total.double().log()).masked_fill(empty, -math.inf)
    return weight / total @ value, lse.squeeze(-1)
