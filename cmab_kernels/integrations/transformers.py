"""The attention of the package `transformers` on the fused operator: `attn_implementation="cmab"`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..runtime.calls import note
from ..runtime.checks import kind_of, mismatch
from .functional import CAUSAL, DROPOUT, FASTER, fused_attention

NAME = "cmab"
"""The name under which `register_transformers` registers the operator."""

_NEVER_FUSED = ("position_bias", "softcap", "cache", "output_attentions")
"""Arguments that a model may pass to its attention, but that the operator does not support."""

_SINKS = ("s_aux", "sinks")
"""The names under which models pass the logits of attention sinks. "sdpa" would ignore these without a warning."""


def register_transformers() -> None:
    """Make `attn_implementation="cmab"` known to the package `transformers`; `ImportError` if that package is not
    installed.

    Every model of `transformers` that takes its attention from `transformers.AttentionInterface` can then use it:
    through `from_pretrained`, `from_config` or `set_attn_implementation`. Calling this again has no effect.

    Attention runs on `cmab_kernels.latent_attention` if it attends to all keys, or to all keys but the padding of each
    batch element. The implementation "sdpa" of `transformers` computes all other calls, with its results, speed and
    errors: causal attention, masks that depend on the query, masks that are added to logits, a position bias, and
    dropout in training. Without gradients, it also computes calls with few queries for which torch is faster, such as
    decoding a token.
    The docstring of `scaled_dot_product_attention` says in detail which calls are fused. Models that do not use the
    `AttentionInterface` can call that function. A query whose keys are all padding gets 0.

    "sdpa" does not support attention sinks. A model with attention sinks, such as GPT-OSS, raises a `ValueError` at its
    first call. When a kind of module first falls back to "sdpa" for a reason other than speed, there is a
    `RuntimeWarning` with the reason. `cmab_kernels.explain` gives the reason for each call.

    >>> from cmab_kernels.integrations import register_transformers
    >>> register_transformers()
    >>> from transformers import AutoModel, ViTConfig
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 8, "patch_size": 2}
    >>> tiny = ViTConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    >>> model = AutoModel.from_config(tiny, attn_implementation="cmab")
    >>> model(torch.randn(1, 3, 8, 8)).last_hidden_state.shape
    torch.Size([1, 17, 16])
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        needed = "its AttentionInterface, which has been in the package since version 4.53: pip install -U transformers"
        raise ImportError(
            f"cmab_kernels.integrations.register_transformers works with the package transformers; {needed}"
        ) from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of the interface. It returns (out, None), because attention weights are not formed.

    `query` is (B, H, L, D), `key` (B, G, N, D) and `value` (B, G, N, E) with G a divisor of H, `attention_mask` None or
    (B, 1, L, N), and `out` (B, L, H, E). The docstring of `register_transformers` says which calls are fused, and when
    there is a `ValueError`.
    """
    for name in _SINKS:
        if kwargs.get(name) is not None:
            raise ValueError(
                mismatch(
                    name,
                    kind_of(kwargs[name]),
                    f"None, because {NAME!r} has no attention sinks; use attn_implementation='eager'",
                )
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    sees_all = attention_mask is not None or query.shape[2] == 1 or not causal
    asked = [name for name in _NEVER_FUSED if kwargs.get(name, False) is not False and kwargs[name] is not None]
    why = f"the operator has no {asked[0]}" if asked else DROPOUT if dropout else None if sees_all else CAUSAL
    out = fused_attention(query, key, value, attention_mask, scaling, True) if why is None else why
    note(out if isinstance(out, str) else None)
    if isinstance(out, str):
        _warn_once(type(module).__name__, out)
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    return out.transpose(1, 2).contiguous(), None


_warned: set[tuple[str, str]] = set()


def _warn_once(kind: str, why: str) -> None:
    """Warn the first time that a kind of module falls back to "sdpa" for a reason, unless the reason is speed."""
    if why == FASTER or torch.compiler.is_compiling() or (kind, why) in _warned:
        return
    _warned.add((kind, why))
    text = (
        f"attn_implementation={NAME!r}: {kind} runs 'sdpa', because {why}; cmab_kernels.explain(model, ...) shows "
        "the reason for each call"
    )
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def attention_mask(*, q_length: int, mask_function: Callable[..., Any], **options: Any) -> Tensor | None:
    """The mask function of the interface: None if all keys take part, else the mask of "sdpa", (B, 1, L, N) bool with
    True = attend.

    A mask that hides only padding is one row, expanded with stride 0. The stride shows that all rows are equal.
    """
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    if mask_function is not bidirectional_mask_function:
        return sdpa_mask(q_length=q_length, mask_function=mask_function, **options)
    row = sdpa_mask(q_length=1, mask_function=mask_function, **options)
    return None if row is None else row.expand(-1, -1, q_length, -1)
