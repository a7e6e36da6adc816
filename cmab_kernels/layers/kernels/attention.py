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

from ...attention.kernels import attention_backward, attention_forward
from ...attention.schema import Attention, AttentionBackward
from ...runtime.triton_launch import on_device
from .launch import aligned
from .projections import Rows, join, matrix_gradient, part, plain_rows, project, project_back, rows_of
from .shares import gradients


def _split(rows: Tensor, heads: int) -> Tensor:
    """Rows (B, N, H D) as heads (B, H, N, D), a view."""
    return rows.view(*rows.shape[:2], heads, rows.shape[2] // heads).transpose(1, 2)


def _rows(x: Tensor, context: Any, mask: Any, parameters: Sequence[Any], eps: float, context_eps: float) -> tuple[Rows, Rows | None]:
    """The rows from which queries are made, and the rows for keys and values, None if they are the same.

    They differ if rows of x are ignored, because an ignored row still is a query.
    """
    norm, context_norm = parameters[:2], parameters[2:4]
    own = rows_of(x, None, norm, eps)
    if context is not None:
        return own, rows_of(context, mask, context_norm, context_eps)
    return own, None if mask is None else rows_of(x, mask, norm, eps)


def attention_layer(x: Tensor, context: Tensor | None, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Return (y, query, key, value, out, lse) for x (B, L, C); all but y are empty unless they are to be kept."""
    *parameters, heads, scale, eps, context_eps, residual, keep = rest
    *projections, output_weight, output_bias = parameters[4:]
    pairs = list(zip(projections[::2], projections[1::2], strict=True))
    with on_device(x):
        own, other = _rows(x, context, mask, parameters, eps, context_eps)
        query, key, value = project(own, pairs) if other is None else (*project(own, pairs[:1]), *project(other, pairs[1:]))
        out, lse = attention_forward(Attention(_split(query, heads), _split(key, heads), _split(value, heads), mask, scale=scale))
        y = join(out, output_weight, output_bias, own, residual)
    kept = query, key, value, out, lse
    return y, *(kept if keep else (x.new_empty(0, dtype=t.dtype) for t in kept))


def attention_layer_backward(dy: Tensor, x: Tensor, context: Tensor | None, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Return the contiguous gradients of x, context and the parameters in order; empty tensors if not needed."""
    *parameters, heads, scale, eps, context_eps, residual, query, key, value, out, lse, asked = rest
    needs = [need and t is not None for need, t in zip(asked, (x, context, *parameters), strict=True)]
    with on_device(x):
        own, other = _rows(x, context, mask, parameters, eps, context_eps)
        seen = own if other is None else other
        (dy,) = aligned(dy)
        wanted = _wanted(needs, context is None)
        dheads: tuple[Any, Any, Any] = (None, None, None)
        if any(wanted):
            dout = part(dy, parameters[10], heads)
            query, key, value = (_split(t, heads) for t in (query, key, value))
            kept = out.contiguous(), lse.contiguous()
            dheads = attention_backward(AttentionBackward(dout, None, query, key, value, mask, None, *kept, scale, wanted))
        of_matrices = [
            *matrix_gradient(dheads[0], own, needs[6:8]),
            *matrix_gradient(dheads[1], seen, needs[8:10]),
            *matrix_gradient(dheads[2], seen, needs[10:12]),
            *matrix_gradient(dy, plain_rows(out.contiguous()), needs[12:14]),
        ]
        made = list(zip((parameters[4], parameters[6], parameters[8]), dheads, strict=True))
        dx, dcontext, *norms = _of_rows(dy, own, other, context is None, made, needs, residual)
        return gradients([dx, dcontext], [*norms, *of_matrices], x)


def _wanted(needs: Sequence[bool], is_own: bool) -> tuple[bool, bool, bool]:
    """Whether the gradients of queries, keys and values are needed for those of x, the context and the parameters."""
    above_query = any((needs[0], *needs[2:4]))
    above_seen = above_query if is_own else any((needs[1], *needs[4:6]))
    return above_query or any(needs[6:8]), above_seen or any(needs[8:10]), above_seen or any(needs[10:12])


def _of_rows(
    dy: Tensor, own: Rows, other: Rows | None, is_own: bool, made: Sequence[Any], needs: Sequence[bool], residual: str
) -> list[Any]:
    """The gradients of x and the context, and shares of those of their norms; `is_own` if x is its own context."""
    dx = dcontext = None
    norms: list[Any] = [None] * 4
    if any((needs[0], *needs[2:4])):
        dx, *norms[:2] = project_back(own, made if other is None else made[:1], dy, (needs[0], *needs[2:4]), residual)
    if other is not None and is_own and any((needs[0], *needs[2:4])):
        dx, *dnorm = project_back(other, made[1:], dx, (needs[0], *needs[2:4]))
        norms[:2] = [None if a is None or b is None else torch.cat((a, b)) for a, b in zip(norms, dnorm, strict=False)]
    elif other is not None and any((needs[1], *needs[4:6])):
        dcontext, *norms[2:] = project_back(other, made[1:], None, (needs[1], *needs[4:6]))
    return [dx, dcontext, *norms]
