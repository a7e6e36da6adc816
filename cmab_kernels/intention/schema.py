"""Sums over rows, and rows times a matrix, as `torch.library` operators: shapes, FLOP counts, vmap rules and derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.autograd import Operator, folding_rule, gradient_of_formula
from ..runtime.backends import choose
from ..runtime.checks import refuse_negative
from ..runtime.dtypes import state_dtype
from ..runtime.flops import flop_formula
from .reference import apply_rows_reference, gram_backward_reference, gram_reference, prefix_ridge_backward_reference
from .state import count_keys

LIB = torch.library.Library("cmab", "FRAGMENT")
LIB.define(
    "gram(Tensor key, Tensor value, Tensor? weights, Tensor? key_padding_mask, int[2] parts, bool exact, str impl) "
    "-> (Tensor gram, Tensor moment)"
)
LIB.define(
    "ridge_update(Tensor key, Tensor value, Tensor? weights, Tensor? key_padding_mask, Tensor? gram, Tensor? moment, Tensor? count, "
    "str impl) -> (Tensor gram, Tensor moment, Tensor count)"
)
LIB.define(
    "gram_backward(Tensor dgram, Tensor dmoment, Tensor key, Tensor value, Tensor? weights, Tensor? key_padding_mask, bool[3] needs, "
    "bool exact, str impl) -> (Tensor dkey, Tensor dvalue, Tensor dweights)"
)
LIB.define(
    "prefix_ridge(Tensor key, Tensor value, Tensor? weights, Tensor? key_padding_mask, Tensor? gram, Tensor? moment, int every, str impl) "
    "-> (Tensor gram, Tensor moment)"
)
LIB.define(
    "prefix_ridge_backward(Tensor dgram, Tensor dmoment, Tensor key, Tensor value, Tensor? weights, Tensor? key_padding_mask, int every, "
    "bool[4] needs, str impl) -> (Tensor dkey, Tensor dvalue, Tensor dweights, Tensor dstate_gram, Tensor dstate_moment)"
)
LIB.define("apply_rows(Tensor query, Tensor weight, str impl) -> Tensor")


SCANNED = ("cuda", "triton")
"""The implementations with kernels for the sums over all prefixes."""


# ---- definitions, and checks of values


def check_weights(weights: Tensor | None, key_padding_mask: Tensor | None) -> None:
    """Raise if the weight of an unmasked key is negative.

    On a GPU, `weights_of_heads` has already replaced negative weights by NaN.
    """
    if weights is not None:
        refuse_negative("weights", weights, absent=None if key_padding_mask is None else key_padding_mask[:, None])


def _check_rows(key: Tensor, value: Tensor, weights: Tensor | None, mask: Tensor | None, *rest: Any) -> None:
    check_weights(weights, mask)


def _gram_definition(key: Tensor, value: Tensor, weights: Any, mask: Any, parts: Any, exact: bool) -> tuple[Tensor, Tensor]:
    """Both sums, since the reference ignores `parts`."""
    return gram_reference(key, value, weights, mask, exact)


def _update_definition(
    key: Tensor, value: Tensor, weights: Any, mask: Any, gram: Tensor | None, moment: Tensor | None, count: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    new_gram, new_moment = gram_reference(key, value, weights, mask, exact=True)
    if gram is not None and moment is not None:
        new_gram, new_moment = gram + new_gram, moment + new_moment
    return new_gram, new_moment, count_keys(key, mask, count)


# ---- shapes


def sums_like(key: Tensor, value: Tensor, parts: Any = (True, True)) -> tuple[Tensor, Tensor]:
    """Uninitialised float64 tensors for K'WK and K'WV; a part that is not requested is an empty vector."""
    batch, heads, _, width = key.shape
    shapes = ((batch, heads, width, width), (batch, heads, width, value.shape[-1]))
    gram, moment = (key.new_empty(shape if part else 0, dtype=torch.float64) for shape, part in zip(shapes, parts, strict=True))
    return gram, moment


@torch.library.register_fake("cmab::gram", lib=LIB)
def _(key: Tensor, value: Tensor, weights: Any, mask: Any, parts: Any, exact: bool, impl: str) -> tuple[Tensor, Tensor]:
    return sums_like(key, value, parts)


@torch.library.register_fake("cmab::ridge_update", lib=LIB)
def _(key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return *sums_like(key, value), key.new_empty(key.shape[:2], dtype=torch.int64)


@torch.library.register_fake("cmab::gram_backward", lib=LIB)
def _(dgram: Tensor, dmoment: Tensor, key: Tensor, value: Tensor, weights: Any, mask: Any, needs: Any, *rest: Any) -> tuple[Tensor, ...]:
    shapes = ((key.shape, key.dtype), (value.shape, value.dtype), (key.shape[:-1], state_dtype(key.dtype)))
    return tuple(key.new_empty(shape if need else 0, dtype=dtype) for (shape, dtype), need in zip(shapes, needs, strict=True))


@torch.library.register_fake("cmab::prefix_ridge", lib=LIB)
def _(key: Tensor, value: Tensor, weights: Any, mask: Any, gram: Any, moment: Any, every: int, impl: str) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = key.shape
    shape = (batch, heads, -(-length // every), width)
    return key.new_empty(*shape, width, dtype=torch.float64), key.new_empty(*shape, value.shape[-1], dtype=torch.float64)


@torch.library.register_fake("cmab::prefix_ridge_backward", lib=LIB)
def _(
    dgram: Tensor, dmoment: Tensor, key: Tensor, value: Tensor, weights: Any, mask: Any, every: int, needs: Any, impl: str
) -> tuple[Tensor, ...]:
    rows = ((key.shape, key.dtype), (value.shape, value.dtype), (key.shape[:-1], state_dtype(key.dtype)))
    states = ((part.shape[:2] + part.shape[3:], torch.float64) for part in (dgram, dmoment))
    wanted = zip((*rows, *states), (*needs, needs[3]), strict=True)
    return tuple(key.new_empty(shape if need else 0, dtype=dtype) for (shape, dtype), need in wanted)


@torch.library.register_fake("cmab::apply_rows", lib=LIB)
def _(query: Tensor, weight: Tensor, impl: str) -> Tensor:
    return query.new_empty(*query.shape[:-1], weight.shape[-1])


for _name, _tensors in {"gram": 4, "ridge_update": 7, "gram_backward": 6, "prefix_ridge": 6, "prefix_ridge_backward": 6}.items():
    torch.library.register_vmap(f"cmab::{_name}", folding_rule(getattr(torch.ops.cmab, _name).default, _tensors), lib=LIB)


@torch.library.register_vmap("cmab::apply_rows", lib=LIB)
def _(info: Any, in_dims: Any, query: Tensor, weight: Tensor, impl: str) -> tuple[Tensor, int]:
    rule = folding_rule(lambda *args: (torch.ops.cmab.apply_rows.default(*args),), 2)
    (out,), (dim,) = rule(info, in_dims, query, weight, impl)
    return out, dim


# ---- FLOPs, two for each multiply-add


def gram_operations(key: Any, value: Any, parts: Any) -> int:
    """FLOPs of the sums; K'WK is symmetric, so that only its lower triangle with the diagonal is counted."""
    batch, heads, length, width = key
    return batch * heads * length * (parts[0] * width * (width + 1) + parts[1] * 2 * width * value[-1])


@flop_formula(torch.ops.cmab.gram)
def _gram_flops(key: Any, value: Any, weights: Any, mask: Any, parts: Any, *rest: Any, **_: Any) -> int:
    return gram_operations(key, value, parts)


@flop_formula(torch.ops.cmab.ridge_update)
def _ridge_update_flops(key: Any, value: Any, *rest: Any, **_: Any) -> int:
    return gram_operations(key, value, (True, True))


@flop_formula(torch.ops.cmab.gram_backward)
def _gram_backward_flops(dgram: Any, dmoment: Any, key: Any, value: Any, weights: Any, mask: Any, needs: Any, *rest: Any, **_: Any) -> int:
    """FLOPs of the products. Gradients of keys need K S and V dC', those of values K dC, those of weights all three."""
    batch, heads, length, width = key
    needs_key, needs_value, needs_weights = needs
    to_key, to_value = needs_key or needs_weights, needs_value or needs_weights
    return 2 * batch * heads * length * width * (to_key * (width + value[-1]) + to_value * value[-1])


@flop_formula(torch.ops.cmab.prefix_ridge)
def _prefix_ridge_flops(key: Any, value: Any, *rest: Any, **_: Any) -> int:
    """FLOPs of the sums. The additions that accumulate sums over prefixes are not counted."""
    return gram_operations(key, value, (True, True))


@flop_formula(torch.ops.cmab.prefix_ridge_backward)
def _prefix_ridge_backward_flops(
    dgram: Any, dmoment: Any, key: Any, value: Any, weights: Any, mask: Any, every: int, needs: Any, *rest: Any, **_: Any
) -> int:
    return _gram_backward_flops(dgram, dmoment, key, value, weights, mask, needs[:3])


@flop_formula(torch.ops.cmab.apply_rows)
def _apply_rows_flops(query: Any, weight: Any, *rest: Any, **_: Any) -> int:
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * width * weight[-1]


# ---- gradients


def _save_gram(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.parts, ctx.exact, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def gradient_of_sums(ctx: Any, dgram: Tensor, dmoment: Tensor, tensors: Any, exact: bool) -> tuple[Tensor | None, ...]:
    """The gradients with respect to key, value and weights; None for each that is not needed."""
    needs = tuple(ctx.needs_input_grad[:3])
    if not any(needs):
        return None, None, None
    grads = _gram_backward_op(dgram, dmoment, *tensors, needs, exact, ctx.impl)
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))


def _backward_of_gram(ctx: Any, dgram: Tensor, dmoment: Tensor) -> tuple[Tensor | None, ...]:
    key, value, weights, mask = ctx.saved_tensors
    batch, heads, _, width = key.shape
    if not ctx.parts[0]:
        dgram = key.new_zeros(batch, heads, width, width, dtype=torch.float64)
    if not ctx.parts[1]:
        dmoment = key.new_zeros(batch, heads, width, value.shape[-1], dtype=torch.float64)
    return *gradient_of_sums(ctx, dgram, dmoment, (key, value, weights, mask), ctx.exact), None, None, None, None


def _save_update(ctx: Any, inputs: Any, output: Any) -> None:
    *rows, _, _, _, ctx.impl = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*rows)


def _backward_of_update(ctx: Any, dgram: Tensor, dmoment: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    needs_gram, needs_moment = ctx.needs_input_grad[4:6]
    rows = gradient_of_sums(ctx, dgram, dmoment, ctx.saved_tensors, exact=True)
    return *rows, None, dgram if needs_gram else None, dmoment if needs_moment else None, None, None


def _save_gram_backward(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.needs, ctx.exact, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_gram_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Second and higher derivatives by autograd through the reference formula, which takes temporaries of size N."""
    *saved, mask = ctx.saved_tensors
    needed = [grad for grad, need in zip(grads, ctx.needs, strict=True) if need]

    def formula(dgram: Tensor, dmoment: Tensor, key: Tensor, value: Tensor, weights: Tensor | None) -> list[Tensor]:
        first = gram_backward_reference(dgram, dmoment, key, value, weights, mask, ctx.exact)
        return [grad for grad, need in zip(first, ctx.needs, strict=True) if need]

    return *gradient_of_formula(formula, saved, needed), None, None, None, None


def _save_prefixes(ctx: Any, inputs: Any, output: Any) -> None:
    *rows, _, _, ctx.every, ctx.impl = inputs
    ctx.save_for_backward(*rows)


def _backward_of_prefixes(ctx: Any, dgram: Tensor, dmoment: Tensor) -> tuple[Tensor | None, ...]:
    of_key, of_value, of_weights, _, *of_state = ctx.needs_input_grad[:6]
    needs = (of_key, of_value, of_weights, any(of_state))
    grads = _prefix_ridge_backward_op(dgram, dmoment, *ctx.saved_tensors, ctx.every, needs, ctx.impl)
    dkey, dvalue, dweights, *dstate = (grad if need else None for grad, need in zip(grads, (*needs, needs[3]), strict=True))
    return dkey, dvalue, dweights, None, *dstate, None, None


def _save_prefix_backward(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.every, ctx.needs, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_prefix_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Second and higher derivatives by autograd through the reference formula.

    The formula takes temporaries of the size of all sums.
    """
    *saved, mask = ctx.saved_tensors
    wanted = (*ctx.needs, ctx.needs[3])
    needed = [grad for grad, need in zip(grads, wanted, strict=True) if need]

    def formula(dgram: Tensor, dmoment: Tensor, key: Tensor, value: Tensor, weights: Tensor | None) -> list[Tensor]:
        first = prefix_ridge_backward_reference(dgram, dmoment, key, value, weights, mask, ctx.every)
        return [grad for grad, need in zip(first, wanted, strict=True) if need]

    return *gradient_of_formula(formula, saved, needed), None, None, None, None


def _save_all(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_apply_rows(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    query, weight = ctx.saved_tensors
    needs_query, needs_weight, _ = ctx.needs_input_grad
    dquery = apply_rows_op(dout, weight.mT, ctx.impl) if needs_query else None
    if needs_weight and weight.numel() == 0:  # the dual form without keys: an empty weight has an empty gradient
        return dquery, torch.zeros_like(weight), None
    dweight = gram_op(query, dout, None, None, (False, True), False, ctx.impl)[1] if needs_weight else None
    return dquery, dweight, None


gram_op = Operator(LIB, "intention", "gram", 4, _save_gram, _backward_of_gram, reference=_gram_definition, check=_check_rows)
ridge_update_op = Operator(
    LIB, "intention", "ridge_update", 7, _save_update, _backward_of_update, reference=_update_definition, check=_check_rows
)
_gram_backward_op = Operator(LIB, "intention", "gram_backward", 6, _save_gram_backward, _backward_of_gram_backward)
prefix_ridge_op = Operator(LIB, "intention", "prefix_ridge", 6, _save_prefixes, _backward_of_prefixes, check=_check_rows)
_prefix_ridge_backward_op = Operator(LIB, "intention", "prefix_ridge_backward", 6, _save_prefix_backward, _backward_of_prefix_backward)
apply_rows_op = Operator(LIB, "intention", "apply_rows", 2, _save_all, _backward_of_apply_rows, reference=apply_rows_reference)


def row_products(rows: Tensor, matrices: Tensor) -> Tensor:
    """rows @ matrices of (S, M, D) and (S, D, E), in the dtype of rows.

    A kernel forms the products, so that the bits of a product do not depend on S.
    """
    rows, matrices = rows.unsqueeze(0), matrices.double().unsqueeze(0)
    return apply_rows_op(rows, matrices, choose("intention", "auto", rows, rows, matrices)).squeeze(0)
