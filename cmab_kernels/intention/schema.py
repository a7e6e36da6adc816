"""Sums over rows, and rows times a matrix, as `torch.library` operators: contracts, shapes, FLOP counts and
derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.backends import choose
from ..runtime.checks import check_offsets, refuse_negative, refused_offsets
from ..runtime.dtypes import state_dtype
from ..runtime.operator import Call, Gradients, Operator, derivatives_of
from ..runtime.vmap import Rule
from .contract import ApplyRows, Gram, GramBackward, PrefixRidge, PrefixRidgeBackward, RidgeUpdate
from .reference import apply_rows_reference, gram_backward_reference, gram_reference, prefix_ridge_backward_reference
from .state import count_keys

# ---- definitions, and checks of values


def check_weights(rows: Any) -> None:
    """Raise if the weight of an unmasked key is negative; `rows` has the fields weights and key_padding_mask.

    On a GPU, `weights_of_heads` has already replaced negative weights by NaN.
    """
    if rows.weights is not None:
        refuse_negative(
            "weights", rows.weights, absent=None if rows.key_padding_mask is None else rows.key_padding_mask[:, None]
        )


def _check_rows(inputs: Gram | RidgeUpdate) -> None:
    if inputs.weights is not None:
        check_weights(inputs)
    check_offsets(inputs.cu_seqlens, inputs.key.shape[2])


def _is_packed(inputs: Gram | GramBackward | RidgeUpdate) -> bool:
    """Whether sets are packed. The batch of packed keys must be 1, so that nothing can be folded into it."""
    return inputs.cu_seqlens is not None


def _gram_definition(inputs: Gram | RidgeUpdate, exact: bool) -> tuple[Tensor, Tensor]:
    """Both sums by the reference, which ignores `parts`. Invalid offsets make the sums and all
    gradients NaN."""
    key, offsets = inputs.key, inputs.cu_seqlens
    gram, moment = gram_reference(key, inputs.value, inputs.weights, inputs.key_padding_mask, exact, offsets)
    if offsets is None:
        return gram, moment
    one = gram.new_ones(()).masked_fill(refused_offsets(offsets, key.shape[2]), torch.nan)
    return gram * one, moment * one


def _update_definition(inputs: RidgeUpdate) -> tuple[Tensor, Tensor, Tensor]:
    key, _, _, mask, offsets, gram, moment, count, _ = inputs
    new_gram, new_moment = _gram_definition(inputs, exact=True)
    if gram is not None and moment is not None:
        new_gram, new_moment = gram + new_gram, moment + new_moment
    return new_gram, new_moment, count_keys(key, mask, offsets, count)


# ---- shapes


def heads_of(key: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """The leading extents of the sums: (B, H), or (S, H) of packed sets."""
    return key.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, key.shape[1]


def sums_like(
    key: Tensor, value: Tensor, parts: tuple[int, int] = (True, True), cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Uninitialised float64 tensors for K'WK and K'WV; a part that is not requested is an empty vector."""
    (batch, heads), width = heads_of(key, cu_seqlens), key.shape[3]
    shapes = ((batch, heads, width, width), (batch, heads, width, value.shape[-1]))
    gram, moment = (
        key.new_empty(shape if part else 0, dtype=torch.float64) for shape, part in zip(shapes, parts, strict=True)
    )
    return gram, moment


def _prefix_shapes(inputs: PrefixRidge) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = inputs.key.shape
    shape = (batch, heads, -(-length // inputs.every), width)
    gram, moment = (
        inputs.key.new_empty(*shape, columns, dtype=torch.float64) for columns in (width, inputs.value.shape[-1])
    )
    return gram, moment


def _gradient_shapes(inputs: GramBackward | PrefixRidgeBackward) -> tuple[Tensor, ...]:
    """The shapes of the gradients of key, value, weights and, for prefixes, the incoming sums. The
    weights may be None, which means 1."""
    key, value = inputs.key, inputs.value
    like = [(key.shape, key.dtype), (value.shape, value.dtype), (key.shape[:-1], state_dtype(key.dtype))]
    if isinstance(inputs, PrefixRidgeBackward):
        like += [(part.shape[:2] + part.shape[3:], torch.float64) for part in (inputs.dgram, inputs.dmoment)]
    return tuple(
        key.new_empty(shape if need else 0, dtype=dtype)
        for (shape, dtype), need in zip(like, inputs.needs, strict=True)
    )


# ---- FLOPs, two for each multiply-add, for contracts of shapes


def gram_operations(inputs: Any, parts: tuple[int, int] = (True, True)) -> int:
    """FLOPs of the sums; K'WK is symmetric, so that only its lower triangle with the diagonal is counted.

    The additions that accumulate sums over prefixes are not counted.
    """
    batch, heads, length, width = inputs.key
    return batch * heads * length * (parts[0] * width * (width + 1) + parts[1] * 2 * width * inputs.value[-1])


def _gradient_operations(inputs: Any) -> int:
    """FLOPs of the products. The gradient of the keys needs K S and V dC', the gradient of the
    values needs K dC, and the gradient of the weights needs all three."""
    (batch, heads, length, width), value_width = inputs.key, inputs.value[-1]
    needs_key, needs_value, needs_weights, *_ = inputs.needs
    to_key, to_value = needs_key or needs_weights, needs_value or needs_weights
    return 2 * batch * heads * length * width * (to_key * (width + value_width) + to_value * value_width)


def _apply_operations(inputs: Any) -> int:
    batch, heads, rows, width = inputs.query
    return 2 * batch * heads * rows * width * inputs.weight[-1]


# ---- gradients


def gradient_of_sums(call: Call[Any], dgram: Tensor, dmoment: Tensor, exact: bool) -> Gradients:
    """The gradients of key, value and weights."""
    needs = call.needs("key", "value", "weights")
    if not any(needs):
        return {}
    rows = call.inputs
    inputs = GramBackward(
        dgram,
        dmoment,
        rows.key,
        rows.value,
        rows.weights,
        rows.key_padding_mask,
        rows.cu_seqlens,
        needs,
        exact,
        rows.impl,
    )
    dkey, dvalue, dweights = _gram_backward_op(inputs)
    return {"key": dkey, "value": dvalue, "weights": dweights}


def _backward_of_gram(call: Call[Gram], dgram: Tensor, dmoment: Tensor) -> Gradients:
    key, value, _, _, offsets, parts, exact, _ = call.inputs
    (batch, heads), width = heads_of(key, offsets), key.shape[3]
    if not parts[0]:
        dgram = key.new_zeros(batch, heads, width, width, dtype=torch.float64)
    if not parts[1]:
        dmoment = key.new_zeros(batch, heads, width, value.shape[-1], dtype=torch.float64)
    return gradient_of_sums(call, dgram, dmoment, exact)


def _backward_of_update(call: Call[RidgeUpdate], dgram: Tensor, dmoment: Tensor, _: Any) -> Gradients:
    return {"gram": dgram, "moment": dmoment, **gradient_of_sums(call, dgram, dmoment, exact=True)}


def _gram_backward_formula(inputs: GramBackward) -> tuple[Tensor, ...]:
    """The gradients by the reference, which takes temporaries of size N."""
    dgram, dmoment, key, value, weights, mask, offsets, _, exact, _ = inputs
    return gram_backward_reference(dgram, dmoment, key, value, weights, mask, exact, offsets)


def _backward_of_prefixes(call: Call[PrefixRidge], dgram: Tensor, dmoment: Tensor) -> Gradients:
    key, value, weights, mask, _, _, every, impl = call.inputs
    arguments = ("key", "value", "weights", "gram", "moment")
    inputs = PrefixRidgeBackward(dgram, dmoment, key, value, weights, mask, every, call.needs(*arguments), impl)
    return dict(zip(arguments, _prefix_ridge_backward_op(inputs), strict=True))


def _prefix_backward_formula(inputs: PrefixRidgeBackward) -> tuple[Tensor, ...]:
    """The gradients by the reference, which takes temporaries of the size of all sums."""
    dgram, dmoment, key, value, weights, mask, every, _, _ = inputs
    return prefix_ridge_backward_reference(dgram, dmoment, key, value, weights, mask, every)


def _backward_of_apply_rows(call: Call[ApplyRows], dout: Tensor) -> Gradients:
    query, weight, impl = call.inputs
    needs_query, needs_weight = call.needs("query", "weight")
    gradients: Gradients = {}
    if needs_query:
        gradients["query"] = apply_rows_op(ApplyRows(dout, weight.mT, impl))
    if needs_weight and weight.numel() == 0:  # the dual form without keys: an empty weight has an empty gradient
        gradients["weight"] = torch.zeros_like(weight)
    elif needs_weight:
        gradients["weight"] = gram_op(Gram(query, dout, parts=(False, True), impl=impl))[1]
    return gradients


ROWS = ("key", "value", "weights", "key_padding_mask", "cu_seqlens")
"""The arguments of the sums. Their gradient needs no others."""

gram_op = Operator(
    "intention",
    "gram",
    Gram,
    ("gram", "moment"),
    shapes=lambda inputs: sums_like(inputs.key, inputs.value, inputs.parts, inputs.cu_seqlens),
    operations=lambda inputs: gram_operations(inputs, inputs.parts),
    backward=_backward_of_gram,
    vmap=Rule(loops=_is_packed),
    reference=lambda inputs: _gram_definition(inputs, inputs.exact),
    check=_check_rows,
)
ridge_update_op = Operator(
    "intention",
    "ridge_update",
    RidgeUpdate,
    ("gram", "moment", "count"),
    shapes=lambda inputs: (
        *sums_like(inputs.key, inputs.value, cu_seqlens=inputs.cu_seqlens),
        inputs.key.new_empty(heads_of(inputs.key, inputs.cu_seqlens), dtype=torch.int64),
    ),
    operations=gram_operations,
    backward=_backward_of_update,
    keeps=ROWS,
    constant=("count",),
    vmap=Rule(loops=_is_packed),
    reference=_update_definition,
    check=_check_rows,
)
_gram_backward_op = Operator(
    "intention",
    "gram_backward",
    GramBackward,
    ("dkey", "dvalue", "dweights"),
    shapes=_gradient_shapes,
    operations=_gradient_operations,
    backward=derivatives_of(_gram_backward_formula, "dgram", "dmoment", "key", "value", "weights"),
    vmap=Rule(loops=_is_packed),
)
prefix_ridge_op = Operator(
    "intention",
    "prefix_ridge",
    PrefixRidge,
    ("gram", "moment"),
    shapes=_prefix_shapes,
    operations=gram_operations,
    backward=_backward_of_prefixes,
    keeps=ROWS,
    check=check_weights,
)
_prefix_ridge_backward_op = Operator(
    "intention",
    "prefix_ridge_backward",
    PrefixRidgeBackward,
    ("dkey", "dvalue", "dweights", "dstate_gram", "dstate_moment"),
    shapes=_gradient_shapes,
    operations=_gradient_operations,
    backward=derivatives_of(_prefix_backward_formula, "dgram", "dmoment", "key", "value", "weights"),
)
apply_rows_op = Operator(
    "intention",
    "apply_rows",
    ApplyRows,
    ("out",),
    shapes=lambda inputs: inputs.query.new_empty(*inputs.query.shape[:-1], inputs.weight.shape[-1]),
    operations=_apply_operations,
    backward=_backward_of_apply_rows,
    reference=lambda inputs: apply_rows_reference(inputs.query, inputs.weight),
)


def row_products(rows: Tensor, matrices: Tensor) -> Tensor:
    """rows @ matrices of (S, M, D) and (S, D, E), in the dtype of rows.

    A kernel forms the products, so that the bits of a product do not depend on S.
    """
    rows, matrices = rows.unsqueeze(0), matrices.double().unsqueeze(0)
    return apply_rows_op(ApplyRows(rows, matrices, choose("intention", "auto", rows, rows, matrices))).squeeze(0)
