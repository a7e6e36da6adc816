"""The layers of a transformer as one call each: the public functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..runtime.backends import choose
from ..runtime.checks import (
    as_autocast,
    as_float,
    check_choice,
    check_count,
    check_mask,
    check_operands,
    fixed,
    kind_of,
    mismatch,
)
from ..runtime.dtypes import default_scale
from .contract import AttentionLayer, FeedForwardLayer
from .reference import ACTIVATIONS, RESIDUALS
from .schema import attention, feed_forward

Norm = tuple[Tensor, Tensor | None, float]
"""Weight (C,), bias (C,) or None, and eps of a LayerNorm."""


def feed_forward_layer(
    x: Tensor,
    expand_weight: Tensor,
    contract_weight: Tensor,
    *,
    expand_bias: Tensor | None = None,
    contract_bias: Tensor | None = None,
    norm: Norm | None = None,
    activation: str = "geglu",
    residual: str = "input",
    impl: str = "auto",
) -> Tensor:
    """x + contract(activation(expand(norm(x)))): a pre-norm feed-forward layer with its residual connection, in one
    call.

    Args:
        x: (..., C). float64, float32, bfloat16 or float16, as all other tensors.
        expand_weight: (2 F, C) for "geglu", else (F, C), as in `torch.nn.Linear`.
        contract_weight: (C, F).
        expand_bias, contract_bias: (2 F,) or (F,), and (C,).
        norm: (weight, bias, eps) of a `torch.nn.LayerNorm` over C, whose bias may be None; None: no norm.
        activation: "geglu": the first half of the output of `expand`, times gelu of the second half; "gelu", by the
            error function; "relu".
        residual: the tensor to which the result is added. "input": x, as above; "normed": norm(x), as in the authors'
            code of CMAB (Feng et al., 2024).
        impl: "auto", "reference", "native" or "triton".

    Returns:
        (..., C) in the dtype of x. Under autocast, the layer computes in the dtype of autocast. Differentiable to any
        order in all tensors. Of the activations, only x is kept for the backward pass, which computes the output of
        `expand` again.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or value; the message names it.
        RuntimeError: `impl` cannot run here.

    Source: Attention Is All You Need (Vaswani et al., 2017), section 3.3; GLU Variants Improve Transformer (Shazeer,
    2020).

    >>> norm, expand, contract = torch.nn.LayerNorm(8), torch.nn.Linear(8, 32), torch.nn.Linear(16, 8)
    >>> x = torch.randn(2, 5, 8)
    >>> y = cmab_kernels.feed_forward_layer(
    ...     x,
    ...     expand.weight,
    ...     contract.weight,
    ...     expand_bias=expand.bias,
    ...     contract_bias=contract.bias,
    ...     norm=(norm.weight, norm.bias, norm.eps),
    ... )
    >>> features, gate = expand(norm(x)).chunk(2, dim=-1)
    >>> torch.allclose(y, x + contract(features * torch.nn.functional.gelu(gate)), atol=1e-6)
    True
    """
    norm_weight, norm_bias, eps = _parts("norm", norm)
    check_operands(
        **_given(x=x, expand_weight=expand_weight, contract_weight=contract_weight),
        **_given(
            expand_bias=expand_bias, contract_bias=contract_bias, **{"norm[0]": norm_weight, "norm[1]": norm_bias}
        ),
    )
    check_choice("activation", activation, ACTIVATIONS)
    check_residual(residual)
    if x.dim() < 1 or x.shape[-1] == 0:
        raise ValueError(mismatch("x", f"shape {tuple(x.shape)}", "(..., C) with C >= 1"))
    width, halves = x.shape[-1], 2 if activation == "geglu" else 1
    hidden = expand_weight.shape[0] if expand_weight.dim() else 0
    if expand_weight.dim() != 2 or expand_weight.shape[1] != width or hidden == 0 or hidden % halves:
        rows = "(2 F, C)" if halves == 2 else "(F, C)"
        allowed = (
            f"{rows} with F >= 1 and C = {width}, as x has shape {tuple(x.shape)} and activation is {activation!r}"
        )
        raise ValueError(mismatch("expand_weight", f"shape {tuple(expand_weight.shape)}", allowed))
    _check_shape("contract_weight", contract_weight, "(C, F)", (width, hidden // halves))
    _check_shape("expand_bias", expand_bias, "one number for each row of expand_weight", (hidden,))
    _check_shape("contract_bias", contract_bias, "(C,)", (width,))
    _check_norm("norm", norm_weight, norm_bias, width)
    cast, *parameters = _cast(x, norm_weight, norm_bias, expand_weight, expand_bias, contract_weight, contract_bias)
    rows = cast.reshape(math.prod(x.shape[:-1]), width)  # the sizes may be symbolic
    given: list[Any] = [rows, *parameters, eps, activation, residual, choose("layers", impl, rows)]
    y: Tensor = feed_forward(FeedForwardLayer(*given))
    return y.reshape(x.shape)


def attention_layer(
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    output_weight: Tensor,
    *,
    num_heads: int,
    context: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    output_bias: Tensor | None = None,
    norm: Norm | None = None,
    context_norm: Norm | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    residual: str = "input",
    impl: str = "auto",
) -> Tensor:
    """x + output(attention of norm(x) over context_norm(context)): an attention layer in one call.

    The call includes norms, projections and residual connection.

    Args:
        x: (B, L, C). float64, float32, bfloat16 or float16, as all other tensors.
        query_weight: (H D, C), as in `torch.nn.Linear`; row h D + d gives column d of head h.
        key_weight: (H D, C').
        value_weight: (H E, C').
        output_weight: (C, H E).
        num_heads: H.
        context: (B, N, C'); N may be 0. None: the context is norm(x), so that N = L and C' = C.
        query_bias, key_bias, value_bias, output_bias: (H D,), (H D,), (H E,), (C,), each or None.
        norm: (weight, bias, eps) of a `torch.nn.LayerNorm` over C, whose bias may be None; None: no norm.
        context_norm: the same over C'; allowed only with a context.
        key_padding_mask: (B, N) bool, True = ignore. The values of an ignored row of the context have no effect.
            Without a context, an ignored row of x still is a query, and its result depends on its values. With a mask,
            the norm of the context (of x if there is no context) needs an eps > 0.
        scale: factor of the scores; None means D ** -0.5.
        residual: the tensor to which the result is added. "input": x, as above; "normed": norm(x), as in the authors'
            code of CMAB (Feng et al., 2024).
        impl: "auto", "reference", "native" or "triton".

    Returns:
        (B, L, C) in the dtype of x. A row that sees no key gets the residual plus `output_bias`. Under autocast, the
        layer computes in the dtype of autocast. Differentiable to any order in all tensors. The projections, the heads'
        results and their log-sum-exps are kept for the backward pass, but no L x N scores.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, dtype, device or value; the message names it.
        RuntimeError: `impl` cannot run here.

    Source: Attention Is All You Need (Vaswani et al., 2017), section 3.2.

    >>> x, points = torch.randn(2, 5, 8), torch.randn(2, 100, 6)
    >>> weights = [torch.randn(*shape) for shape in ((8, 8), (8, 6), (8, 6), (8, 8))]
    >>> cmab_kernels.attention_layer(x, *weights, context=points, num_heads=2).shape
    torch.Size([2, 5, 8])
    """
    (norm_weight, norm_bias, eps), (context_weight, context_bias, context_eps) = (
        _parts("norm", norm),
        _parts("context_norm", context_norm),
    )
    check_operands(
        **_given(
            x=x,
            query_weight=query_weight,
            key_weight=key_weight,
            value_weight=value_weight,
            output_weight=output_weight,
        ),
        **_given(
            context=context, query_bias=query_bias, key_bias=key_bias, value_bias=value_bias, output_bias=output_bias
        ),
        **_given(
            **{
                "norm[0]": norm_weight,
                "norm[1]": norm_bias,
                "context_norm[0]": context_weight,
                "context_norm[1]": context_bias,
            }
        ),
    )
    check_residual(residual)
    if x.dim() != 3 or x.shape[-1] == 0:
        raise ValueError(mismatch("x", f"shape {tuple(x.shape)}", "(B, L, C) with C >= 1"))
    if context is None and context_norm is not None:
        raise ValueError(
            mismatch(
                "context_norm",
                "a norm without a context",
                "None, because x is then also the context, and norm applies to it",
            )
        )
    if context is not None and (context.dim() != 3 or context.shape[0] != x.shape[0] or context.shape[-1] == 0):
        allowed = f"(B, N, C') with B = {x.shape[0]} and C' >= 1, as x has shape {tuple(x.shape)}"
        raise ValueError(mismatch("context", f"shape {tuple(context.shape)}", allowed))
    seen = x if context is None else context
    width, depth, num_heads = x.shape[-1], seen.shape[-1], check_count("num_heads", num_heads)
    keys, values = (
        _check_heads("query_weight", query_weight, num_heads),
        _check_heads("value_weight", value_weight, num_heads),
    )
    _check_shape("query_weight", query_weight, "(H D, C)", (keys, width))
    _check_shape("key_weight", key_weight, "(H D, C')", (keys, depth))
    _check_shape("value_weight", value_weight, "(H E, C')", (values, depth))
    _check_shape("output_weight", output_weight, "(C, H E)", (width, values))
    _check_shape("query_bias", query_bias, "(H D,)", (keys,))
    _check_shape("key_bias", key_bias, "(H D,)", (keys,))
    _check_shape("value_bias", value_bias, "(H E,)", (values,))
    _check_shape("output_bias", output_bias, "(C,)", (width,))
    _check_norm("norm", norm_weight, norm_bias, width)
    _check_norm("context_norm", context_weight, context_bias, depth)
    check_mask(key_padding_mask, seen, seen.shape[:2])
    if key_padding_mask is not None:
        _check_norm_of_zeros("norm" if context is None else "context_norm", norm if context is None else context_norm)
    x, context, *weights = _cast(
        *(
            x,
            context,
            norm_weight,
            norm_bias,
            context_weight,
            context_bias,
            query_weight,
            query_bias,
            key_weight,
            key_bias,
        ),
        *(value_weight, value_bias, output_weight, output_bias),
    )
    scale = default_scale(keys // num_heads) if scale is None else fixed(scale)
    impl = choose(
        "layers", impl, x, seen, *(weight.unflatten(0, (num_heads, -1)) for weight in (query_weight, value_weight))
    )
    given: list[Any] = [
        x,
        context,
        key_padding_mask,
        *weights,
        num_heads,
        scale,
        eps,
        context_eps,
        residual,
        False,
        impl,
    ]
    return attention(AttentionLayer(*given))


def check_residual(residual: str) -> str:
    """Return the name of the tensor to which a layer adds its result; raise unless the name is one of `RESIDUALS`."""
    check_choice("residual", residual, RESIDUALS)
    return residual


def _parts(name: str, norm: Norm | None) -> tuple[Tensor | None, Tensor | None, float]:
    """The parts of a norm; (None, None, 0) without a norm."""
    if norm is None:
        return None, None, 0.0
    if not isinstance(norm, tuple) or len(norm) != 3:
        raise TypeError(mismatch(name, kind_of(norm), "a tuple (weight, bias, eps), or None"))
    weight, bias, eps = norm
    if not isinstance(eps, (int, float)) or not eps >= 0:
        raise ValueError(mismatch(f"{name}[2]", repr(eps), "a number >= 0 for eps"))
    if weight is None:
        raise TypeError(mismatch(f"{name}[0]", None, f"a torch.Tensor; for no norm at all, pass {name}=None"))
    return weight, bias, as_float(f"{name}[2]", eps)


def _given(**tensors: Any) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None or "weight" in name or name == "x"}


def _check_shape(name: str, tensor: Tensor | None, meaning: str, shape: tuple[int, ...]) -> None:
    if tensor is not None and tensor.shape != shape:
        raise ValueError(mismatch(name, f"shape {tuple(tensor.shape)}", f"{meaning} = {shape}"))


def _check_norm(name: str, weight: Tensor | None, bias: Tensor | None, width: int) -> None:
    _check_shape(f"{name}[0]", weight, "one number for each column", (width,))
    _check_shape(f"{name}[1]", bias, "one number for each column", (width,))


def _check_norm_of_zeros(name: str, norm: Norm | None) -> None:
    """Raise if eps is 0: ignored rows become rows of zeros, which cannot be normalised without an eps."""
    if norm is not None and norm[2] == 0:
        raise ValueError(
            mismatch(f"{name}[2]", 0, "a number > 0 for eps with a key_padding_mask, which makes rows of zeros")
        )


def _check_heads(name: str, weight: Tensor, num_heads: int) -> int:
    """The number of rows of a projection to heads. Raise unless each head has equally many rows, and at least one."""
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[0] % num_heads:
        allowed = f"a matrix whose rows are a multiple >= 1 of num_heads = {num_heads}"
        raise ValueError(mismatch(name, f"shape {tuple(weight.shape)}", allowed))
    return weight.shape[0]


def _cast(*tensors: Tensor | None) -> Sequence[Any]:
    """The tensors in the dtype of autocast if it is on; None stays None."""
    cast = iter(as_autocast(*(t for t in tensors if t is not None)))
    return [None if t is None else next(cast) for t in tensors]
