"""torch's `scaled_dot_product_attention` on the fused operator, for models that compute attention themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import latent_attention
from ..runtime.backends import has_kernel, is_free
from ..runtime.calls import note
from ..runtime.checks import as_flag, as_float
from ..runtime.dtypes import FLOATING
from ..runtime.tracing import has_values, is_differentiated

FEW, FEW_KEYS, WIDE = 16, 1024, 64
"""With fewer than FEW queries, torch's function is faster if there are fewer than FEW_KEYS keys or heads are at least
WIDE wide."""

DROPOUT, CAUSAL, FASTER = "dropout is on", "attention is causal", "torch's function is faster for so few queries"
"""Reasons for running torch's own function."""

_torchs = torch.nn.functional.scaled_dot_product_attention  # bound now: a program may replace it by ours


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Like `torch.nn.functional.scaled_dot_product_attention`, but runs `cmab_kernels.latent_attention` where possible.

    Arguments, shapes and result are those of torch's function. The operator runs for queries (B, H, L, D) or (B, L, D)
    that attend to all keys, or to all keys but padding. For padding, `attn_mask` must be the same for all heads and
    queries, and its shape or strides must show this: for example (B, 1, 1, N), or that shape expanded. The mask is bool
    with True = attend. On a CPU it may also be a float mask of 0 and -inf, or of 0 and the lowest number of its dtype.
    With `enable_gqa`, query heads share key heads. Derivatives exist to any order.

    All other calls are passed to torch's function, with its results, speed, random numbers and errors:

    - dropout and `is_causal`;
    - masks that depend on the query or the head, and masks with other numbers;
    - float masks on a GPU or under a compiler, where their numbers are not read;
    - inputs that no kernel supports here;
    - on a CPU, fewer than 16 queries per key head, if they need no gradient and have no mask, and if there are fewer
      than 1,024 keys or the heads are at least 64 wide. torch is faster for these calls. `use_impl` overrules this
      rule.

    A query whose keys are all masked gets 0.

    >>> from cmab_kernels.integrations import scaled_dot_product_attention
    >>> latents, points = torch.randn(2, 8, 16, 4), torch.randn(2, 2, 1000, 4)
    >>> seen = torch.arange(1000) < torch.tensor([[1000], [700]])
    >>> scaled_dot_product_attention(latents, points, points, attn_mask=seen[:, None, None], enable_gqa=True).shape
    torch.Size([2, 8, 16, 4])
    """
    dropout_p, is_causal = as_float("dropout_p", dropout_p), as_flag("is_causal", is_causal)
    out = (
        DROPOUT
        if dropout_p
        else CAUSAL
        if is_causal
        else fused_attention(query, key, value, attn_mask, scale, enable_gqa)
    )
    note(out if isinstance(out, str) else None)
    if isinstance(out, str):
        return _torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return out


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, enable_gqa: bool
) -> Tensor | str:
    """Return the operator's attention of all queries over all keys that the mask shows; if the operator cannot run,
    return the reason."""
    if query.dim() == 3 and (attn_mask is None or attn_mask.dim() <= 3):
        mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        out = fused_attention(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), mask, scale, False)
        return out if isinstance(out, str) else out.squeeze(1)
    if not _fit(query, key, value, enable_gqa):
        return "the operator does not take tensors of such shapes or dtypes"
    if not has_kernel("attention", query, key, value):
        return "no kernel runs here for such heads"
    if attn_mask is None and _share_too_little(query, key, value):
        return FASTER
    ignore = None
    if attn_mask is not None:
        row = _common_row(attn_mask, query, key)
        if row is None:
            return "the shape and strides of the mask do not show that it is the same for all queries and heads"
        ignore = _ignored(row)
        if ignore is None:
            return "the mask must be added to logits, or its values are not read here"
    return latent_attention(query, key, value, key_padding_mask=ignore, scale=scale, enable_gqa=enable_gqa)


def _fit(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Return whether the operator supports tensors of these shapes and dtypes; none of the tensors may be empty."""
    tensors = (query, key, value)
    if any(
        each.is_nested or each.dim() != 4 or each.dtype != query.dtype or each.device != query.device
        for each in tensors
    ):
        return False
    if (
        query.dtype not in FLOATING
        or key.shape[:3] != value.shape[:3]
        or (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3])
    ):
        return False
    heads, groups = query.shape[1], key.shape[1]
    return all(each.numel() for each in tensors) and (heads == groups or (enable_gqa and heads % groups == 0))


def _share_too_little(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether torch's function is faster because few queries read each key. torch's function has no
    second gradient, so the answer is False if a gradient is needed."""
    if query.device.type != "cpu" or not is_free("attention", "auto") or is_differentiated(query, key, value):
        return False
    queries = query.shape[1] // key.shape[1] * query.shape[2]
    return queries < FEW and (key.shape[2] < FEW_KEYS or query.shape[3] >= WIDE)


def _common_row(mask: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the mask of keys (B, N) if the shape or strides of `mask` show that it is the same for all heads and
    queries; else None."""
    shape = (*query.shape[:3], key.shape[2])
    if not 2 <= mask.dim() <= 4 or any(
        have not in (1, need) for have, need in zip(reversed(mask.shape), reversed(shape), strict=False)
    ):
        return None
    whole = mask.expand(shape)
    return whole[:, 0, 0] if all(shape[dim] == 1 or whole.stride(dim) == 0 for dim in (1, 2)) else None


def _ignored(row: Tensor) -> Tensor | None:
    """Return the keys that a row of a mask hides, (B, N) with True = ignore; None if the mask must
    be added to logits.

    The values are not read on a GPU, where the program would have to wait for them, and not under a
    compiler, a transform or a trace. If a row hides all keys by a finite number, torch's result is
    attention to all these keys. So a row that hides all keys is left to torch.
    """
    if row.dtype == torch.bool:
        return ~row
    if not row.is_floating_point() or row.requires_grad or row.device.type != "cpu" or not has_values(row):
        return None
    ignore = row <= torch.finfo(row.dtype).min
    return ignore if bool(((row == 0) | ignore).all() & ~ignore.all(-1).any()) else None
