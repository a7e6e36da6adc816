"""Latent cross-attention on the CPU: calls into csrc/attention, which fills the tensors that are allocated here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..runtime.dtypes import FLOATING, state_dtype
from ..runtime.extension import load
from .contract import Attention, AttentionBackward

_C = load()

MAX_WIDTH = _C.MAX_WIDTH


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """The reason why this implementation cannot run these inputs, as a phrase; None if it can run them."""
    if query.device.type != "cpu":
        return f"native code runs on the CPU, query is on {query.device}"
    if query.dtype not in FLOATING:
        return f"no native kernel for {query.dtype}"
    if max(query.shape[-1], value.shape[-1]) > MAX_WIDTH:
        return f"native kernels go up to a width of {MAX_WIDTH}, key is {query.shape[-1]} wide, value {value.shape[-1]}"
    return None


def attention_forward(inputs: Attention, reliable: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (out, lse): the attention of the queries over these keys, merged with the incoming state if there is one.

    If `reliable` is given, the keys are removed from the incoming state instead, and `reliable` is filled.
    """
    query, key, value, mask, cu_seqlens, state_out, state_lse, key_bias, scale, _ = inputs
    batch, heads, latents, _ = query.shape  # torch parses ints in half the time of a shape
    out = query.new_empty(batch, heads, latents, value.shape[3], dtype=state_dtype(query.dtype))
    lse = query.new_empty(batch, heads, latents, dtype=torch.float64)
    _C.attention_forward(
        query=query,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.contiguous(),
        key=key,
        value=value,
        key_padding_mask=mask,
        key_bias=key_bias,
        scale=scale,
        state_out=state_out,
        state_lse=state_lse,
        out=out,
        lse=lse,
        reliable=reliable,
    )
    return out, lse


def attention_removal(inputs: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, lse, reliable): the incoming state without these keys."""
    assert inputs.state_lse is not None
    reliable = torch.empty_like(inputs.state_lse, dtype=torch.bool, memory_format=torch.contiguous_format)
    return *attention_forward(inputs, reliable), reliable


def merge_states(first_out: Tensor, first_lse: Tensor, second_out: Tensor, second_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse), the state of the union of two disjoint sets of keys, with any dimensions before (L, E)."""
    if first_out.dim() != 4:
        shape, rows = first_out.shape, (1, 1, first_lse.numel())
        outs = (out.reshape(*rows, shape[-1]) for out in (first_out, second_out))
        lses = (lse.reshape(rows) for lse in (first_lse, second_lse))
        out, lse = merge_states(*itertools.chain(*zip(outs, lses, strict=True)))
        return out.view(shape), lse.view(shape[:-1])
    first_out, first_lse = first_out.contiguous(), first_lse.contiguous()
    out, lse = torch.empty_like(first_out), torch.empty_like(first_lse)
    _C.merge_states(
        first_out=first_out,
        second_out=second_out.contiguous(),
        first_lse=first_lse,
        second_lse=second_lse.contiguous(),
        out=out,
        lse=lse,
    )
    return out, lse


def is_not_below_infinity(lse: Tensor) -> bool | None:
    """True if a log-sum-exp is NaN or +inf, else False; None for a tensor whose layout native code cannot read."""
    found: bool | None = _C.is_not_below_infinity(lse=lse)
    return found


def attention_backward(inputs: AttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients (dquery, dkey, dvalue, dkey_bias), contiguous; tensors that are not in `needs` are empty."""
    dout, dlse, query, key, value, mask, cu_seqlens, out, lse, key_bias, scale, needs, _ = inputs
    of_bias = query if key_bias is None else key_bias
    dquery, dkey, dvalue, dbias = (
        x.new_empty(x.shape if need else 0) for x, need in zip((query, key, value, of_bias), needs, strict=True)
    )
    _C.attention_backward(
        query=query,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.contiguous(),
        key=key,
        value=value,
        key_padding_mask=mask,
        key_bias=key_bias,
        scale=scale,
        dout=dout,
        dlse=dlse,
        out=out.contiguous(),
        lse=lse.contiguous(),
        dquery=dquery if needs[0] else None,
        dkey=dkey if needs[1] else None,
        dvalue=dvalue if needs[2] else None,
        dkey_bias=dbias if needs[3] else None,
    )
    if cu_seqlens is not None:
        of_keys = zip((dkey, dvalue, dbias), needs[1:], strict=True)
        forget_beyond(cu_seqlens, [grad for grad, need in of_keys if need], 2)
    return dquery, dkey, dvalue, dbias


def forget_beyond(cu_seqlens: Tensor, gradients: Sequence[Tensor], dim: int) -> None:
    """Fill gradients with zeros for the rows beyond the last of the packed sets, which kernels do not visit."""
    end = int(cu_seqlens[-1])
    for gradient in gradients:
        if end < gradient.shape[dim]:
            gradient.narrow(dim, end, gradient.shape[dim] - end).zero_()
