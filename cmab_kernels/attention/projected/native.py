"""Attention over projected inputs on the CPU: calls into csrc/projected, which fills the tensors that are allocated
here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.dtypes import FLOATING
from ...runtime.extension import load
from ..native import forget_beyond
from .contract import ProjectedAttention, ProjectedAttentionBackward

_C = load()


def unsupported(query: Tensor, inputs: Tensor, key_weight: Tensor, value_weight: Tensor) -> str | None:
    """The reason why this implementation cannot run these inputs, as a phrase; None if it can run them."""
    if inputs.device.type != "cpu":
        return f"native code runs on the CPU, inputs are on {inputs.device}"
    if inputs.dtype not in FLOATING:
        return f"no native kernel for {inputs.dtype}"
    key, value = query.shape[-1], value_weight.shape[-2] // query.shape[-3]
    if max(key, value) > _C.MAX_WIDTH:
        return f"native kernels go up to a width of {_C.MAX_WIDTH}, keys are {key} wide, values {value}"
    return None


def _joined(stacked: Tensor | None) -> Tensor | None:
    """A tensor (K, B, ...) with blocks and batch flattened into one dimension, (K B, ...)."""
    return None if stacked is None else stacked.flatten(0, 1)


def _inputs(given: ProjectedAttention | ProjectedAttentionBackward) -> dict[str, Any]:
    """The arguments that the forward and the backward call share."""
    return {
        "query": _joined(given.query),
        "cu_seqlens": None if given.cu_seqlens is None else given.cu_seqlens.contiguous(),
        "inputs": given.inputs,
        "key_padding_mask": given.key_padding_mask,
        "weight": given.weight.contiguous(),
        "bias": given.bias.contiguous(),
        "scale": given.scale,
        "normed": given.eps is not None,
        "eps": given.eps or 0.0,
    }


def projected_attention_forward(given: ProjectedAttention) -> tuple[Tensor, Tensor]:
    """Return (out, lse): the attention of the queries over these inputs, merged with the incoming state if there is
    one."""
    query, weight = given.query, given.weight
    heads, width = query.shape[2], query.shape[4]
    out = query.new_empty((*query.shape[:4], weight.shape[1] // heads - width))
    lse = query.new_empty(query.shape[:4], dtype=torch.float64)
    _C.projected_attention_forward(
        **_inputs(given),
        state_out=_joined(given.state_out),
        state_lse=_joined(given.state_lse),
        out=_joined(out),
        lse=_joined(lse),
    )
    return out, lse


def projected_attention_backward(given: ProjectedAttentionBackward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients (dquery, dinputs, dweight, dbias), contiguous; tensors that are not in `needs` are empty."""
    tensors, needs = (given.query, given.inputs, given.weight, given.bias), given.needs
    dquery, dinputs, dweight, dbias = (
        x.new_empty(x.shape if need else 0) for x, need in zip(tensors, needs, strict=True)
    )
    _C.projected_attention_backward(
        **_inputs(given),
        dout=_joined(given.dout),
        dlse=_joined(given.dlse),
        out=_joined(given.out.contiguous()),
        lse=_joined(given.lse.contiguous()),
        dquery=_joined(dquery) if needs[0] else None,
        dinputs=dinputs if needs[1] else None,
        dweight=dweight if needs[2] else None,
        dbias=dbias if needs[3] else None,
    )
    if given.cu_seqlens is not None and needs[1]:
        forget_beyond(given.cu_seqlens, [dinputs], 1)
    return dquery, dinputs, dweight, dbias
