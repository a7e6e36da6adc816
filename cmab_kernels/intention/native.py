"""What Intention sums over rows and applies to rows on the CPU: calls into csrc/gram, which fills the tensors that are allocated here."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import FLOATING, state_dtype
from ..extension import load

_C = load()


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why this implementation cannot run these inputs, or None."""
    if key.device.type != "cpu":
        return f"native code runs on the CPU, key is on {key.device}"
    if key.dtype not in FLOATING:
        return f"no native kernel for {key.dtype}"
    return None


def gram(
    key: Tensor, value: Tensor, weights: Tensor | None, key_padding_mask: Tensor | None, parts: tuple[bool, bool], exact: bool
) -> tuple[Tensor, Tensor]:
    """(K'WK, K'WV) in float64, of products in float64 (`exact`) or in the state's type; an empty tensor for the part not wanted."""
    batch, heads, _, width = key.shape
    first = key.new_empty((batch, heads, width, width) if parts[0] else 0, dtype=torch.float64)
    moment = key.new_empty((batch, heads, width, value.shape[-1]) if parts[1] else 0, dtype=torch.float64)
    _C.gram(
        key=key,
        value=value,
        weights=weights,
        key_padding_mask=key_padding_mask,
        exact=exact,
        gram=first if parts[0] else None,
        moment=moment if parts[1] else None,
    )
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
    _C.gram_backward(
        key=key,
        value=value,
        weights=weights,
        key_padding_mask=key_padding_mask,
        exact=exact,
        dgram=dgram,
        dmoment=dmoment,
        dkey=dkey if needs[0] else None,
        dvalue=dvalue if needs[1] else None,
        dweights=dweights if needs[2] else None,
    )
    return dkey, dvalue, dweights


def apply_rows(query: Tensor, weight: Tensor) -> Tensor:
    """query @ weight in query's dtype, with the products of the state's type."""
    out = query.new_empty((*query.shape[:-1], weight.shape[-1]))
    _C.apply_rows(query=query, weight=weight, out=out)
    return out
