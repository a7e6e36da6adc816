"""Attention layers: norm and projections, the kernels of attention, and the output projection with the residual
connection.

The forward pass keeps queries, keys and values in the dtype of x, the heads' results and their log-sum-exps for the
backward pass. To project again would take 3 products of C by H D for each row, half as many as the whole backward pass
needs, and would save 3 H D numbers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...attention.contract import Attention, AttentionBackward
from ...attention.projected.triton.launch import aligned
from ...attention.projected.triton.projections import Rows, matrix_gradient, plain_rows, project
from ...attention.projected.triton.shares import gradients
from ...attention.triton import attention_backward, attention_forward
from ...runtime.triton_launch import on_device
from ..contract import AttentionLayer, AttentionLayerBackward, needed, needs_part, needs_query_key_value, needs_rows
from .projections import join, normed_rows, part, project_back


def _split(rows: Tensor, heads: int) -> Tensor:
    """Rows (B, N, H D) as heads (B, H, N, D), a view."""
    return rows.view(*rows.shape[:2], heads, rows.shape[2] // heads).transpose(1, 2)


def _rows(inputs: AttentionLayer | AttentionLayerBackward) -> tuple[Rows, Rows | None]:
    """The rows from which queries are made, and the rows for keys and values, None if they are the same.

    They differ if rows of x are ignored, because an ignored row still is a query.
    """
    x, context, mask, norm = inputs.x, inputs.context, inputs.key_padding_mask, (inputs.norm_weight, inputs.norm_bias)
    own = normed_rows(x, None, norm, inputs.eps)
    if context is not None:
        return own, normed_rows(
            context, mask, (inputs.context_norm_weight, inputs.context_norm_bias), inputs.context_eps
        )
    return own, None if mask is None else normed_rows(x, mask, norm, inputs.eps)


def attention_layer(inputs: AttentionLayer) -> tuple[Tensor, ...]:
    """Return (y, query, key, value, out, lse) for x (B, L, C); all but y are empty unless they are to be kept."""
    x, heads = inputs.x, inputs.num_heads
    of_query, of_key = (inputs.query_weight, inputs.query_bias), (inputs.key_weight, inputs.key_bias)
    of_value = inputs.value_weight, inputs.value_bias
    with on_device(x):
        own, other = _rows(inputs)
        if other is None:
            query, key, value = project(own, (of_query, of_key, of_value))
        else:
            query, key, value = *project(own, (of_query,)), *project(other, (of_key, of_value))
        mask = inputs.key_padding_mask
        out, lse = attention_forward(
            Attention(_split(query, heads), _split(key, heads), _split(value, heads), mask, scale=inputs.scale)
        )
        y = join(out, inputs.output_weight, inputs.output_bias, own, inputs.residual)
    kept = query, key, value, out, lse
    return y, *(kept if inputs.keep else (x.new_empty(0, dtype=t.dtype) for t in kept))


def attention_layer_backward(inputs: AttentionLayerBackward) -> tuple[Tensor, ...]:
    """Return the contiguous gradients of x, context and the parameters in order; empty tensors if not needed."""
    need, wanted = needed(inputs), needs_query_key_value(inputs)
    x, heads = inputs.x, inputs.num_heads
    with on_device(x):
        own, other = _rows(inputs)
        seen = own if other is None else other
        (dy,) = aligned(inputs.dy)
        dheads: tuple[Any, Any, Any] = (None, None, None)
        if any(wanted):
            dout = part(dy, inputs.output_weight, heads)
            query, key, value = (_split(t, heads) for t in (inputs.query, inputs.key, inputs.value))
            kept = inputs.out.contiguous(), inputs.lse.contiguous()
            dheads = attention_backward(
                AttentionBackward(
                    dout,
                    None,
                    query,
                    key,
                    value,
                    inputs.key_padding_mask,
                    None,
                    *kept,
                    None,
                    inputs.scale,
                    (*wanted, False),
                )
            )[:3]
        of_matrices = [
            *matrix_gradient(dheads[0], own, needs_part(need, "query")),
            *matrix_gradient(dheads[1], seen, needs_part(need, "key")),
            *matrix_gradient(dheads[2], seen, needs_part(need, "value")),
            *matrix_gradient(dy, plain_rows(inputs.out.contiguous()), needs_part(need, "output")),
        ]
        made = list(zip((inputs.query_weight, inputs.key_weight, inputs.value_weight), dheads, strict=True))
        dx, dcontext, *norms = _of_rows(inputs, dy, own, other, made)
        return gradients([dx, dcontext], [*norms, *of_matrices], x)


def _of_rows(
    inputs: AttentionLayerBackward, dy: Tensor, own: Rows, other: Rows | None, made: Sequence[Any]
) -> list[Any]:
    """The gradients of x and the context, and shares of those of their norms."""
    need, (needs_own, needs_other) = needed(inputs), needs_rows(inputs)
    of_own = "x" in need, *needs_part(need, "norm")
    dx = dcontext = None
    norms: list[Any] = [None] * 4
    if needs_own:
        dx, *norms[:2] = project_back(own, made if other is None else made[:1], dy, of_own, inputs.residual)
    if other is not None and inputs.context is None and needs_own:  # x is its own context
        dx, *dnorm = project_back(other, made[1:], dx, of_own)
        norms[:2] = [None if a is None or b is None else torch.cat((a, b)) for a, b in zip(norms, dnorm, strict=False)]
    elif other is not None and needs_other:
        dcontext, *norms[2:] = project_back(
            other, made[1:], None, ("context" in need, *needs_part(need, "context_norm"))
        )
    return [dx, dcontext, *norms]
