"""The names under which published code of Nyström attention saves weights: the packages transformers and
nystrom-attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...runtime.checks import kind_of, mismatch

_QUERY_KEY_VALUE = ("query", "key", "value")
_TRANSFORMERS = {f"{part}.{kind}" for part in _QUERY_KEY_VALUE for kind in ("weight", "bias")}
_NYSTROM_ATTENTION = {"to_qkv.weight", "to_out.0.weight", "to_out.0.bias"}
_UNUSED = {"output.LayerNorm.weight", "output.LayerNorm.bias"}
"""The weights of the norm after the attention, which does not belong to the attention."""


def nystrom_weights(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return published weights under the names of `NystromAttention`. Raises a `ValueError` for other names or
    shapes."""
    if not isinstance(state_dict, Mapping) or not all(isinstance(each, Tensor) for each in state_dict.values()):
        raise TypeError(mismatch("state_dict", kind_of(state_dict), "a dict of names and tensors"))
    given = {name.removeprefix("self."): each.detach() for name, each in state_dict.items() if name not in _UNUSED}
    if given.keys() >= _TRANSFORMERS:
        found = _of_transformers(given)
    elif given.keys() >= _NYSTROM_ATTENTION:
        found = _of_nystrom_attention(given)
    else:
        names = ", ".join(sorted(given)[:5]) or "no names"
        expected = f"those of a module of transformers ({', '.join(sorted(_TRANSFORMERS))}) or nystrom-attention"
        raise ValueError(mismatch("state_dict", names, f"{expected} ({', '.join(sorted(_NYSTROM_ATTENTION))})"))
    if given:
        raise ValueError(
            mismatch("state_dict", f"also {', '.join(sorted(given))}", "the weights of a single attention")
        )
    _check_shapes(found)
    return found


def _of_transformers(given: dict[str, Tensor]) -> dict[str, Tensor]:
    weights, biases = ([given.pop(f"{part}.{kind}") for part in _QUERY_KEY_VALUE] for kind in ("weight", "bias"))
    weight, bias = given.pop("output.dense.weight", None), given.pop("output.dense.bias", None)
    width = weights[0].shape[0]
    return _named(
        torch.cat(weights),
        torch.cat(biases),
        torch.eye(width).to(weights[0]) if weight is None else weight,
        weights[0].new_zeros(width) if bias is None else bias,
        given.pop("conv.weight", None),
    )


def _of_nystrom_attention(given: dict[str, Tensor]) -> dict[str, Tensor]:
    weight, out, bias = (given.pop(name) for name in ("to_qkv.weight", "to_out.0.weight", "to_out.0.bias"))
    return _named(weight, weight.new_zeros(weight.shape[0]), out, bias, given.pop("res_conv.weight", None))


def _named(
    weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor, conv: Tensor | None
) -> dict[str, Tensor]:
    found = {"in_proj_weight": weight, "in_proj_bias": bias, "out_proj.weight": out_weight, "out_proj.bias": out_bias}
    return found if conv is None else found | {"conv.weight": conv}


def _check_shapes(weights: Mapping[str, Any]) -> None:
    """Raise unless inputs, heads and outputs have one width, as in `torch.nn.MultiheadAttention`."""
    width = weights["out_proj.weight"].shape[0]
    for name, shape in (("in_proj_weight", (3 * width, width)), ("out_proj.weight", (width, width))):
        if weights[name].shape != shape:
            expected = f"{shape}, one width of inputs, of all heads together and of outputs"
            raise ValueError(mismatch("state_dict", f"weights of shape {tuple(weights[name].shape)}", expected))
