"""torch's own attention with a changed `out_proj`, such as one with hooks.

torch reads the weights of `out_proj` and never calls the module. The code in this file calls the module.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...runtime.checks import mismatch
from ..parts import computed, is_own, own_parameters


def is_as_made(attention: nn.MultiheadAttention) -> bool:
    """Return whether torch may read all weights directly.

    This holds if the output projection was not replaced or hooked, and no weight is of a subclass
    of Tensor.
    """
    project = own_parameters(attention.out_proj, NonDynamicallyQuantizableLinear)
    return project is not None and all(
        is_own(each) for part in (project, attention._parameters) for each in part.values()
    )


def call(attention: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return attention(*args, **kwargs), and call the `out_proj` of torch's attention if it was replaced or hooked.

    The hooks of the attention run too.
    """
    if not isinstance(attention, nn.MultiheadAttention) or type(attention).forward is not nn.MultiheadAttention.forward:
        return attention(*args, **kwargs)
    if "forward" in attention.__dict__ or is_as_made(attention):
        return attention(*args, **kwargs)
    # This is a second object with the attributes of the first, because another thread may call the
    # module at the same time. If a hook reads or sets an attribute on this object, the attribute of
    # the module is read or set.
    calling = object.__new__(_calling_out_proj(type(attention)))
    calling.__dict__ = attention.__dict__
    return calling(*args, **kwargs)


_CALLING: dict[type, type[nn.MultiheadAttention]] = {}
"""Kind of attention -> its subclass that calls `out_proj`. Only the last `MOST_KINDS` kinds are kept, because an entry
keeps its class alive, and `parametrize` makes a class for each module."""

MOST_KINDS = 64


def _calling_out_proj(kind: type[nn.MultiheadAttention]) -> type[nn.MultiheadAttention]:
    """Return a subclass of this kind of attention whose `forward` calls `out_proj`."""
    if kind in _CALLING:
        return _CALLING[kind]

    def forward_of(calling: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        attention = object.__new__(kind)
        attention.__dict__ = calling.__dict__
        return forward(attention, *args, **kwargs)

    if len(_CALLING) == MOST_KINDS:
        del _CALLING[next(iter(_CALLING))]
    _CALLING[kind] = type(kind.__name__, (kind,), {"forward": forward_of})
    return _CALLING[kind]


def forward(
    attention: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return what `torch.nn.MultiheadAttention.forward` returns, but call `out_proj` instead of reading its weight."""
    attention = computed(attention)
    if query.is_nested:
        raise RuntimeError(
            mismatch(
                "query",
                "a nested tensor",
                "a dense tensor, because out_proj is not a plain torch.nn.Linear; pad it, and pass a mask",
            )
        )
    swap = attention.batch_first and query.dim() == 3
    # Equal inputs must stay the same object, because torch then projects them in one product.
    turned = {id(each): each.transpose(0, 1) if swap else each for each in (query, key, value)}
    out, weights = F.multi_head_attention_forward(
        turned[id(query)],
        turned[id(key)],
        turned[id(value)],
        attention.embed_dim,
        attention.num_heads,
        attention.in_proj_weight,
        attention.in_proj_bias,
        attention.bias_k,
        attention.bias_v,
        attention.add_zero_attn,
        attention.dropout,
        torch.eye(attention.embed_dim, dtype=query.dtype, device=query.device),
        None,
        training=attention.training,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        use_separate_proj_weight=attention.in_proj_weight is None,
        q_proj_weight=attention.q_proj_weight,
        k_proj_weight=attention.k_proj_weight,
        v_proj_weight=attention.v_proj_weight,
        average_attn_weights=average_attn_weights,
        is_causal=is_causal,
    )
    out = attention.out_proj(out)
    return out.transpose(0, 1) if swap else out, weights
