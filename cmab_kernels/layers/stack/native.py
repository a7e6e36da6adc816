"""Stacked blocks on the CPU: calls into csrc/layers, which fills tensors that are allocated here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.dtypes import default_scale
from ...runtime.extension import load
from ..native import RESIDUALS, like, nothing, sums
from ..native import unsupported as unsupported_rows
from .contract import BlockStack, BlockStackBackward, BlockStackRead, kept_bytes

_C = load()
_OF_BLOCK, _OF_READING = int(_C.TENSORS_OF_BLOCK), int(_C.TENSORS_OF_READING)

collect_parameters = _C.collect_parameters
"""Look up the parameters of layers (csrc/layers/modules.cpp)."""


def unsupported(x: Tensor, *heads: Tensor) -> str | None:
    """The reason why this implementation cannot run latents x, and their heads if these are given; None if it can."""
    if heads and not reads_heads(heads[0].shape[-1]):
        return f"native code reads inputs with heads of at most {int(_C.MAX_WIDTH)} columns"
    return unsupported_rows(x)


def reads_heads(width: int) -> bool:
    """True if blocks can read their inputs with heads of this width."""
    return width <= int(_C.MAX_WIDTH)


def _read_inputs(given: BlockStack | BlockStackRead | BlockStackBackward) -> dict[str, Any]:
    return {
        "inputs": given.inputs,
        "key_padding_mask": given.key_padding_mask,
        "parameters": tuple(given.parameters),
        "num_heads": given.num_heads,
        "scale": default_scale(given.parameters[0].shape[-1] // given.num_heads),
        "eps": given.eps,
    }


def _stack_inputs(given: BlockStack | BlockStackBackward) -> dict[str, Any]:
    return {**_read_inputs(given), "x": given.x.contiguous(), "residual": RESIDUALS[given.residual]}


def _new_state(x: Tensor, blocks: int, heads: int, latents: int) -> tuple[Tensor, Tensor]:
    """Return memory for the state of the first cross-attentions of stacked blocks, for inputs like x (B, ..., C)."""
    sets, width = blocks * x.shape[0], x.shape[-1] // heads
    return sums(x, sets, heads, latents, width), x.new_empty(sets, heads, latents, dtype=torch.float64)


def block_stack(given: BlockStack) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, out, lse, kept)."""
    x, heads, latents = given.x, given.num_heads, given.parameters[0].shape[0]
    blocks = len(given.parameters) // _OF_BLOCK
    if given.inputs is None:
        assert given.state_out is not None
        state = nothing(given.state_out.dtype)[0], nothing(given.state_out.dtype)[4]
        filled = {"out": given.state_out.contiguous(), "lse": None, "state_out": None, "state_lse": None}
    else:
        state = _new_state(x, blocks, heads, latents)
        filled = {"out": state[0], "lse": state[1], "state_out": given.state_out, "state_lse": given.state_lse}
    y = x.new_empty(blocks, *x.shape) if given.all_blocks else like(x)
    last, between = (y[-1], y[:-1]) if given.all_blocks else (y, None)
    kept = x.new_empty(kept_bytes(given, blocks) // 8, dtype=torch.float64) if given.keep else nothing(torch.float64)[5]
    _C.block_stack(
        **_stack_inputs(given),
        **filled,
        y=last,
        between=None if given.keep else between,
        kept=kept if given.keep else None,
    )
    if given.keep and between is not None:  # the backward pass must not read memory that a caller may write to
        between.copy_(kept.view(x.dtype).view(blocks, -1)[:-1, : x.numel()].view_as(between))
    return y, *state, kept


def block_stack_read(given: BlockStackRead) -> tuple[Tensor, Tensor]:
    """Return the state (out, lse) of the first cross-attentions."""
    blocks, latents = len(given.parameters) // _OF_READING, given.parameters[0].shape[0]
    out, lse = _new_state(given.inputs, blocks, given.num_heads, latents)
    _C.block_stack_read(**_read_inputs(given), state_out=given.state_out, state_lse=given.state_lse, out=out, lse=lse)
    return out, lse


def block_stack_backward(given: BlockStackBackward) -> tuple[Tensor, ...]:
    """Return the gradients of x, inputs, state_out and the parameters, contiguous; empty tensors where not needed."""
    slopes = given.dy.contiguous()
    tensors = (given.x, given.inputs, given.state_out, *given.parameters)
    wanted = [None if t is None or not need else like(t) for t, need in zip(tensors, given.needs, strict=True)]
    dx, dinputs, dstate, *gradients = wanted
    if given.inputs is None:
        assert given.state_out is not None
        out, lse, dstate = given.state_out.contiguous(), None, like(given.state_out) if dstate is None else dstate
    else:
        out, lse = given.out.contiguous(), given.lse.contiguous()
    _C.block_stack_backward(
        **_stack_inputs(given),
        dy=slopes[-1] if given.all_blocks else slopes,
        dbetween=slopes[:-1] if given.all_blocks else None,
        between=None,
        out=out,
        lse=lse,
        kept=given.kept.contiguous(),
        dx=like(given.x) if dx is None else dx,
        dinputs=dinputs,
        dattended=dstate,
        gradients=tuple(gradients),
    )
    return tuple(given.x.new_empty(0) if gradient is None else gradient for gradient in wanted)
