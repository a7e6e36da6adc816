"""The contracts of the layers: their arguments in the order of the schema, and the gradients that a backward pass
needs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NETWORK = ("norm_weight", "norm_bias", "expand_weight", "expand_bias", "contract_weight", "contract_bias")
"""The parameters of a feed-forward layer."""

PROJECTIONS = (
    *("norm_weight", "norm_bias", "context_norm_weight", "context_norm_bias", "query_weight", "query_bias"),
    *("key_weight", "key_bias", "value_weight", "value_bias", "output_weight", "output_bias"),
)
"""The parameters of an attention layer."""
OF_FEED_FORWARD = ("x", *NETWORK)
"""The differentiable arguments of a feed-forward layer."""
OF_ATTENTION = ("x", "context", *PROJECTIONS)
"""The differentiable arguments of an attention layer."""


class FeedForwardLayer(NamedTuple):
    """The arguments of `cmab::feed_forward_layer`, whose result is y for rows x (R, C)."""

    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    expand_weight: Tensor
    expand_bias: Tensor | None
    contract_weight: Tensor
    contract_bias: Tensor | None
    eps: float
    activation: str
    residual: str
    impl: str = "auto"


class FeedForwardLayerBackward(NamedTuple):
    """The arguments of `cmab::feed_forward_layer_backward`, whose results are the gradients of x and `NETWORK`."""

    dy: Tensor
    x: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    expand_weight: Tensor
    expand_bias: Tensor | None
    contract_weight: Tensor
    contract_bias: Tensor | None
    eps: float
    activation: str
    residual: str
    needs: tuple[bool, bool, bool, bool, bool, bool, bool]
    impl: str = "auto"


class AttentionLayer(NamedTuple):
    """The arguments of `cmab::attention_layer`, whose results are (y, query, key, value, out, lse) for x (B, L, C).

    All but y are empty unless `keep`.
    """

    x: Tensor
    context: Tensor | None
    key_padding_mask: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    context_norm_weight: Tensor | None
    context_norm_bias: Tensor | None
    query_weight: Tensor
    query_bias: Tensor | None
    key_weight: Tensor
    key_bias: Tensor | None
    value_weight: Tensor
    value_bias: Tensor | None
    output_weight: Tensor
    output_bias: Tensor | None
    num_heads: int
    scale: float
    eps: float
    context_eps: float
    residual: str
    keep: bool = False
    impl: str = "auto"


class AttentionLayerBackward(NamedTuple):
    """The arguments of `cmab::attention_layer_backward`, whose results are the gradients of x, context and
    `PROJECTIONS`."""

    dy: Tensor
    x: Tensor
    context: Tensor | None
    key_padding_mask: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    context_norm_weight: Tensor | None
    context_norm_bias: Tensor | None
    query_weight: Tensor
    query_bias: Tensor | None
    key_weight: Tensor
    key_bias: Tensor | None
    value_weight: Tensor
    value_bias: Tensor | None
    output_weight: Tensor
    output_bias: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    num_heads: int
    scale: float
    eps: float
    context_eps: float
    residual: str
    needs: tuple[bool, bool, bool, bool, bool, bool, bool, bool, bool, bool, bool, bool, bool, bool]
    impl: str = "auto"


def needed(inputs: FeedForwardLayerBackward | AttentionLayerBackward) -> set[str]:
    """The arguments whose gradients are needed."""
    arguments = OF_FEED_FORWARD if isinstance(inputs, FeedForwardLayerBackward) else OF_ATTENTION
    return {
        argument
        for argument, need in zip(arguments, inputs.needs, strict=True)
        if need and getattr(inputs, argument) is not None
    }


def needs_part(need: set[str], part: str) -> tuple[bool, bool]:
    """Whether the gradients of the weight and of the bias of a norm or projection are needed."""
    return f"{part}_weight" in need, f"{part}_bias" in need


def needs_query_key_value(inputs: AttentionLayerBackward) -> tuple[bool, bool, bool]:
    """Whether the gradients of queries, keys and values are needed to compute the required
    gradients."""
    need, (above_query, above_context) = needed(inputs), needs_rows(inputs)
    of_query, of_key, of_value = (any(needs_part(need, part)) for part in ("query", "key", "value"))
    return above_query or of_query, above_context or of_key, above_context or of_value


def needs_rows(inputs: AttentionLayerBackward) -> tuple[bool, bool]:
    """Whether a gradient is needed of the rows, or of their norm: for the rows that give queries,
    and for those that give keys and values."""
    need = needed(inputs)
    above_query = "x" in need or any(needs_part(need, "norm"))
    if inputs.context is None:
        return above_query, above_query
    return above_query, "context" in need or any(needs_part(need, "context_norm"))
