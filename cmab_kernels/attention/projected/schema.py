"""Attention over projected inputs and its gradient as `torch.library` operators: shapes, FLOP counts, vmap rules and derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.autograd import Operator, gradient_of_formula, looping_rule
from ...runtime.flops import flop_formula
from ..schema import check_offsets, refused_offsets, state_gradient
from ..state import AttentionState, merged
from .reference import projected_attention_backward_reference, projected_attention_reference

LIB = torch.library.Library("cmab", "FRAGMENT")
LIB.define(
    "projected_attention(Tensor query, Tensor inputs, Tensor weight, Tensor bias, Tensor? key_padding_mask, Tensor? cu_seqlens, "
    "Tensor? state_out, Tensor? state_lse, float scale, float? eps, str impl) -> (Tensor out, Tensor lse)"
)
LIB.define(
    "projected_attention_backward(Tensor dout, Tensor dlse, Tensor query, Tensor inputs, Tensor weight, Tensor bias, "
    "Tensor? key_padding_mask, Tensor? cu_seqlens, Tensor out, Tensor lse, float scale, float? eps, bool[4] needs, str impl) "
    "-> (Tensor dquery, Tensor dinputs, Tensor dweight, Tensor dbias)"
)


def _definition(query: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor, mask: Any, cu_seqlens: Any, *rest: Any) -> AttentionState:
    """The state of the inputs by the reference, merged with any incoming state; NaN if offsets are invalid."""
    state_out, state_lse, scale, eps = rest
    new = AttentionState(*projected_attention_reference(query, inputs, weight, bias, mask, cu_seqlens, scale, eps))
    if cu_seqlens is not None:
        bad = refused_offsets(cu_seqlens, inputs.shape[1])
        new = AttentionState(*(part.masked_fill(bad, torch.nan) for part in new))
    return new if state_out is None else merged(AttentionState(state_out, state_lse), new)


def _backward_definition(*inputs: Any) -> tuple[Tensor, ...]:
    """The gradients by the reference. `needs` is the last input; tensors that are not in `needs` are empty."""
    *given, needs = inputs
    grads = projected_attention_backward_reference(*given)
    return tuple(grad if need else grad.new_empty(0) for grad, need in zip(grads, needs, strict=True))


def _check(query: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor, mask: Any, cu_seqlens: Tensor | None, *rest: Any) -> None:
    check_offsets(cu_seqlens, inputs.shape[1])


@torch.library.register_fake("cmab::projected_attention", lib=LIB)
def _(query: Tensor, inputs: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    heads, width = query.shape[2], query.shape[4]
    value_width = (weight.shape[1] - heads * width) // heads  # so that symbols cancel: Inductor fails on // heads - width
    out = query.new_empty(*query.shape[:-1], value_width)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float64)


@torch.library.register_fake("cmab::projected_attention_backward", lib=LIB)
def _(dout: Tensor, dlse: Tensor, query: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    needs = rest[-2]
    return tuple(t.new_empty(t.shape if need else 0) for t, need in zip((query, inputs, weight, bias), needs, strict=True))


def _products(query: Any, inputs: Any, weight: Any, cu_seqlens: Any) -> tuple[int, int]:
    """The number of scores, and of multiplications to project all inputs. Packed sets share one row of keys."""
    blocks, batch, heads, latents, _ = query
    scores = blocks * heads * latents * inputs[1] * (1 if cu_seqlens is not None else batch)
    return scores, inputs[0] * inputs[1] * weight[0] * weight[1] * weight[2]


@flop_formula(torch.ops.cmab.projected_attention)
def _flops(query: Any, inputs: Any, weight: Any, bias: Any, mask: Any, cu_seqlens: Any, *rest: Any, **_: Any) -> int:
    """FLOPs of the projection, of S = Q K' and of O = P V."""
    scores, projection = _products(query, inputs, weight, cu_seqlens)
    return 2 * scores * (weight[1] // query[2]) + 2 * projection


@flop_formula(torch.ops.cmab.projected_attention_backward)
def _backward_flops(
    dout: Any, dlse: Any, query: Any, inputs: Any, weight: Any, bias: Any, mask: Any, cu_seqlens: Any, *rest: Any, **_: Any
) -> int:
    """FLOPs of the repeated projection, the products of attention, and the required gradients of the projection."""
    needs_query, needs_inputs, needs_weight, needs_bias = rest[-2]
    scores, projection = _products(query, inputs, weight, cu_seqlens)
    key, value = query[-1], weight[1] // query[2] - query[-1]
    needs_keys = needs_inputs or needs_weight or needs_bias
    widths = key * (1 + needs_query + needs_keys) + value * (1 + needs_keys)
    return 2 * scores * widths + 2 * projection * (1 + needs_inputs + needs_weight)


torch.library.register_vmap("cmab::projected_attention", looping_rule(torch.ops.cmab.projected_attention.default, 8), lib=LIB)
torch.library.register_vmap(
    "cmab::projected_attention_backward", looping_rule(torch.ops.cmab.projected_attention_backward.default, 10), lib=LIB
)


# ---- gradients


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale, ctx.eps, ctx.impl = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    query, inputs, weight, bias, mask, cu_seqlens, state_out, state_lse, out, lse = ctx.saved_tensors
    needs = tuple(ctx.needs_input_grad[:4])
    grads: tuple[Any, ...] = (None,) * 4
    if any(needs):
        grads = projected_backward_op(
            dout, dlse, query, inputs, weight, bias, mask, cu_seqlens, out, lse, ctx.scale, ctx.eps, needs, ctx.impl
        )
        grads = tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))
    dstate: Any = (None, None)
    if any(ctx.needs_input_grad[6:8]):
        dstate = state_gradient(dout, dlse, state_out, state_lse, out, lse)
    return *grads, None, None, *dstate, None, None, None


def _save_backward(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale, ctx.eps, ctx.needs, _ = inputs
    ctx.save_for_backward(*tensors)


def _double_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Second and higher derivatives by autograd through the reference formula, as for `cmab::attention_backward`."""
    *before, mask, cu_seqlens, out, lse = ctx.saved_tensors
    needed = [grad for grad, need in zip(grads, ctx.needs, strict=True) if need]

    def formula(*tensors: Any) -> list[Tensor]:
        every = (*tensors[:6], mask, cu_seqlens, *tensors[6:], ctx.scale, ctx.eps)
        first = projected_attention_backward_reference(*every)
        return [grad for grad, need in zip(first, ctx.needs, strict=True) if need]

    partials = gradient_of_formula(formula, (*before, out, lse), needed)
    return *partials[:6], None, None, *partials[6:], None, None, None, None


projected_attention_op = Operator(
    LIB,
    "attention.projected",
    "projected_attention",
    8,
    _save,
    _backward,
    reference=_definition,
    check=_check,
    function="projected_attention_forward",
)
projected_backward_op = Operator(
    LIB,
    "attention.projected",
    "projected_attention_backward",
    10,
    _save_backward,
    _double_backward,
    reference=_backward_definition,
)
