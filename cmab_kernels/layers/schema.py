"""Both layers and their gradients as `torch.library` operators: shapes, FLOP counts, vmap rules and derivatives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.autograd import Operator, fold, gradient_of_formula, of_any_size
from ..runtime.dtypes import state_dtype
from ..runtime.flops import flop_formula
from ..runtime.tracing import is_differentiated
from .reference import attention_layer_reference, feed_forward_reference

LIB = torch.library.Library("cmab", "FRAGMENT")
_FEED_FORWARD = (
    "Tensor? norm_weight, Tensor? norm_bias, Tensor expand_weight, Tensor? expand_bias, Tensor contract_weight, Tensor? contract_bias, "
    "float eps, str activation, str residual"
)
_ATTENTION = (
    "Tensor x, Tensor? context, Tensor? key_padding_mask, Tensor? norm_weight, Tensor? norm_bias, Tensor? context_norm_weight, "
    "Tensor? context_norm_bias, Tensor query_weight, Tensor? query_bias, Tensor key_weight, Tensor? key_bias, Tensor value_weight, "
    "Tensor? value_bias, Tensor output_weight, Tensor? output_bias, int num_heads, float scale, float eps, float context_eps, "
    "str residual"
)
_KEPT = "Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse"
LIB.define(f"feed_forward_layer(Tensor x, {_FEED_FORWARD}, str impl) -> Tensor")
LIB.define(
    f"feed_forward_layer_backward(Tensor dy, Tensor x, {_FEED_FORWARD}, bool[7] needs, str impl) -> (Tensor dx, "
    "Tensor dnorm_weight, Tensor dnorm_bias, Tensor dexpand_weight, Tensor dexpand_bias, Tensor dcontract_weight, Tensor dcontract_bias)"
)
LIB.define(f"attention_layer({_ATTENTION}, bool keep, str impl) -> (Tensor y, {_KEPT})")
LIB.define(
    f"attention_layer_backward(Tensor dy, {_ATTENTION}, {_KEPT}, bool[14] needs, str impl) -> (Tensor dx, Tensor dcontext, "
    "Tensor dnorm_weight, Tensor dnorm_bias, Tensor dcontext_norm_weight, Tensor dcontext_norm_bias, Tensor dquery_weight, "
    "Tensor dquery_bias, Tensor dkey_weight, Tensor dkey_bias, Tensor dvalue_weight, Tensor dvalue_bias, Tensor doutput_weight, "
    "Tensor doutput_bias)"
)
_ops = torch.ops.cmab
_NETWORK = 7
"""The number of tensors of a feed-forward layer, all differentiable."""
_TENSORS = 15
"""The number of tensors of an attention layer, all differentiable but the mask."""
_MASK = 2
"""The position of the mask among the tensors of an attention layer."""


def _differentiable(values: Sequence[Any]) -> list[Any]:
    """The values for the differentiable tensors of an attention layer, from the values for all its tensors."""
    return [*values[:_MASK], *values[_MASK + 1 : _TENSORS]]


# ---- shapes


@torch.library.register_fake("cmab::feed_forward_layer", lib=LIB)
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("cmab::feed_forward_layer_backward", lib=LIB)
def _(dy: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _gradients_like(rest[:_NETWORK], rest[0], rest[-2])


@torch.library.register_fake("cmab::attention_layer", lib=LIB)
def _(x: Tensor, context: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    tensors, num_heads, keep = (x, context, *rest), rest[_TENSORS - 2], rest[-2]
    (batch, length, _), seen = x.shape, (x if context is None else context).shape[1]
    keys, values = tensors[9].shape[0], tensors[11].shape[0]
    shapes = ((length, keys), (seen, keys), (seen, values), (num_heads, length, values // num_heads), (num_heads, length))
    sums, impl = state_dtype(x.dtype), rest[-1]
    dtypes = (*(x.dtype if impl == "triton" else sums,) * 3, sums, torch.float64)
    kept = (x.new_empty((batch, *shape) if keep else (0,), dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    return x.new_empty(x.shape), *kept


@torch.library.register_fake("cmab::attention_layer_backward", lib=LIB)
def _(dy: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _gradients_like(_differentiable(rest), rest[0], rest[-2])


def _gradients_like(tensors: Sequence[Tensor | None], x: Tensor, needs: Sequence[bool]) -> tuple[Tensor, ...]:
    """For each tensor, a gradient with its shape if the gradient is needed, else an empty vector."""
    return tuple(x.new_empty(t.shape if need and t is not None else (0,)) for t, need in zip(tensors, needs, strict=True))


# ---- FLOPs: two per multiply-add, as in torch's counts of matrix products; norms, activations, exponentials do not
# count


@flop_formula(_ops.feed_forward_layer)
def _feed_forward_flops(x: Any, norm_weight: Any, norm_bias: Any, expand: Any, expand_bias: Any, contract: Any, *_: Any, **__: Any) -> int:
    return 2 * x[0] * (expand[0] * expand[1] + contract[0] * contract[1])


@flop_formula(_ops.feed_forward_layer_backward)
def _feed_forward_backward_flops(
    dy: Any, x: Any, norm_weight: Any, norm_bias: Any, expand: Any, expand_bias: Any, contract: Any, *rest: Any, **_: Any
) -> int:
    """FLOPs of the products for the gradients of activation, contract, norm and expand that the required gradients use.

    Products that compute the hidden features again do not count: other implementations do not have them.
    """
    x_needs, norm_needs, norm_bias_needs, expand_needs, expand_bias_needs, contract_needs, _bias = rest[-2]
    below = x_needs or norm_needs or norm_bias_needs
    inside = below or expand_needs or expand_bias_needs
    products = expand[0] * expand[1] * (below + expand_needs) + contract[0] * contract[1] * (inside + contract_needs)
    return 2 * x[0] * products


def _attention_sizes(x: Any, context: Any, *rest: Any) -> tuple[int, int, int, int, int, int, int]:
    """The sizes of an attention layer.

    They are the multiplications of the projections to query, key, value and output, the number of scores of one head,
    and the widths of all heads of keys and values together.
    """
    (batch, length, width), (_, seen, depth) = x, x if context is None else context
    keys, values = rest[7][0], rest[9][0]
    rows, others = batch * length, batch * seen
    return rows * width * keys, others * depth * keys, others * depth * values, rows * width * values, rows * seen, keys, values


@flop_formula(_ops.attention_layer)
def _attention_layer_flops(*args: Any, **_: Any) -> int:
    """FLOPs of four projections and two products of heads."""
    query, key, value, output, scores, keys, values = _attention_sizes(*args)
    return 2 * (query + key + value + output + scores * (keys + values))


@flop_formula(_ops.attention_layer_backward)
def _attention_layer_backward_flops(dy: Any, *args: Any, **_: Any) -> int:
    """FLOPs of the products for the required gradients, and for the gradients between them and the output."""
    query, key, value, output, scores, keys, values = _attention_sizes(*args)
    x, context, *needs = args[-2]
    norm, context_norm = any(needs[:2]), any(needs[2:4])
    own = args[1] is None
    above_query = x or norm
    above_context = above_query if own else context or context_norm
    to_query, to_key, to_value = (above or any(needs[i : i + 2]) for above, i in ((above_query, 4), (above_context, 6), (above_context, 8)))
    to_scores = to_query or to_key
    products = query * (above_query + needs[4]) + key * (above_context + needs[6]) + value * (above_context + needs[8])
    products += output * (to_scores or to_value) + output * needs[10]
    heads = keys * (to_scores + to_query + to_key) + values * (to_scores + to_value)
    return 2 * (products + scores * heads)


# ---- vmap


def _rule(operator: Callable, batched: Collection[int], weights: Callable[..., bool]) -> Callable:
    """The vmap rule: fold the mapped dimension into the batch of the arguments `batched`, or loop over it.

    The rule loops if any other argument is mapped, or if `weights(*args)` is True. `weights` tells whether gradients of
    weights are needed: each mapped element has a separate gradient of the weights.
    """

    @of_any_size
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        mapped = [dim if isinstance(arg, Tensor) else None for arg, dim in zip(args, in_dims, strict=True)]
        one = weights(*args) or any(dim is not None for i, dim in enumerate(mapped) if i not in batched)
        results = _looped(operator, info.batch_size, mapped, args) if one else _folded(operator, info.batch_size, mapped, args, batched)
        dims = tuple(None if _is_absent(r) else 0 for r in results)
        return (results, dims) if len(results) > 1 else (results[0], dims[0])

    return rule


def _results(operator: Callable, args: Iterable[Any]) -> tuple[Tensor, ...]:
    """The results of a call as a tuple, even if there is only one."""
    results = operator(*args)
    return (results,) if isinstance(results, Tensor) else results


def _is_absent(result: Tensor) -> bool:
    """True if a result is an empty vector, because it was not requested."""
    return result.dim() == 1 and result.numel() == 0


def _folded(operator: Callable, size: int, dims: Sequence[int | None], args: Sequence[Any], batched: Collection[int]) -> tuple[Tensor, ...]:
    folded = (fold(arg, dim, size) if i in batched else arg for i, (arg, dim) in enumerate(zip(args, dims, strict=True)))
    results = _results(operator, folded)
    return tuple(r if _is_absent(r) else r.unflatten(0, (size, -1)) for r in results)


def _looped(operator: Callable, size: int, dims: Sequence[int | None], args: Sequence[Any]) -> tuple[Tensor, ...]:
    each = [_results(operator, (a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True))) for i in range(size)]
    return tuple(parts[0] if _is_absent(parts[0]) else torch.stack(parts) for parts in zip(*each, strict=True))


def _register_rule(name: str, batched: Collection[int], weights: Callable[..., bool] = lambda *_: False) -> None:
    torch.library.register_vmap(f"cmab::{name}", _rule(getattr(_ops, name).default, batched, weights), lib=LIB)


_register_rule("feed_forward_layer", {0})
_register_rule("feed_forward_layer_backward", {0, 1}, lambda *args: any(args[-2][1:]))
_register_rule("attention_layer", {0, 1, 2})
_register_rule("attention_layer_backward", {0, 1, 2, 3, *range(21, 26)}, lambda *args: any(args[-2][2:]))


# ---- gradients


def _asked_for(grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)]


def _derivatives(layer: Callable[..., Tensor], tensors: Sequence[Tensor | None], needs: Sequence[bool], grads: Any, dy: Tensor) -> Any:
    """The gradients of the gradients of y = layer(*tensors): first the gradient of `dy`, then those of the tensors.

    `needs` selects the first gradients, and `grads` are the incoming gradients of the selected ones.
    """

    def formula(dy: Tensor, *tensors: Tensor) -> Sequence[Tensor]:
        needed = [t for t, need in zip(tensors, needs, strict=True) if need]
        return torch.autograd.grad(layer(*tensors), needed, dy, create_graph=True, materialize_grads=True)

    return gradient_of_formula(formula, (dy, *tensors), [grad for grad, need in zip(grads, needs, strict=True) if need])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.eps, ctx.activation, ctx.residual, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs = tuple(ctx.needs_input_grad[:_NETWORK])
    grads = _feed_forward_backward(dy, *ctx.saved_tensors, ctx.eps, ctx.activation, ctx.residual, needs, ctx.impl)
    return *_asked_for(grads, needs), None, None, None, None


def _save_backward(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.eps, ctx.activation, ctx.residual, ctx.needs, _ = inputs
    ctx.save_for_backward(*tensors)


def _double_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Second and higher derivatives by autograd through the definition."""
    dy, *tensors = ctx.saved_tensors

    def layer(*tensors: Any) -> Tensor:
        args = (*tensors, ctx.eps, ctx.activation, ctx.residual)
        return feed_forward_reference(*args)

    return *_derivatives(layer, tensors, ctx.needs, grads, dy), None, None, None, None, None


def _save_attention(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, num_heads, scale, eps, context_eps, residual, _, ctx.impl = inputs
    ctx.settings = num_heads, scale, eps, context_eps, residual
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else the backward pass would allocate zeros for all kept tensors
    ctx.save_for_backward(*tensors, *output[1:])


def _attention_backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * (_TENSORS + 7)
    saved = ctx.saved_tensors
    needs = tuple(_differentiable(ctx.needs_input_grad))
    grads = _attention_layer_backward(dy, *saved[:_TENSORS], *ctx.settings, *saved[_TENSORS:], needs, ctx.impl)
    dx, dcontext, *weights = _asked_for(grads, needs)
    return dx, dcontext, None, *weights, *[None] * 7


def _save_attention_backward(ctx: Any, inputs: Any, output: Any) -> None:
    dy, *tensors = inputs[: 1 + _TENSORS]
    ctx.settings, ctx.needs = inputs[1 + _TENSORS : 6 + _TENSORS], inputs[-2]
    ctx.save_for_backward(dy, *tensors)


def _attention_double_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Second and higher derivatives by autograd through the definition, which computes the kept tensors again."""
    dy, *tensors = ctx.saved_tensors
    mask = tensors[_MASK]

    def layer(x: Tensor, context: Any, *weights: Any) -> Tensor:
        args = (x, context, mask, *weights, *ctx.settings, False)
        return attention_layer_reference(*args)[0]

    ddy, dx, dcontext, *weights = _derivatives(layer, _differentiable(tensors), ctx.needs, grads, dy)
    return ddy, dx, dcontext, None, *weights, *[None] * 12


_feed_forward_op = Operator(LIB, "layers", "feed_forward_layer", _NETWORK, _save, _backward, reference=feed_forward_reference)
_feed_forward_backward = Operator(LIB, "layers", "feed_forward_layer_backward", 1 + _NETWORK, _save_backward, _double_backward)
_attention_layer_op = Operator(
    LIB, "layers", "attention_layer", _TENSORS, _save_attention, _attention_backward, reference=attention_layer_reference
)
_attention_layer_backward = Operator(
    LIB, "layers", "attention_layer_backward", 1 + _TENSORS, _save_attention_backward, _attention_double_backward
)


def feed_forward(*tensors: Tensor | None, eps: float, activation: str, residual: str, impl: str) -> Tensor:
    """The feed-forward layer, for tensors in the order of the operator."""
    result: Tensor = _feed_forward_op(*tensors, eps, activation, residual, impl)
    return result


def attention(*tensors: Tensor | None, num_heads: int, scale: float, eps: float, context_eps: float, residual: str, impl: str) -> Tensor:
    """The attention layer, for tensors in the order of the operator.

    Tensors that the backward pass needs are kept if there will be a backward pass.
    """
    numbers = num_heads, scale, eps, context_eps
    result: Tensor = _attention_layer_op(*tensors, *numbers, residual, is_differentiated(*tensors), impl)[0]
    return result
