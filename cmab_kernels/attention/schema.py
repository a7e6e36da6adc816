"""Latent cross-attention and its gradient as `torch.library` operators: shapes, FLOP counts, vmap rules and derivatives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..runtime.autograd import Operator, folding_rule, gradient_of_formula, looping_rule
from ..runtime.checks import wrong
from ..runtime.dtypes import state_dtype
from ..runtime.flops import flop_formula
from ..runtime.tracing import has_values
from .reference import attention_backward_reference, attention_reference
from .state import AttentionState, merged, share_gradient

LIB = torch.library.Library("cmab", "DEF")
LIB.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? key_padding_mask, Tensor? cu_seqlens, "
    "Tensor? state_out, Tensor? state_lse, float scale, str impl) -> (Tensor out, Tensor lse)"
)
LIB.define(
    "attention_backward(Tensor dout, Tensor dlse, Tensor query, Tensor key, Tensor value, Tensor? key_padding_mask, Tensor? cu_seqlens, "
    "Tensor out, Tensor lse, float scale, bool[3] needs, str impl) -> (Tensor dquery, Tensor dkey, Tensor dvalue)"
)


def _definition(query: Tensor, key: Tensor, value: Tensor, mask: Any, cu_seqlens: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    """The state of the keys by the reference, merged with any incoming state; NaN if offsets are invalid."""
    state_out, state_lse, scale = rest
    new = AttentionState(*attention_reference(query, key, value, mask, cu_seqlens, scale))
    if cu_seqlens is not None:
        bad = refused_offsets(cu_seqlens, key.shape[2])
        new = AttentionState(*(part.masked_fill(bad, torch.nan) for part in new))
    return new if state_out is None else merged(AttentionState(state_out, state_lse), new)


def refused_offsets(cu_seqlens: Tensor, length: int) -> Tensor:
    """True unless offsets rise from 0 to `length`, as a tensor on the device of the offsets."""
    return (cu_seqlens[0] != 0) | (cu_seqlens[-1] != length) | (cu_seqlens.diff() < 0).any()


def check_offsets(cu_seqlens: Tensor | None, length: int) -> None:
    """Raise unless the offsets of packed sets rise from 0 to the number of keys.

    Offsets on a GPU are not checked, because the host would have to wait for them.
    """
    if cu_seqlens is None or cu_seqlens.is_cuda or not has_values(cu_seqlens):
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != length or any(a > b for a, b in itertools.pairwise(offsets)):
        shown = offsets if len(offsets) <= 8 else [*offsets[:4], "...", *offsets[-3:]]
        raise ValueError(wrong("cu_seqlens", f"is {shown}", f"it must rise from 0 to N = {length}, never falling"))


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Any, cu_seqlens: Tensor | None, *rest: Any) -> None:
    check_offsets(cu_seqlens, key.shape[2])


@torch.library.register_fake("cmab::attention", lib=LIB)
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:-1], value.shape[-1], dtype=state_dtype(query.dtype))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float64)


@torch.library.register_fake("cmab::attention_backward", lib=LIB)
def _(dout: Tensor, dlse: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    needs = rest[-2]
    return tuple(t.new_empty(t.shape if need else 0) for t, need in zip((query, key, value), needs, strict=True))


def _scores(query: Any, key: Any, cu_seqlens: Any) -> int:
    """The number of scores. Packed sets share one row of N keys; a key has scores only for queries of its own set."""
    batch, heads, latents, _ = query
    return heads * latents * key[2] * (1 if cu_seqlens is not None else batch)


@flop_formula(torch.ops.cmab.attention)
def _attention_flops(query: Any, key: Any, value: Any, mask: Any, cu_seqlens: Any, *rest: Any, **_: Any) -> int:
    """FLOPs of two products: S = Q K' and O = P V."""
    return 2 * _scores(query, key, cu_seqlens) * (query[-1] + value[-1])


@flop_formula(torch.ops.cmab.attention_backward)
def _attention_backward_flops(
    dout: Any, dlse: Any, query: Any, key: Any, value: Any, mask: Any, cu_seqlens: Any, *rest: Any, **_: Any
) -> int:
    """FLOPs of those of the products S, dP, dV, dQ and dK that the required gradients use."""
    needs_query, needs_key, needs_value = rest[-2]
    needs_scores = needs_query or needs_key
    widths = query[-1] * (1 + needs_query + needs_key) + value[-1] * (needs_scores + needs_value)
    return 2 * _scores(query, key, cu_seqlens) * widths


# ---- vmap


def _vmap_rule(operator: Callable, tensors: int) -> Callable:
    """The vmap rule: `folding_rule`, or `looping_rule` for packed sets, because their batch must be 1."""
    folding, looping = folding_rule(operator, tensors), looping_rule(operator, tensors)

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        return (folding if args[tensors - 3] is None else looping)(info, in_dims, *args)

    return rule


torch.library.register_vmap("cmab::attention", _vmap_rule(torch.ops.cmab.attention.default, 7), lib=LIB)
torch.library.register_vmap("cmab::attention_backward", _vmap_rule(torch.ops.cmab.attention_backward.default, 9), lib=LIB)


# ---- gradients


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale, ctx.impl = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, mask, cu_seqlens, state_out, state_lse, out, lse = ctx.saved_tensors
    needs = tuple(ctx.needs_input_grad[:3])
    grads: tuple[Any, ...] = (None, None, None)
    if any(needs):
        grads = _backward_op(dout, dlse, query, key, value, mask, cu_seqlens, out, lse, ctx.scale, needs, ctx.impl)
        grads = tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))
    dstate = (None, None)
    if any(ctx.needs_input_grad[5:7]):
        dstate = state_gradient(dout, dlse, state_out, state_lse, out, lse)
    return *grads, None, None, *dstate, None, None


def state_gradient(dout: Tensor, dlse: Tensor, state_out: Tensor, state_lse: Tensor, out: Tensor, lse: Tensor) -> Any:
    """The gradient of the incoming state, which is a part of the merged result."""
    down, slope = share_gradient(AttentionState(state_out, state_lse), AttentionState(out, lse), dout, dlse)
    return down.to(state_out.dtype), slope


def _save_backward(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale, ctx.needs, _ = inputs
    ctx.save_for_backward(*tensors)


def _double_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Second and higher derivatives by autograd through the reference formula, which stores all L x N scores.

    `out` and `lse` count as inputs: their graph leads back to the forward operator, and from there to the incoming
    state. (`once_differentiable` does not work here: `torch.autograd.grad` never reaches its error node, and the result
    is wrong.)
    """
    dout, dlse, query, key, value, mask, cu_seqlens, out, lse = ctx.saved_tensors
    needed = [grad for grad, need in zip(grads, ctx.needs, strict=True) if need]

    def formula(dout: Tensor, dlse: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        first = attention_backward_reference(dout, dlse, query, key, value, mask, cu_seqlens, out, lse, ctx.scale)
        return [grad for grad, need in zip(first, ctx.needs, strict=True) if need]

    partials = gradient_of_formula(formula, (dout, dlse, query, key, value, out, lse), needed)
    return *partials[:5], None, None, *partials[5:], None, None, None


attention_op = Operator(
    LIB, "attention", "attention", 7, _save, _backward, reference=_definition, check=_check, function="attention_forward"
)
_backward_op = Operator(LIB, "attention", "attention_backward", 9, _save_backward, _double_backward)
