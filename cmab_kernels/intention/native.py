"""What Intention sums over rows and applies to rows on the CPU: calls into csrc, which fills what is allocated here."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import NATIVE_DTYPES, state_dtype
from ..extension import load

_C = load()

NO_STRIDES = ()


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why this implementation cannot run these inputs, or None."""
    if key.device.type != "cpu":
        return f"native code runs on the CPU, key is on {key.device}"
    if key.dtype not in NATIVE_DTYPES:
        return f"no native kernel for {key.dtype}"
    return None


def _operand(tensor: Tensor | None) -> tuple[int, tuple[int, ...]]:
    return (0, NO_STRIDES) if tensor is None else (tensor.data_ptr(), tensor.stride())


def _inputs(key: Tensor, value: Tensor, weights: Tensor | None, key_padding_mask: Tensor | None, exact: bool) -> tuple:
    sizes = (NATIVE_DTYPES[key.dtype], *key.shape, value.shape[-1], exact, torch.get_num_threads())
    return (sizes, *_operand(key), *_operand(value), *_operand(weights), *_operand(key_padding_mask))


def gram(
    key: Tensor, value: Tensor, weights: Tensor | None, key_padding_mask: Tensor | None, parts: tuple[bool, bool], exact: bool
) -> tuple[Tensor, Tensor]:
    """(K'WK, K'WV) in float64, of products in float64 (`exact`) or in the state's type; an empty tensor for the part not wanted."""
    batch, heads, _, width = key.shape
    first = key.new_empty((batch, heads, width, width) if parts[0] else 0, dtype=torch.float64)
    moment = key.new_empty((batch, heads, width, value.shape[-1]) if parts[1] else 0, dtype=torch.float64)
    addresses = (t.data_ptr() if part else 0 for t, part in zip((first, moment), parts, strict=True))
    _C.gram(*_inputs(key, value, weights, key_padding_mask, exact), *addresses)
    return first, moment


def gram_backward(
    dgram: Tensor,
    dmoment: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | None,
    key_padding_mask: Tensor | None,
    needs: tuple[bool, bool, bool],
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dkey, dvalue, dweights); an empty tensor where `needs` says no."""
    dkey = key.new_empty(key.shape if needs[0] else 0)
    dvalue = value.new_empty(value.shape if needs[1] else 0)
    dweights = key.new_empty(key.shape[:-1] if needs[2] else 0, dtype=state_dtype(key.dtype))
    addresses = (t.data_ptr() if need else 0 for t, need in zip((dkey, dvalue, dweights), needs, strict=True))
    inputs = _inputs(key, value, weights, key_padding_mask, exact)
    _C.gram_backward(*inputs, *_operand(dgram), *_operand(dmoment), *addresses)
    return dkey, dvalue, dweights


def apply_rows(query: Tensor, weight: Tensor) -> Tensor:
    """query @ weight in query's dtype, with the products of the state's type."""
    out = query.new_empty((*query.shape[:-1], weight.shape[-1]))
    sizes = (NATIVE_DTYPES[query.dtype], *query.shape, weight.shape[-1], torch.get_num_threads())
    _C.apply_rows(sizes, *_operand(query), *_operand(weight), out.data_ptr())
    return out
