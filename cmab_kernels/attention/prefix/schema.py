"""The states of all prefixes and their gradient as `torch.library` operators: shapes, FLOP counts, vmap rules and derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.autograd import Operator, folding_rule, gradient_of_formula
from ...runtime.dtypes import state_dtype
from ...runtime.flops import flop_formula
from .reference import prefix_attention_backward_reference, prefix_attention_reference

LIB = torch.library.Library("cmab", "FRAGMENT")
LIB.define(
    "prefix_attention(Tensor query, Tensor key, Tensor value, Tensor? key_padding_mask, Tensor? state_out, Tensor? state_lse, "
    "int every, float scale, str impl) -> (Tensor out, Tensor lse)"
)
LIB.define(
    "prefix_attention_backward(Tensor dout, Tensor dlse, Tensor query, Tensor key, Tensor value, Tensor? key_padding_mask, "
    "Tensor? state_out, Tensor? state_lse, Tensor out, Tensor lse, int every, float scale, bool[4] needs, str impl) "
    "-> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dstate_out, Tensor dstate_lse)"
)


@torch.library.register_fake("cmab::prefix_attention", lib=LIB)
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, state_out: Any, state_lse: Any, every: int, scale: float, impl: str
) -> tuple[Tensor, Tensor]:
    batch, heads, latents, _ = query.shape
    shape = (batch, heads, -(-key.shape[2] // every), latents)
    return query.new_empty(*shape, value.shape[-1], dtype=state_dtype(query.dtype)), query.new_empty(shape, dtype=torch.float64)


@torch.library.register_fake("cmab::prefix_attention_backward", lib=LIB)
def _(
    dout: Tensor, dlse: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Any, state_out: Any, state_lse: Any, *rest: Any
) -> tuple[Tensor, ...]:
    *_, needs, _ = rest
    like = (query, key, value, state_out, state_lse)
    return tuple(query.new_empty(0) if not need else t.new_empty(t.shape) for t, need in zip(like, (*needs, needs[3]), strict=True))


@flop_formula(torch.ops.cmab.prefix_attention)
def _flops(query: Any, key: Any, value: Any, mask: Any, state_out: Any, state_lse: Any, every: int, *rest: Any, **_: Any) -> int:
    """FLOPs of the products S = Q K' and P V, and of one division by the sum of weights for each prefix."""
    batch, heads, latents, width = query
    scores = batch * heads * latents * key[2]
    return 2 * scores * (width + value[-1]) + batch * heads * latents * -(-key[2] // every) * value[-1]


@flop_formula(torch.ops.cmab.prefix_attention_backward)
def _backward_flops(
    dout: Any,
    dlse: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    state_out: Any,
    state_lse: Any,
    out: Any,
    lse: Any,
    every: int,
    scale: float,
    needs: Any,
    *rest: Any,
    **_: Any,
) -> int:
    """FLOPs of the scan, and of those of the products S, A V', P' A, dQ and dK that the required gradients use.

    The scan takes two multiply-adds per element.
    """
    batch, heads, latents, width = query
    needs_query, needs_key, needs_value, _state = needs
    widths = width * (1 + needs_query + needs_key) + value[-1] * ((needs_query or needs_key) + needs_value)
    return 2 * batch * heads * latents * (key[2] * widths + -(-key[2] // every) * 2 * value[-1])


torch.library.register_vmap("cmab::prefix_attention", folding_rule(torch.ops.cmab.prefix_attention.default, 6), lib=LIB)
torch.library.register_vmap("cmab::prefix_attention_backward", folding_rule(torch.ops.cmab.prefix_attention_backward.default, 10), lib=LIB)


# ---- gradients


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.every, ctx.scale, ctx.impl = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, mask, state_out, state_lse, out, lse = ctx.saved_tensors
    of_query, of_key, of_value, _, *of_state = ctx.needs_input_grad[:6]
    needs = (of_query, of_key, of_value, any(of_state))
    grads = _backward_op(dout, dlse, query, key, value, mask, state_out, state_lse, out, lse, ctx.every, ctx.scale, needs, ctx.impl)
    dquery, dkey, dvalue, *dstate = (grad if need else None for grad, need in zip(grads, (*needs, needs[3]), strict=True))
    return dquery, dkey, dvalue, None, *dstate, None, None, None


def _save_backward(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.every, ctx.scale, ctx.needs, _ = inputs
    ctx.save_for_backward(*tensors)


def _double_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Second and higher derivatives by autograd through the formula, which stores T L N scores.

    `out` and `lse` count as inputs.
    """
    dout, dlse, query, key, value, mask, state_out, state_lse, out, lse = ctx.saved_tensors
    needs = (*ctx.needs, ctx.needs[3])
    needed = [grad for grad, need in zip(grads, needs, strict=True) if need]

    def formula(
        dout: Tensor, dlse: Tensor, query: Tensor, key: Tensor, value: Tensor, state_out: Any, state_lse: Any, out: Tensor, lse: Tensor
    ) -> list[Tensor]:
        inputs = (dout, dlse, query, key, value, mask, state_out, state_lse, out, lse)
        first = prefix_attention_backward_reference(*inputs, ctx.every, ctx.scale)
        return [grad for grad, need in zip(first, needs, strict=False) if need]

    partials = gradient_of_formula(formula, (dout, dlse, query, key, value, state_out, state_lse, out, lse), needed)
    return *partials[:5], None, *partials[5:], None, None, None, None


prefix_attention_op = Operator(
    LIB, "attention.prefix", "prefix_attention", 6, _save, _backward, reference=prefix_attention_reference, function="prefix_forward"
)
_backward_op = Operator(
    LIB, "attention.prefix", "prefix_attention_backward", 10, _save_backward, _double_backward, function="prefix_backward"
)
