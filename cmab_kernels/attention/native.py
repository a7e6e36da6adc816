"""Latent cross-attention on the CPU: calls into csrc, which gets addresses and strides and fills what is allocated here."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import NATIVE_DTYPES, state_dtype
from ..extension import load

_C = load()

MAX_WIDTH = _C.MAX_WIDTH
NO_STRIDES = ()


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why this implementation cannot run these inputs, or None."""
    if query.device.type != "cpu":
        return f"native code runs on the CPU, query is on {query.device}"
    if query.dtype not in NATIVE_DTYPES:
        return f"no native kernel for {query.dtype}"
    if max(query.shape[-1], value.shape[-1]) > MAX_WIDTH:
        return f"native kernels go up to a width of {MAX_WIDTH}, key is {query.shape[-1]} wide, value {value.shape[-1]}"
    return None


def _inputs(query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None, scale: float) -> tuple:
    batch, heads, queries, width = query.shape
    keys, value_width = value.shape[2:]
    sizes = (NATIVE_DTYPES[query.dtype], batch, heads, queries, keys, width, value_width, scale, torch.get_num_threads())
    mask = (0, NO_STRIDES) if key_padding_mask is None else (key_padding_mask.data_ptr(), key_padding_mask.stride())
    sets = (0, False) if cu_seqlens is None else (cu_seqlens.data_ptr(), cu_seqlens.dtype == torch.int64)
    return (sizes, *_operand(query), *_operand(key), *_operand(value), *mask, *sets)


def _operand(tensor: Tensor | None) -> tuple[int, tuple[int, ...]]:
    return (0, NO_STRIDES) if tensor is None else (tensor.data_ptr(), tensor.stride())


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state_out: Tensor | None,
    state_lse: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the keys, merged with the incoming state."""
    out = query.new_empty((*query.shape[:3], value.shape[3]), dtype=state_dtype(query.dtype))
    lse = query.new_empty(query.shape[:3], dtype=torch.float64)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    inputs = _inputs(query, key, value, key_padding_mask, cu_seqlens, scale)
    _C.attention_forward(*inputs, *_operand(state_out), *_operand(state_lse), out.data_ptr(), lse.data_ptr())
    return out, lse


def attention_backward(
    dout: Tensor,
    dlse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dquery, dkey, dvalue); an empty tensor where `needs` says no."""
    gradients = [x.new_empty(x.shape if need else 0) for x, need in zip((query, key, value), needs, strict=True)]
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    out, lse = out.contiguous(), lse.contiguous()
    addresses = (g.data_ptr() if need else 0 for g, need in zip(gradients, needs, strict=True))
    _C.attention_backward(
        *_inputs(query, key, value, key_padding_mask, cu_seqlens, scale),
        *_operand(dout),
        *_operand(dlse),
        out.data_ptr(),
        lse.data_ptr(),
        *addresses,
    )
    dquery, dkey, dvalue = gradients
    return dquery, dkey, dvalue
