"""Fused layers of latents on the CPU: calls into csrc/layers, which fills tensors that are allocated here."""

from __future__ import annotations

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
_RESIDUALS = {"input": 0, "normed": 1}
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

_NOTHING = {
    dtype: tuple(torch.empty(0, dtype=dtype, device="cpu") for _ in range(4))
    for dtype in (torch.float32, torch.float64)
}
_NO_LSE = torch.empty(0, dtype=torch.float64, device="cpu")
_OF_BLOCK, _OF_READING = int(_C.TENSORS_OF_BLOCK), int(_C.TENSORS_OF_READING)
_NORM = range(1, 3)  # parameters of the norm of the block latents
_READING = range(1, _OF_READING)  # parameters that only the first cross-attention uses, before its output projection


def _like(x: Tensor) -> Tensor:
    """Return uninitialised contiguous memory with the shape of x.

    The result is contiguous for an empty x, too; torch regards an empty x as contiguous with any strides.
    """
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _sums(x: Tensor, *shape: int) -> Tensor:
    """Return uninitialised memory in the dtype of sums over x."""
    dtype = state_dtype(x.dtype)
    return x.new_empty(*shape) if x.dtype == dtype else x.new_empty(*shape, dtype=dtype)


def _gradients(arguments: Sequence[str], inputs: Any) -> tuple[tuple[Tensor, ...], dict[str, Tensor | None]]:
    """Allocate the gradients of these arguments; those that are not needed are empty. Return them, and those to fill by
    name."""
    results, wanted = [], {}
    for argument, need in zip(arguments, inputs.needs, strict=True):
        tensor = getattr(inputs, argument)
        result = wanted[f"d{argument}"] = _like(tensor) if need and tensor is not None else None
        results.append(inputs.x.new_empty(0) if result is None else result)
    return tuple(results), wanted


def feed_forward_layer(inputs: FeedForwardLayer) -> Tensor:
    """Return y for rows x (R, C)."""
    y = _like(inputs.x)
    _C.feed_forward_layer(**_feed_forward_inputs(inputs), y=y)
    return y


def _feed_forward_inputs(inputs: FeedForwardLayer | FeedForwardLayerBackward) -> dict[str, Any]:
    named = _named(NETWORK, inputs)
    named.update(
        x=inputs.x, eps=inputs.eps, activation=_ACTIVATIONS[inputs.activation], residual=_RESIDUALS[inputs.residual]
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
    query, key, value = _sums(x, rows, depth), _sums(x, others, depth), _sums(x, others, width)
    out, lse, y = (
        _sums(x, batch, heads, latents, width // heads),
        x.new_empty(batch, heads, latents, dtype=torch.float64),
        _like(x),
    )
    if y.numel():
        _C.attention_layer(
            **_attention_inputs(inputs), query=query, key=key, value=value, out=out, lse=lse, y=y.flatten(0, 1)
        )
    if not inputs.keep:
        return y, *_NOTHING[query.dtype], _NO_LSE
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
    named.update(residual=_RESIDUALS[inputs.residual])
    return named


def reads_heads(width: int) -> bool:
    """True if blocks can read their inputs with heads of this width."""
    return width <= int(_C.MAX_WIDTH)


collect_parameters = _C.collect_parameters
"""Look up the parameters of layers (csrc/layers/modules.cpp)."""


Settings = tuple[int, float, str]
"""The number of heads, the eps of all norms and the residual of stacked blocks."""


def _stack_inputs(
    x: Tensor, inputs: Any, mask: Any, parameters: tuple[Tensor, ...], settings: Settings
) -> dict[str, Any]:
    heads, eps, residual = settings
    given = {
        "x": x.contiguous(),
        "inputs": inputs,
        "key_padding_mask": mask,
        "parameters": parameters,
        "num_heads": heads,
    }
    return {**given, "scale": (x.shape[-1] // heads) ** -0.5, "eps": eps, "residual": _RESIDUALS[residual]}


def block_stack(
    x: Tensor,
    inputs: Tensor | None,
    mask: Tensor | None,
    state: tuple[Tensor | None, Tensor | None],
    attended: Tensor | None,
    parameters: tuple[Tensor, ...],
    settings: Settings,
    *,
    keep: bool,
    all_blocks: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return (y, out, lse, kept) of stacked blocks, for `layers.block`.

    If `attended` is given, `out` is `attended` and `lse` is None. `kept`, for the backward pass, is None unless `keep`.
    """
    given, heads = _stack_inputs(x, inputs, mask, parameters, settings), settings[0]
    blocks, latents = len(parameters) // _OF_BLOCK, parameters[0].shape[0]
    if attended is None:
        out, lse = _new_state(x, blocks, heads, latents)
    else:
        out, lse = attended.contiguous(), None
    y = x.new_empty(blocks, *x.shape) if all_blocks else _like(x)
    last, between = (y[-1], y[:-1]) if all_blocks else (y, None)
    kept = None
    if keep:
        size = _C.block_stack_bytes(x=given["x"], num_heads=heads, block_latents=latents, depth=blocks)
        kept = torch.empty(size // 8, dtype=torch.float64, device="cpu")
    _C.block_stack(
        **given, state_out=state[0], state_lse=state[1], out=out, lse=lse, y=last, between=between, kept=kept
    )
    return y, out, lse, kept


def _new_state(x: Tensor, blocks: int, heads: int, latents: int) -> tuple[Tensor, Tensor]:
    """Return memory for the state of the first cross-attentions of stacked blocks, for inputs like x (B, ..., C)."""
    sets, width = blocks * x.shape[0], x.shape[-1] // heads
    return _sums(x, sets, heads, latents, width), x.new_empty(sets, heads, latents, dtype=torch.float64)


def block_stack_read(
    inputs: Tensor,
    mask: Tensor | None,
    state: tuple[Tensor | None, Tensor | None],
    parameters: tuple[Tensor, ...],
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """Return the state (out, lse) of the first cross-attentions of stacked blocks with these parameters."""
    out, lse = _new_state(inputs, len(parameters) // _OF_READING, settings[0], parameters[0].shape[0])
    given = _stack_inputs(inputs, inputs, mask, parameters, settings)
    del given["x"], given["residual"]
    _C.block_stack_read(**given, state_out=state[0], state_lse=state[1], out=out, lse=lse)
    return out, lse


def block_stack_backward(
    dy: Tensor,
    y: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    kept: Tensor,
    x: Tensor,
    inputs: Tensor | None,
    mask: Tensor | None,
    attended: Tensor | None,
    parameters: tuple[Tensor, ...],
    settings: Settings,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, inputs, attended and the parameters; None for each gradient that is not needed.

    `y` holds the latents after each block, and `dy` is their gradient. If `y` is None, `dy` is the gradient of the last
    block's latents alone.
    """
    slopes = dy.contiguous()
    dx, dinputs = x.new_empty(x.shape), None if inputs is None or not needs[1] else inputs.new_empty(inputs.shape)
    dattended = None if attended is None else torch.empty_like(out)
    unused = () if attended is None else set(_READING) - set(_NORM if settings[2] == "normed" else ())
    wanted = [i for i, need in enumerate(needs[4:]) if need and i % _OF_BLOCK not in unused]
    gradients: list[Tensor | None] = [None] * len(parameters)
    for i in wanted:
        gradients[i] = parameters[i].new_empty(parameters[i].shape)
    _C.block_stack_backward(
        **_stack_inputs(x, inputs, mask, parameters, settings),
        dy=slopes if y is None else slopes[-1],
        dbetween=None if y is None else slopes[:-1],
        between=None if y is None else y[:-1],
        out=out,
        lse=lse,
        kept=kept,
        dx=dx,
        dinputs=dinputs,
        dattended=dattended,
        gradients=tuple(gradients),
    )
    return dx, dinputs, dattended, *gradients
