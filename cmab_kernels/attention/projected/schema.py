"""Attention over projected inputs and its gradient as `torch.library` operators: contracts, shapes, FLOP counts and
derivatives."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...runtime.checks import check_offsets, refused_offsets
from ...runtime.operator import Call, Gradients, Operator, derivatives_of
from ...runtime.vmap import Rule
from ..schema import state_gradient
from ..state import AttentionState, merged
from .contract import ProjectedAttention, ProjectedAttentionBackward
from .reference import projected_attention_backward_reference, projected_attention_reference


def _definition(given: ProjectedAttention) -> AttentionState:
    """The state of the inputs by the reference, merged with any incoming state; NaN if offsets are invalid."""
    query, inputs, weight, bias, mask, cu_seqlens, state_out, state_lse, scale, eps, _ = given
    new = AttentionState(*projected_attention_reference(query, inputs, weight, bias, mask, cu_seqlens, scale, eps))
    if cu_seqlens is not None:
        bad = refused_offsets(cu_seqlens, inputs.shape[1])
        new = AttentionState(*(part.masked_fill(bad, torch.nan) for part in new))
    return new if state_out is None or state_lse is None else merged(AttentionState(state_out, state_lse), new)


def _backward_definition(given: ProjectedAttentionBackward) -> tuple[Tensor, ...]:
    """The gradients by the reference; tensors that are not in `needs` are empty."""
    return tuple(
        grad if need else grad.new_empty(0) for grad, need in zip(_backward_formula(given), given.needs, strict=True)
    )


def _shapes(given: ProjectedAttention) -> tuple[Tensor, Tensor]:
    query, weight = given.query, given.weight
    heads, width = query.shape[2], query.shape[4]
    # In this form the symbols cancel. Inductor fails on `// heads - width`.
    value_width = (weight.shape[1] - heads * width) // heads
    out = query.new_empty(*query.shape[:-1], value_width)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float64)


def _backward_shapes(given: ProjectedAttentionBackward) -> tuple[Tensor, ...]:
    tensors = (given.query, given.inputs, given.weight, given.bias)
    return tuple(t.new_empty(t.shape if need else 0) for t, need in zip(tensors, given.needs, strict=True))


# ---- FLOPs, for contracts of shapes


def _products(given: Any) -> tuple[int, int]:
    """The number of scores, and of multiplications to project all inputs. Packed sets share one row of keys."""
    blocks, batch, heads, latents, _ = given.query
    scores = blocks * heads * latents * given.inputs[1] * (1 if given.cu_seqlens is not None else batch)
    return scores, given.inputs[0] * given.inputs[1] * math.prod(given.weight)


def _operations(given: Any) -> int:
    """FLOPs of the projection, of S = Q K' and of O = P V."""
    scores, projection = _products(given)
    return 2 * scores * (given.weight[1] // given.query[2]) + 2 * projection


def _backward_operations(given: Any) -> int:
    """FLOPs of the repeated projection, the products of attention, and the required gradients of the projection."""
    needs_query, needs_inputs, needs_weight, needs_bias = given.needs
    scores, projection = _products(given)
    key = given.query[-1]
    value = given.weight[1] // given.query[2] - key
    needs_keys = needs_inputs or needs_weight or needs_bias
    widths = key * (1 + needs_query + needs_keys) + value * (1 + needs_keys)
    return 2 * scores * widths + 2 * projection * (1 + needs_inputs + needs_weight)


# ---- gradients


def _backward(call: Call[ProjectedAttention], dout: Tensor, dlse: Tensor) -> Gradients:
    query, inputs, weight, bias, mask, cu_seqlens, state_out, state_lse, scale, eps, impl = call.inputs
    out, lse = call.kept
    gradients: Gradients = {}
    needs = call.needs("query", "inputs", "weight", "bias")
    if any(needs):
        given = ProjectedAttentionBackward(
            dout, dlse, query, inputs, weight, bias, mask, cu_seqlens, out, lse, scale, eps, needs, impl
        )
        gradients.update(zip(("query", "inputs", "weight", "bias"), projected_backward_op(given), strict=True))
    if state_out is not None and state_lse is not None and any(call.needs("state_out", "state_lse")):
        gradients["state_out"], gradients["state_lse"] = state_gradient(dout, dlse, state_out, state_lse, out, lse)
    return gradients


def _backward_formula(given: ProjectedAttentionBackward) -> tuple[Tensor, ...]:
    """The gradients by the reference, in which `out` and `lse` count as inputs, as for `cmab::attention_backward`."""
    dout, dlse, query, inputs, weight, bias, mask, cu_seqlens, out, lse, scale, eps, _, _ = given
    return projected_attention_backward_reference(
        dout, dlse, query, inputs, weight, bias, mask, cu_seqlens, out, lse, scale, eps
    )


_ONE_BY_ONE = Rule(batched=())
"""The weights have no batch into which a mapped dimension could be folded."""

projected_attention_op = Operator(
    "attention.projected",
    "projected_attention",
    ProjectedAttention,
    ("out", "lse"),
    shapes=_shapes,
    operations=_operations,
    backward=_backward,
    keeps=(*ProjectedAttention._fields, "out", "lse"),
    vmap=_ONE_BY_ONE,
    reference=_definition,
    check=lambda given: check_offsets(given.cu_seqlens, given.inputs.shape[1]),
    function="projected_attention_forward",
)
projected_backward_op = Operator(
    "attention.projected",
    "projected_attention_backward",
    ProjectedAttentionBackward,
    ("dquery", "dinputs", "dweight", "dbias"),
    shapes=_backward_shapes,
    operations=_backward_operations,
    backward=derivatives_of(_backward_formula, "dout", "dlse", "query", "inputs", "weight", "bias", "out", "lse"),
    vmap=_ONE_BY_ONE,
    reference=_backward_definition,
)
