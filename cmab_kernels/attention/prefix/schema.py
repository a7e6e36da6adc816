"""The states of all prefixes and their gradient as `torch.library` operators: contracts, shapes, FLOP counts and
derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.checks import mismatch
from ...runtime.dtypes import state_dtype
from ...runtime.operator import Call, Gradients, Operator, derivatives_of, gradient_shapes
from .contract import PrefixAttention, PrefixAttentionBackward
from .reference import prefix_attention_backward_reference, prefix_attention_reference


def _definition(inputs: PrefixAttention) -> tuple[Tensor, Tensor]:
    query, key, value, mask, state_out, state_lse, key_bias, log_decay, every, scale, _ = inputs
    return prefix_attention_reference(query, key, value, mask, state_out, state_lse, every, scale, key_bias, log_decay)


def _check_needs(inputs: PrefixAttentionBackward) -> None:
    """Raise if the gradient of one part of the state is needed without the other: kernels compute them together."""
    _, _, _, needs_out, needs_lse, _, _ = inputs.needs
    if needs_out != needs_lse:
        raise ValueError(
            mismatch("needs", tuple(inputs.needs), "equal values for state_out and state_lse, the fourth and the fifth")
        )


def _shapes(inputs: PrefixAttention) -> tuple[Tensor, Tensor]:
    query, key, value = inputs.query, inputs.key, inputs.value
    batch, heads, latents, _ = query.shape
    shape = (batch, heads, -(-key.shape[2] // inputs.every), latents)
    return query.new_empty(*shape, value.shape[-1], dtype=state_dtype(query.dtype)), query.new_empty(
        shape, dtype=torch.float64
    )


def _operations(inputs: Any) -> int:
    """FLOPs of the products S = Q K' and P V, and of one division by the sum of weights for each prefix."""
    batch, heads, latents, width = inputs.query
    keys, value_width = inputs.key[2], inputs.value[-1]
    return batch * heads * latents * (2 * keys * (width + value_width) + -(-keys // inputs.every) * value_width)


def _backward_operations(inputs: Any) -> int:
    """FLOPs of the scan, and of the products among S, A V', P' A, dQ and dK that the required
    gradients use.

    The scan takes two multiply-adds per element, and a third for the gradient of log_decay.
    """
    batch, heads, latents, width = inputs.query
    keys, value_width = inputs.key[2], inputs.value[-1]
    needs_query, needs_key, needs_value, _, _, needs_bias, needs_decay = inputs.needs
    needs_scores = needs_query or needs_key or needs_bias
    widths = width * (1 + needs_query + needs_key) + value_width * (needs_scores + needs_value)
    scan = -(-keys // inputs.every) * (2 + needs_decay) * value_width
    return 2 * batch * heads * latents * (keys * widths + scan)


# ---- gradients


_DIFFERENTIATED = ("query", "key", "value", "state_out", "state_lse", "key_bias", "log_decay")


def _backward(call: Call[PrefixAttention], dout: Tensor, dlse: Tensor) -> Gradients:
    query, key, value, mask, state_out, state_lse, key_bias, log_decay, every, scale, impl = call.inputs
    out, lse = call.kept
    needs_state = any(call.needs("state_out", "state_lse"))
    needs = (*call.needs("query", "key", "value"), needs_state, needs_state, *call.needs("key_bias", "log_decay"))
    inputs = PrefixAttentionBackward(
        dout,
        dlse,
        query,
        key,
        value,
        mask,
        state_out,
        state_lse,
        out,
        lse,
        key_bias,
        log_decay,
        every,
        scale,
        needs,
        impl,
    )
    return dict(zip(_DIFFERENTIATED, _backward_op(inputs), strict=True))


def _backward_formula(inputs: PrefixAttentionBackward) -> tuple[Tensor, ...]:
    """The gradients by the reference, which stores T L N scores. `out` and `lse` count as inputs."""
    dout, dlse, query, key, value, mask, state_out, state_lse, out, lse, key_bias, log_decay, every, scale, _, _ = (
        inputs
    )
    return prefix_attention_backward_reference(
        dout, dlse, query, key, value, mask, state_out, state_lse, out, lse, every, scale, key_bias, log_decay
    )


prefix_attention_op = Operator(
    "attention.prefix",
    "prefix_attention",
    PrefixAttention,
    ("out", "lse"),
    shapes=_shapes,
    operations=_operations,
    backward=_backward,
    keeps=(*PrefixAttention._fields, "out", "lse"),
    reference=_definition,
    function="prefix_forward",
)
_backward_op = Operator(
    "attention.prefix",
    "prefix_attention_backward",
    PrefixAttentionBackward,
    tuple(f"d{argument}" for argument in _DIFFERENTIATED),
    shapes=gradient_shapes(*_DIFFERENTIATED),
    operations=_backward_operations,
    backward=derivatives_of(_backward_formula, "dout", "dlse", *_DIFFERENTIATED, "out", "lse"),
    check=_check_needs,
    function="prefix_backward",
)
