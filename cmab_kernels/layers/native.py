"""Fused layers of latents on the CPU: calls into csrc/layers, which fills tensors that are allocated here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.dtypes import FLOATING, state_dtype
from ..runtime.extension import load
from .contract import (
    NETWORK,
    PROJECTIONS,
    AttentionLayer,
    AttentionLayerBackward,
    FeedForwardLayer,
    FeedForwardLayerBackward,
)

_C = load()

_ACTIVATIONS = {"geglu": 0, "gelu": 1, "relu": 2}
"""Activation -> its number in csrc/linear/linear.h."""
RESIDUALS = {"input": 0, "normed": 1}
"""Residual -> its number in csrc/linear/linear.h."""


def unsupported(x: Tensor, *parameters: Tensor) -> str | None:
    """The reason why this implementation cannot run these inputs, as a phrase; None if it can run them."""
    if x.device.type != "cpu":
        return f"native code runs on the CPU, x is on {x.device}"
    if x.dtype not in FLOATING:
        return f"no native kernel for {x.dtype}"
    return None


def _named(names: Sequence[str], inputs: Any) -> dict[str, Any]:
    """Return the arguments of these names, with contiguous vectors, because the kernels read vectors without
    strides."""
    named = {}
    for name in names:
        tensor = getattr(inputs, name)
        named[name] = tensor.contiguous() if tensor is not None and tensor.dim() == 1 else tensor
    return named


# A streaming update calls seven layers of a few latents each, where an allocation costs as much as the arithmetic.
# Sizes are therefore passed as ints, which torch parses in half the time of a shape, and empty results are allocated
# only once.


@functools.cache
def nothing(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return four empty results of `dtype`, and two of float64. The results of one call must be
    different tensors.

    They must not be made when this file is imported: a first call under `torch.export` imports it, and they would be
    fake tensors. Autograd may save them, so they are not tensors of inference mode either.
    """
    with torch.inference_mode(False):
        return tuple(torch.empty(0, dtype=each, device="cpu") for each in (*[dtype] * 4, *[torch.float64] * 2))


def like(x: Tensor) -> Tensor:
    """Return uninitialised contiguous memory with the shape of x.

    The result is contiguous for an empty x, too; torch regards an empty x as contiguous with any strides.
    """
    if x.is_contiguous() and x.numel():  # passing a memory format doubles torch's time
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def sums(x: Tensor, *shape: int) -> Tensor:
    """Return uninitialised memory in the dtype of sums over x."""
    dtype = state_dtype(x.dtype)
    return x.new_empty(*shape) if x.dtype == dtype else x.new_empty(*shape, dtype=dtype)


def _gradients(arguments: Sequence[str], inputs: Any) -> tuple[tuple[Tensor, ...], dict[str, Tensor | None]]:
    """Allocate the gradients of these arguments. Return all of them in order, empty if not needed,
    and a dict of the needed ones for the kernel."""
    results, wanted = [], {}
    for argument, need in zip(arguments, inputs.needs, strict=True):
        tensor = getattr(inputs, argument)
        result = wanted[f"d{argument}"] = like(tensor) if need and tensor is not None else None
        results.append(inputs.x.new_empty(0) if result is None else result)
    return tuple(results), wanted


def feed_forward_layer(inputs: FeedForwardLayer) -> Tensor:
    """Return y for rows x (R, C)."""
    y = like(inputs.x)
    _C.feed_forward_layer(**_feed_forward_inputs(inputs), y=y)
    return y


def _feed_forward_inputs(inputs: FeedForwardLayer | FeedForwardLayerBackward) -> dict[str, Any]:
    named = _named(NETWORK, inputs)
    named.update(
        x=inputs.x, eps=inputs.eps, activation=_ACTIVATIONS[inputs.activation], residual=RESIDUALS[inputs.residual]
    )
    return named


def feed_forward_layer_backward(inputs: FeedForwardLayerBackward) -> tuple[Tensor, ...]:
    """Return the gradients of x and the parameters in order, contiguous; empty tensors where not needed."""
    results, wanted = _gradients(("x", *NETWORK), inputs)
    _C.feed_forward_layer_backward(**_feed_forward_inputs(inputs), dy=inputs.dy, **wanted)
    return results


def _rows(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor (B, N, C) as rows (B N, C)."""
    return None if tensor is None else tensor.flatten(0, 1)


def attention_layer(inputs: AttentionLayer) -> tuple[Tensor, ...]:
    """Return (y, query, key, value, out, lse) for x (B, L, C); all but y are empty unless `keep`."""
    x, context, heads = inputs.x, inputs.context, inputs.num_heads
    batch, latents, _ = x.shape
    keys = latents if context is None else context.shape[1]
    depth, width, rows, others = inputs.key_weight.shape[0], inputs.value_weight.shape[0], batch * latents, batch * keys
    query, key, value = sums(x, rows, depth), sums(x, others, depth), sums(x, others, width)
    out, lse, y = (
        sums(x, batch, heads, latents, width // heads),
        x.new_empty(batch, heads, latents, dtype=torch.float64),
        like(x),
    )
    if y.numel():
        _C.attention_layer(
            **_attention_inputs(inputs), query=query, key=key, value=value, out=out, lse=lse, y=y.flatten(0, 1)
        )
    if not inputs.keep:
        return y, *nothing(query.dtype)[:5]
    return y, query.view(batch, latents, depth), key.view(batch, keys, depth), value.view(batch, keys, width), out, lse


def attention_layer_backward(inputs: AttentionLayerBackward) -> tuple[Tensor, ...]:
    """Return the gradients of x, context and the parameters in order, contiguous; empty tensors where not needed."""
    results, wanted = _gradients(("x", "context", *PROJECTIONS), inputs)
    if not inputs.x.numel():
        return tuple(r.zero_() for r in results)
    wanted.update(dx=_rows(wanted["dx"]), dcontext=_rows(wanted["dcontext"]))
    _C.attention_layer_backward(
        **_attention_inputs(inputs),
        query=_rows(inputs.query.contiguous()),
        key=_rows(inputs.key.contiguous()),
        value=_rows(inputs.value.contiguous()),
        out=inputs.out.contiguous(),
        lse=inputs.lse.contiguous(),
        dy=_rows(inputs.dy),
        **wanted,
    )
    return results


def _attention_inputs(inputs: AttentionLayer | AttentionLayerBackward) -> dict[str, Any]:
    x, mask, named = inputs.x, inputs.key_padding_mask, _named(PROJECTIONS, inputs)
    named.update(
        x=_rows(x), context=_rows(inputs.context), key_padding_mask=None if mask is None else mask.contiguous().view(-1)
    )
    named.update(
        eps=inputs.eps, context_eps=inputs.context_eps, scale=inputs.scale, batch=x.shape[0], num_heads=inputs.num_heads
    )
    named.update(residual=RESIDUALS[inputs.residual])
    return named
