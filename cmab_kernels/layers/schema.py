"""Both layers and their gradients as `torch.library` operators: contracts, shapes, FLOP counts, vmap rules and
derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.dtypes import state_dtype
from ..runtime.operator import Call, Gradients, Operator, derivatives_of, gradient_shapes
from ..runtime.tracing import is_differentiated, is_recorded
from ..runtime.vmap import Rule, flat
from .contract import (
    OF_ATTENTION,
    OF_FEED_FORWARD,
    AttentionLayer,
    AttentionLayerBackward,
    FeedForwardLayer,
    FeedForwardLayerBackward,
    needed,
    needs_part,
    needs_query_key_value,
    needs_rows,
)
from .reference import attention_layer_reference, feed_forward_reference

_KEPT = ("query", "key", "value", "out", "lse")
"""The results of an attention layer that its backward pass needs."""


# ---- shapes


def _attention_shapes(inputs: AttentionLayer) -> tuple[Tensor, ...]:
    x, keep = inputs.x, inputs.keep
    (batch, length, _), seen = x.shape, (x if inputs.context is None else inputs.context).shape[1]
    heads, keys, values = inputs.num_heads, inputs.key_weight.shape[0], inputs.value_weight.shape[0]
    shapes = ((length, keys), (seen, keys), (seen, values), (heads, length, values // heads), (heads, length))
    sums = state_dtype(x.dtype)
    dtypes = (*(x.dtype if inputs.impl == "triton" else sums,) * 3, sums, torch.float64)
    kept = (
        x.new_empty((batch, *shape) if keep else (0,), dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return x.new_empty(x.shape), *kept


# ---- FLOPs, for contracts of shapes: two per multiply-add, as in torch's counts of matrix products. Norms, activations
# and exponentials do not count.


def _feed_forward_operations(inputs: Any) -> int:
    (rows, _), expand, contract = inputs.x, inputs.expand_weight, inputs.contract_weight
    return 2 * rows * (expand[0] * expand[1] + contract[0] * contract[1])


def _feed_forward_backward_operations(inputs: Any) -> int:
    """FLOPs of the products for the gradients of activation, contract, norm and expand that the required gradients use.

    Products that compute the hidden features again do not count: other implementations do not have them.
    """
    need, (rows, _), expand, contract = needed(inputs), inputs.x, inputs.expand_weight, inputs.contract_weight
    below = "x" in need or any(needs_part(need, "norm"))
    inside = below or any(needs_part(need, "expand"))
    products = expand[0] * expand[1] * (below + ("expand_weight" in need))
    products += contract[0] * contract[1] * (inside + ("contract_weight" in need))
    return 2 * rows * products


def _attention_sizes(inputs: Any) -> tuple[int, int, int, int, int, int, int]:
    """The sizes of an attention layer.

    They are the multiplications of the projections to query, key, value and output, the number of scores of one head,
    and the widths of all heads of keys and values together.
    """
    (batch, length, width), (_, seen, depth) = inputs.x, inputs.x if inputs.context is None else inputs.context
    keys, values = inputs.key_weight[0], inputs.value_weight[0]
    rows, others = batch * length, batch * seen
    return (
        rows * width * keys,
        others * depth * keys,
        others * depth * values,
        rows * width * values,
        rows * seen,
        keys,
        values,
    )


def _attention_operations(inputs: Any) -> int:
    """FLOPs of four projections and two products of heads."""
    query, key, value, output, scores, keys, values = _attention_sizes(inputs)
    return 2 * (query + key + value + output + scores * (keys + values))


def _attention_backward_operations(inputs: Any) -> int:
    """FLOPs of the products for the required gradients, and for the gradients between them and the output."""
    query, key, value, output, scores, keys, values = _attention_sizes(inputs)
    need, (above_query, above_context), (to_query, to_key, to_value) = (
        needed(inputs),
        needs_rows(inputs),
        needs_query_key_value(inputs),
    )
    to_scores = to_query or to_key
    products = query * (above_query + ("query_weight" in need)) + key * (above_context + ("key_weight" in need))
    products += value * (above_context + ("value_weight" in need)) + output * (
        (to_scores or to_value) + ("output_weight" in need)
    )
    heads = keys * (to_scores + to_query + to_key) + values * (to_scores + to_value)
    return 2 * (products + scores * heads)


# ---- gradients


def _feed_forward_definition(inputs: FeedForwardLayer) -> Tensor:
    arguments: list[Any]
    *arguments, _ = inputs
    return feed_forward_reference(*arguments)


def _attention_definition(inputs: AttentionLayer) -> tuple[Tensor, ...]:
    arguments: list[Any]
    *arguments, _ = inputs
    return attention_layer_reference(*arguments)


def _feed_forward_backward(call: Call[FeedForwardLayer], dy: Tensor) -> Gradients:
    *arguments, impl = call.inputs
    given: list[Any] = [dy, *arguments, call.needs(*OF_FEED_FORWARD), impl]
    return dict(zip(OF_FEED_FORWARD, _feed_forward_backward_op(FeedForwardLayerBackward(*given)), strict=True))


def _attention_backward(call: Call[AttentionLayer], dy: Tensor, *_: Any) -> Gradients:
    """The gradients. A program that was recorded without a gradient keeps nothing, and computes the layer again."""
    *tensors, num_heads, scale, eps, context_eps, residual, keep, impl = call.inputs
    kept = call.kept if keep else _attention_op(call.inputs._replace(keep=True))[1:]
    given: list[Any] = [
        dy,
        *tensors,
        *kept,
        num_heads,
        scale,
        eps,
        context_eps,
        residual,
        call.needs(*OF_ATTENTION),
        impl,
    ]
    return dict(zip(OF_ATTENTION, _attention_backward_op(AttentionLayerBackward(*given)), strict=True))


def gradients_of(layer: Callable[[Any], Tensor], *arguments: str) -> Callable[[Any], Sequence[Tensor]]:
    """The formula of a backward operator: autograd through y = layer(inputs), with None for gradients that are not in
    `needs`."""

    def formula(inputs: Any) -> Sequence[Any]:
        given = flat([getattr(inputs, argument) for argument in arguments])
        tensors = [tensor for tensor, need in zip(given, inputs.needs, strict=True) if need]
        grads = iter(torch.autograd.grad(layer(inputs), tensors, inputs.dy, create_graph=True, materialize_grads=True))
        return [next(grads) if need else None for need in inputs.needs]

    return formula


def _feed_forward_again(inputs: FeedForwardLayerBackward) -> Tensor:
    arguments: list[Any]
    _, *arguments, _, _ = inputs
    return feed_forward_reference(*arguments)


def _attention_again(inputs: AttentionLayerBackward) -> Tensor:
    """y of the definition, which computes the kept tensors again."""
    arguments = {name: getattr(inputs, name) for name in AttentionLayer._fields if name not in ("keep", "impl")}
    return attention_layer_reference(**arguments, keep=False)[0]


feed_forward = Operator(
    "layers",
    "feed_forward_layer",
    FeedForwardLayer,
    ("y",),
    shapes=lambda inputs: inputs.x.new_empty(inputs.x.shape),
    operations=_feed_forward_operations,
    backward=_feed_forward_backward,
    vmap=Rule(batched=("x",)),
    reference=_feed_forward_definition,
)
_feed_forward_backward_op = Operator(
    "layers",
    "feed_forward_layer_backward",
    FeedForwardLayerBackward,
    tuple(f"d{argument}" for argument in OF_FEED_FORWARD),
    shapes=gradient_shapes(*OF_FEED_FORWARD),
    operations=_feed_forward_backward_operations,
    backward=derivatives_of(gradients_of(_feed_forward_again, *OF_FEED_FORWARD), "dy", *OF_FEED_FORWARD),
    # Each mapped element has a separate gradient of the weights.
    vmap=Rule(batched=("dy", "x"), loops=lambda inputs: any(inputs.needs[1:])),
)
_attention_op = Operator(
    "layers",
    "attention_layer",
    AttentionLayer,
    ("y", *_KEPT),
    shapes=_attention_shapes,
    operations=_attention_operations,
    backward=_attention_backward,
    keeps=(*AttentionLayer._fields, *_KEPT),
    constant=_KEPT,
    vmap=Rule(batched=("x", "context", "key_padding_mask")),
    reference=_attention_definition,
)
_attention_backward_op = Operator(
    "layers",
    "attention_layer_backward",
    AttentionLayerBackward,
    tuple(f"d{argument}" for argument in OF_ATTENTION),
    shapes=gradient_shapes(*OF_ATTENTION),
    operations=_attention_backward_operations,
    backward=derivatives_of(gradients_of(_attention_again, *OF_ATTENTION), "dy", *OF_ATTENTION),
    keeps=("dy", "key_padding_mask", *OF_ATTENTION),
    vmap=Rule(batched=("dy", "x", "context", "key_padding_mask", *_KEPT), loops=lambda inputs: any(inputs.needs[2:])),
)


def attention(inputs: AttentionLayer) -> Tensor:
    """The attention layer. It keeps tensors for the backward pass if there is one, or if a recorded
    program may have one."""
    *tensors, num_heads, scale, eps, context_eps, residual, _, impl = inputs
    keep = is_differentiated(*tensors) or is_recorded()
    given: list[Any] = [*tensors, num_heads, scale, eps, context_eps, residual, keep, impl]
    result: Tensor = _attention_op(AttentionLayer(*given))[0]
    return result
