"""Sums over keys, and rows times a matrix, on the CPU: calls into csrc/intention, which fills the tensors that are
allocated here."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.dtypes import FLOATING, state_dtype
from ..runtime.extension import load
from .contract import ApplyRows, Gram, GramBackward, RidgeUpdate

_C = load()


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """The reason why this implementation cannot run these inputs, as a phrase; None if it can run them."""
    if key.device.type != "cpu":
        return f"native code runs on the CPU, key is on {key.device}"
    if key.dtype not in FLOATING:
        return f"no native kernel for {key.dtype}"
    return None


def gram(inputs: Gram) -> tuple[Tensor, Tensor]:
    """Return (K'WK, K'WV) in float64; a part that is not requested is empty."""
    key, value, weights, mask, offsets, parts, exact, _ = inputs
    batch, heads, _, width = key.shape
    batch = batch if offsets is None else offsets.shape[0] - 1
    first = key.new_empty((batch, heads, width, width) if parts[0] else 0, dtype=torch.float64)
    moment = key.new_empty((batch, heads, width, value.shape[-1]) if parts[1] else 0, dtype=torch.float64)
    _C.gram(
        cu_seqlens=offsets,
        key=key,
        value=value,
        weights=weights,
        key_padding_mask=mask,
        exact=exact,
        gram=first if parts[0] else None,
        moment=moment if parts[1] else None,
    )
    return first, moment


def ridge_update(inputs: RidgeUpdate) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums over the keys, formed in float64, and their number, added to the previous values if given."""
    key, value, weights, mask, offsets, gram_before, moment_before, count_before, _ = inputs
    batch, heads, _, width = key.shape  # torch parses ints in half the time of a shape
    batch = batch if offsets is None else offsets.shape[0] - 1
    new = (
        key.new_empty(batch, heads, width, width, dtype=torch.float64),
        key.new_empty(batch, heads, width, value.shape[3], dtype=torch.float64),
        key.new_empty(batch, heads, dtype=torch.int64),
    )
    _C.ridge_update(
        cu_seqlens=offsets,
        key=key,
        value=value,
        weights=weights,
        key_padding_mask=mask,
        gram_before=gram_before,
        moment_before=moment_before,
        count_before=count_before,
        gram=new[0],
        moment=new[1],
        count=new[2],
    )
    return new


def ridge_step(inputs: RidgeUpdate, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (weight, info, gram, moment, count): sums and count as in `ridge_update`, and their solution."""
    key, value, weights, mask, _offsets, gram_before, moment_before, count_before, _ = inputs
    assert gram_before is not None and moment_before is not None and count_before is not None
    before = (gram_before, moment_before, count_before)
    gram, moment, count = (torch.empty_like(part, memory_format=torch.contiguous_format) for part in before)
    weight, info = torch.empty_like(moment), torch.empty_like(count, dtype=torch.int32)
    _C.ridge_step(
        cu_seqlens=None,
        key=key,
        value=value,
        weights=weights,
        key_padding_mask=mask,
        gram_before=gram_before,
        moment_before=moment_before,
        count_before=count_before,
        gram=gram,
        moment=moment,
        count=count,
        alpha=alpha.contiguous(),
        weight=weight,
        info=info,
    )
    return weight, info, gram, moment, count


def gram_backward(inputs: GramBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dkey, dvalue, dweights), contiguous; tensors that are not in `needs` are empty."""
    dgram, dmoment, key, value, weights, mask, offsets, needs, exact, _ = inputs
    dkey = key.new_empty(key.shape if needs[0] else 0)
    dvalue = value.new_empty(value.shape if needs[1] else 0)
    dweights = key.new_empty(key.shape[:-1] if needs[2] else 0, dtype=state_dtype(key.dtype))
    _C.gram_backward(
        cu_seqlens=offsets,
        key=key,
        value=value,
        weights=weights,
        key_padding_mask=mask,
        exact=exact,
        dgram=dgram,
        dmoment=dmoment,
        dkey=dkey if needs[0] else None,
        dvalue=dvalue if needs[1] else None,
        dweights=dweights if needs[2] else None,
    )
    return dkey, dvalue, dweights


def apply_rows(inputs: ApplyRows) -> Tensor:
    """Return query @ weight in the dtype of the query; products are formed in the dtype of sums."""
    query, weight, _ = inputs
    out = query.new_empty((*query.shape[:-1], weight.shape[-1]))
    _C.apply_rows(query=query, weight=weight, out=out)
    return out
