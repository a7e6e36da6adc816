"""Fused layers of latents on the CPU: calls into csrc/layers, which fills the tensors that are allocated here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..dtypes import FLOATING, state_dtype
from ..extension import load

_C = load()

_ACTIVATIONS = {"geglu": 0, "gelu": 1, "relu": 2}
"""Activation -> its number in csrc/linear/linear.h."""

_FEED_FORWARD = ("norm_weight", "norm_bias", "expand_weight", "expand_bias", "contract_weight", "contract_bias")
_ATTENTION = (
    *("norm_weight", "norm_bias", "context_norm_weight", "context_norm_bias", "query_weight", "query_bias"),
    *("key_weight", "key_bias", "value_weight", "value_bias", "output_weight", "output_bias"),
)
"""The names of the parameters in the order of the operators."""


def unsupported(x: Tensor, *parameters: Tensor) -> str | None:
    """The reason why this implementation cannot run these inputs, as a phrase; None if it can run them."""
    if x.device.type != "cpu":
        return f"native code runs on the CPU, x is on {x.device}"
    if x.dtype not in FLOATING:
        return f"no native kernel for {x.dtype}"
    return None


def _named(names: Sequence[str], parameters: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    """Return the parameters by name; vectors, which the kernels read without strides, are contiguous."""
    return {n: p.contiguous() if p is not None and p.dim() == 1 else p for n, p in zip(names, parameters, strict=True)}


def _gradients(x: Tensor, others: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Allocate gradients like x and the others: all of them, empty where not needed, and the same with None where not needed."""
    tensors = (x, *others)
    results = [t.new_empty(t.shape) if need and t is not None else x.new_empty(0) for t, need in zip(tensors, needs, strict=True)]
    return results, [r if need and t is not None else None for r, t, need in zip(results, tensors, needs, strict=True)]


def feed_forward_layer(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return (y, hidden) for rows x (R, C); hidden is empty unless it is to be kept."""
    *parameters, eps, activation, keep = rest
    named = _named(_FEED_FORWARD, parameters)
    y = x.new_empty(x.shape)
    hidden = x.new_empty((x.shape[0], parameters[2].shape[0]) if keep else 0, dtype=state_dtype(x.dtype))
    _C.feed_forward_layer(x=x, **named, eps=eps, activation=_ACTIVATIONS[activation], y=y, hidden=hidden if keep else None)
    return y, hidden


def feed_forward_layer_backward(dy: Tensor, x: Tensor, hidden: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the gradients of x and of the parameters in order, contiguous; an empty tensor for each that is not needed."""
    *parameters, eps, activation, needs = rest
    results, wanted = _gradients(x, parameters, needs)
    named = dict(zip(("dx", *("d" + name for name in _FEED_FORWARD)), wanted, strict=True))
    _C.feed_forward_layer_backward(
        x=x, **_named(_FEED_FORWARD, parameters), eps=eps, activation=_ACTIVATIONS[activation], dy=dy, hidden=hidden.contiguous(), **named
    )
    return tuple(results)


def _rows(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor (B, N, C) as rows (B N, C)."""
    return None if tensor is None else tensor.reshape(tensor.shape[0] * tensor.shape[1], tensor.shape[-1])


def attention_layer(x: Tensor, context: Tensor | None, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Return (y, query, key, value, out, lse) for x (B, L, C); all but y are empty unless they are to be kept."""
    *parameters, heads, scale, eps, context_eps, keep = rest
    named = _named(_ATTENTION, parameters)
    batch, latents, _ = x.shape
    keys = latents if context is None else context.shape[1]
    depth, width, sums = parameters[4].shape[0], parameters[8].shape[0], state_dtype(x.dtype)
    kept = (
        x.new_empty((batch, latents, depth), dtype=sums),
        x.new_empty((batch, keys, depth), dtype=sums),
        x.new_empty((batch, keys, width), dtype=sums),
        x.new_empty((batch, heads, latents, width // heads), dtype=sums),
        x.new_empty((batch, heads, latents), dtype=torch.float64),
    )
    y = x.new_empty(x.shape)
    if x.numel():
        _C.attention_layer(**_attention_inputs(x, context, mask, named, heads, scale, eps, context_eps), **_kept(kept), y=_rows(y))
    return y, *(kept if keep else (t.new_empty(0) for t in kept))


def attention_layer_backward(dy: Tensor, x: Tensor, context: Tensor | None, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Return the gradients of x, context and the parameters in order, contiguous; an empty tensor for each that is not needed."""
    *parameters, heads, scale, eps, context_eps, query, key, value, out, lse, needs = rest
    named = _named(_ATTENTION, parameters)
    results, wanted = _gradients(x, (context, *parameters), needs)
    if not x.numel():
        return tuple(r.zero_() for r in results)
    names = ("dx", "dcontext", *("d" + name for name in _ATTENTION))
    gradients = dict(zip(names, (_rows(wanted[0]), _rows(wanted[1]), *wanted[2:]), strict=True))
    _C.attention_layer_backward(
        **_attention_inputs(x, context, mask, named, heads, scale, eps, context_eps),
        **_kept((query, key, value, out, lse)),
        dy=_rows(dy),
        **gradients,
    )
    return tuple(results)


def _attention_inputs(x: Tensor, context: Any, mask: Any, named: Any, heads: int, scale: float, eps: float, context_eps: float) -> Any:
    return {
        "x": _rows(x),
        "context": _rows(context),
        "key_padding_mask": None if mask is None else mask.reshape(-1),
        **named,
        "eps": eps,
        "context_eps": context_eps,
        "scale": scale,
        "batch": x.shape[0],
        "num_heads": heads,
    }


def _kept(kept: Sequence[Tensor]) -> dict[str, Tensor]:
    query, key, value, out, lse = (t.contiguous() for t in kept)
    return {"query": query.flatten(0, 1), "key": key.flatten(0, 1), "value": value.flatten(0, 1), "out": out, "lse": lse}
