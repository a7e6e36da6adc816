"""The states of all prefixes and their gradient as `torch.library` operators: contracts, shapes, FLOP counts and derivatives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.checks import mismatch
from ...runtime.dtypes import state_dtype
from ...runtime.operator import Call, Gradients, Operator, derivatives_of, gradient_shapes
from .reference import prefix_attention_backward_reference, prefix_attention_reference

Needs = tuple[bool, bool, bool, bool, bool]
"""Whether the gradients of query, key, value, state_out and state_lse are needed. The last two must be equal."""


class PrefixAttention(NamedTuple):
    """The arguments of `cmab::prefix_attention`, whose results are the states (out, lse) of all prefixes."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    state_out: Tensor | None = None
    state_lse: Tensor | None = None
    every: int = 1
    scale: float = 1.0
    impl: str = "auto"


class PrefixAttentionBackward(NamedTuple):
    """The arguments of `cmab::prefix_attention_backward`, whose results are the gradients of query, key, value and state."""

    dout: Tensor
    dlse: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None
    state_out: Tensor | None
    state_lse: Tensor | None
    out: Tensor
    lse: Tensor
    every: int
    scale: float
    needs: Needs
    impl: str = "auto"


def _definition(inputs: PrefixAttention) -> tuple[Tensor, Tensor]:
    query, key, value, mask, state_out, state_lse, every, scale, _ = inputs
    return prefix_attention_reference(query, key, value, mask, state_out, state_lse, every, scale)


def _check_needs(inputs: PrefixAttentionBackward) -> None:
    """Raise if the gradient of one part of the state is needed without the other: kernels compute them together."""
    *_, needs_out, needs_lse = inputs.needs
    if needs_out != needs_lse:
        raise ValueError(mismatch("needs", tuple(inputs.needs), "the last two equal, those of the state"))


def _shapes(inputs: PrefixAttention) -> tuple[Tensor, Tensor]:
    query, key, value = inputs.query, inputs.key, inputs.value
    batch, heads, latents, _ = query.shape
    shape = (batch, heads, -(-key.shape[2] // inputs.every), latents)
    return query.new_empty(*shape, value.shape[-1], dtype=state_dtype(query.dtype)), query.new_empty(shape, dtype=torch.float64)


def _operations(inputs: Any) -> int:
    """FLOPs of the products S = Q K' and P V, and of one division by the sum of weights for each prefix."""
    batch, heads, latents, width = inputs.query
    keys, value_width = inputs.key[2], inputs.value[-1]
    return batch * heads * latents * (2 * keys * (width + value_width) + -(-keys // inputs.every) * value_width)


def _backward_operations(inputs: Any) -> int:
    """FLOPs of the scan, and of those of the products S, A V', P' A, dQ and dK that the required gradients use.

    The scan takes two multiply-adds per element.
    """
    batch, heads, latents, width = inputs.query
    keys, value_width = inputs.key[2], inputs.value[-1]
    needs_query, needs_key, needs_value, *_ = inputs.needs
    widths = width * (1 + needs_query + needs_key) + value_width * ((needs_query or needs_key) + needs_value)
    return 2 * batch * heads * latents * (keys * widths + -(-keys // inputs.every) * 2 * value_width)


# ---- gradients


def _backward(call: Call[PrefixAttention], dout: Tensor, dlse: Tensor) -> Gradients:
    query, key, value, mask, state_out, state_lse, every, scale, impl = call.inputs
    out, lse = call.kept
    needs_state = any(call.needs("state_out", "state_lse"))
    needs = (*call.needs("query", "key", "value"), needs_state, needs_state)
    inputs = PrefixAttentionBackward(dout, dlse, query, key, value, mask, state_out, state_lse, out, lse, every, scale, needs, impl)
    return dict(zip(("query", "key", "value", "state_out", "state_lse"), _backward_op(inputs), strict=True))


def _backward_formula(inputs: PrefixAttentionBackward) -> tuple[Tensor, ...]:
    """The gradients by the reference, which stores T L N scores. `out` and `lse` count as inputs."""
    dout, dlse, query, key, value, mask, state_out, state_lse, out, lse, every, scale, _, _ = inputs
    return prefix_attention_backward_reference(dout, dlse, query, key, value, mask, state_out, state_lse, out, lse, every, scale)


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
    ("dquery", "dkey", "dvalue", "dstate_out", "dstate_lse"),
    shapes=gradient_shapes("query", "key", "value", "state_out", "state_lse"),
    operations=_backward_operations,
    backward=derivatives_of(_backward_formula, "dout", "dlse", "query", "key", "value", "state_out", "state_lse", "out", "lse"),
    check=_check_needs,
    function="prefix_backward",
)
