"""Fused layers of latents on the CPU: calls into csrc/layers, which fills tensors that are allocated here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.dtypes import FLOATING, state_dtype
from ..runtime.extension import load

_C = load()

_ACTIVATIONS = {"geglu": 0, "gelu": 1, "relu": 2}
"""Activation -> its number in csrc/linear/linear.h."""
_RESIDUALS = {"input": 0, "normed": 1}
"""Residual -> its number in csrc/linear/linear.h."""

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
    """Return the parameters by name, with contiguous vectors, because the kernels read vectors without strides."""
    return {n: p.contiguous() if p is not None and p.dim() == 1 else p for n, p in zip(names, parameters, strict=True)}


# A streaming update calls seven layers of a few latents each, where an allocation costs as much as the arithmetic.
# Sizes are therefore passed as ints, which torch parses in half the time of a shape, and empty results are allocated
# only once.

_NOTHING = {dtype: tuple(torch.empty(0, dtype=dtype, device="cpu") for _ in range(4)) for dtype in (torch.float32, torch.float64)}
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


def _gradients(x: Tensor, others: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Allocate gradients like x and the others. Return two lists: gradients that are not needed are empty, or None."""
    tensors = (x, *others)
    results = [_like(t) if need and t is not None else x.new_empty(0) for t, need in zip(tensors, needs, strict=True)]
    return results, [r if need and t is not None else None for r, t, need in zip(results, tensors, needs, strict=True)]


def feed_forward_layer(x: Tensor, *rest: Any) -> Tensor:
    """Return y for rows x (R, C)."""
    *parameters, eps, activation, residual = rest
    y = _like(x)
    _C.feed_forward_layer(**_feed_forward_inputs(x, parameters, eps, activation, residual), y=y)
    return y


def _feed_forward_inputs(x: Tensor, parameters: Sequence[Any], eps: float, activation: str, residual: str) -> dict[str, Any]:
    named: dict[str, Any] = _named(_FEED_FORWARD, parameters)
    named.update(x=x, eps=eps, activation=_ACTIVATIONS[activation], residual=_RESIDUALS[residual])
    return named


def feed_forward_layer_backward(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the gradients of x and the parameters in order, contiguous; empty tensors where not needed."""
    *parameters, eps, activation, residual, needs = rest
    results, wanted = _gradients(x, parameters, needs)
    named = dict(zip(("dx", *("d" + name for name in _FEED_FORWARD)), wanted, strict=True))
    _C.feed_forward_layer_backward(**_feed_forward_inputs(x, parameters, eps, activation, residual), dy=dy, **named)
    return tuple(results)


def _rows(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor (B, N, C) as rows (B N, C)."""
    return None if tensor is None else tensor.flatten(0, 1)


def attention_layer(x: Tensor, context: Tensor | None, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Return (y, query, key, value, out, lse) for x (B, L, C); all but y are empty unless `keep`, the last argument."""
    *parameters, heads, scale, eps, context_eps, residual, keep = rest
    batch, latents, _ = x.shape
    keys = latents if context is None else context.shape[1]
    depth, width, rows, others = parameters[4].shape[0], parameters[8].shape[0], batch * latents, batch * keys
    query, key, value = _sums(x, rows, depth), _sums(x, others, depth), _sums(x, others, width)
    out, lse, y = _sums(x, batch, heads, latents, width // heads), x.new_empty(batch, heads, latents, dtype=torch.float64), _like(x)
    if y.numel():
        inputs = _attention_inputs(x, context, mask, parameters, heads, scale, eps, context_eps, residual)
        _C.attention_layer(**inputs, query=query, key=key, value=value, out=out, lse=lse, y=y.flatten(0, 1))
    if not keep:
        return y, *_NOTHING[query.dtype], _NO_LSE
    return y, query.view(batch, latents, depth), key.view(batch, keys, depth), value.view(batch, keys, width), out, lse


def attention_layer_backward(dy: Tensor, x: Tensor, context: Tensor | None, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Return the gradients of x, context and the parameters in order, contiguous; empty tensors where not needed."""
    *parameters, heads, scale, eps, context_eps, residual, query, key, value, out, lse, needs = rest
    results, wanted = _gradients(x, (context, *parameters), needs)
    if not x.numel():
        return tuple(r.zero_() for r in results)
    names = ("dx", "dcontext", *("d" + name for name in _ATTENTION))
    gradients = dict(zip(names, (_rows(wanted[0]), _rows(wanted[1]), *wanted[2:]), strict=True))
    _C.attention_layer_backward(
        **_attention_inputs(x, context, mask, parameters, heads, scale, eps, context_eps, residual),
        query=_rows(query.contiguous()),
        key=_rows(key.contiguous()),
        value=_rows(value.contiguous()),
        out=out.contiguous(),
        lse=lse.contiguous(),
        dy=_rows(dy),
        **gradients,
    )
    return tuple(results)


def _attention_inputs(
    x: Tensor, context: Any, mask: Any, parameters: Sequence[Any], heads: int, scale: float, eps: float, context_eps: float, residual: str
) -> dict[str, Any]:
    named: dict[str, Any] = _named(_ATTENTION, parameters)
    named.update(x=_rows(x), context=_rows(context), key_padding_mask=None if mask is None else mask.contiguous().view(-1))
    named.update(eps=eps, context_eps=context_eps, scale=scale, batch=x.shape[0], num_heads=heads, residual=_RESIDUALS[residual])
    return named


def reads_heads(width: int) -> bool:
    """True if blocks can read their inputs with heads of this width."""
    return width <= int(_C.MAX_WIDTH)


collect_parameters = _C.collect_parameters
"""Look up the parameters of layers (csrc/layers/modules.cpp)."""


Settings = tuple[int, float, str]
"""The number of heads, the eps of all norms and the residual of stacked blocks."""


def _stack_inputs(x: Tensor, inputs: Any, mask: Any, parameters: tuple[Tensor, ...], settings: Settings) -> dict[str, Any]:
    heads, eps, residual = settings
    given = {"x": x.contiguous(), "inputs": inputs, "key_padding_mask": mask, "parameters": parameters, "num_heads": heads}
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
    _C.block_stack(**given, state_out=state[0], state_lse=state[1], out=out, lse=lse, y=last, between=between, kept=kept)
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
