"""Latent cross-attention and its gradient as `torch.library` operators: contracts, shapes, FLOP counts, vmap rules and
derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.checks import check_offsets, refused_offsets
from ..runtime.dtypes import state_dtype
from ..runtime.operator import Call, Gradients, Operator, derivatives_of, gradient_shapes
from ..runtime.vmap import Rule
from .contract import Attention, AttentionBackward
from .reference import attention_backward_reference, attention_reference
from .state import AttentionState, merged, share_gradient


def _definition(inputs: Attention) -> AttentionState:
    """The state of the keys by the reference, merged with any incoming state; NaN if offsets are invalid."""
    query, key, value, mask, cu_seqlens, state_out, state_lse, key_bias, scale, _ = inputs
    new = AttentionState(*attention_reference(query, key, value, mask, cu_seqlens, scale, key_bias))
    if cu_seqlens is not None:
        bad = refused_offsets(cu_seqlens, key.shape[2])
        new = AttentionState(*(part.masked_fill(bad, torch.nan) for part in new))
    return new if state_out is None or state_lse is None else merged(AttentionState(state_out, state_lse), new)


def _shapes(inputs: Attention) -> tuple[Tensor, Tensor]:
    query, value = inputs.query, inputs.value
    out = query.new_empty(*query.shape[:-1], value.shape[-1], dtype=state_dtype(query.dtype))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float64)


# ---- FLOPs, for contracts of shapes


def _scores(inputs: Any) -> int:
    """The number of scores. Packed sets share one row of N keys; a key has scores only for queries of its own set."""
    batch, heads, latents, _ = inputs.query
    return heads * latents * inputs.key[2] * (1 if inputs.cu_seqlens is not None else batch)


def _operations(inputs: Any) -> int:
    """FLOPs of two products: S = Q K' and O = P V."""
    return 2 * _scores(inputs) * (inputs.query[-1] + inputs.value[-1])


def _backward_operations(inputs: Any) -> int:
    """FLOPs of the products among S, dP, dV, dQ and dK that the required gradients use."""
    needs_query, needs_key, needs_value, needs_bias = inputs.needs
    needs_scores = needs_query or needs_key or needs_bias
    widths = inputs.query[-1] * (1 + needs_query + needs_key) + inputs.value[-1] * (needs_scores + needs_value)
    return 2 * _scores(inputs) * widths


# ---- gradients


def _backward(call: Call[Attention], dout: Tensor, dlse: Tensor) -> Gradients:
    query, key, value, mask, cu_seqlens, state_out, state_lse, key_bias, scale, impl = call.inputs
    out, lse = call.kept
    gradients: Gradients = {}
    needs = call.needs("query", "key", "value", "key_bias")
    if any(needs):
        inputs = AttentionBackward(
            dout, dlse, query, key, value, mask, cu_seqlens, out, lse, key_bias, scale, needs, impl
        )
        gradients["query"], gradients["key"], gradients["value"], gradients["key_bias"] = _backward_op(inputs)
    if state_out is not None and state_lse is not None and any(call.needs("state_out", "state_lse")):
        gradients["state_out"], gradients["state_lse"] = state_gradient(dout, dlse, state_out, state_lse, out, lse)
    return gradients


def state_gradient(
    dout: Tensor, dlse: Tensor, state_out: Tensor, state_lse: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the incoming state, which is a part of the merged result."""
    down, slope = share_gradient(AttentionState(state_out, state_lse), AttentionState(out, lse), dout, dlse)
    return down.to(state_out.dtype), slope


def _backward_formula(inputs: AttentionBackward) -> tuple[Tensor, ...]:
    """The gradients by the reference, which stores all L x N scores.

    `out` and `lse` count as inputs: their graph leads back to the forward operator, and from there to the incoming
    state. (`once_differentiable` does not work here: `torch.autograd.grad` never reaches its error node, and the result
    is wrong.)
    """
    dout, dlse, query, key, value, mask, cu_seqlens, out, lse, key_bias, scale, _, _ = inputs
    assert dlse is not None  # autograd gives zeros
    return attention_backward_reference(dout, dlse, query, key, value, mask, cu_seqlens, out, lse, scale, key_bias)


def _is_packed(inputs: Attention | AttentionBackward) -> bool:
    """Whether sets are packed. The batch of packed keys must be 1, so that nothing can be folded into it."""
    return inputs.cu_seqlens is not None


attention_op = Operator(
    "attention",
    "attention",
    Attention,
    ("out", "lse"),
    shapes=_shapes,
    operations=_operations,
    backward=_backward,
    keeps=(*Attention._fields, "out", "lse"),
    vmap=Rule(loops=_is_packed),
    reference=_definition,
    check=lambda inputs: check_offsets(inputs.cu_seqlens, inputs.key.shape[2]),
    function="attention_forward",
)
_backward_op = Operator(
    "attention",
    "attention_backward",
    AttentionBackward,
    ("dquery", "dkey", "dvalue", "dkey_bias"),
    shapes=gradient_shapes("query", "key", "value", "key_bias"),
    operations=_backward_operations,
    backward=derivatives_of(_backward_formula, "dout", "dlse", "query", "key", "value", "out", "lse", "key_bias"),
    vmap=Rule(loops=_is_packed),
)
