"""Attention in plain torch as a GPU user may write it: all scores at once, or in chunks whose results are merged by
their log-sum-exps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..devices import tf32
from .case import COMPILED, IN_TF32, Implementation, Results, compiled

NAIVE = "naive"
CHUNKS = f"{NAIVE}, in chunks"
TURNS = f"{NAIVE}, in chunks in turn"
FLEX = "flex_attention"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

CHUNK = 1000
"""The number of keys of a chunk; a product with the values over all keys at once would occupy only a few
multiprocessors."""
CACHED = 2**25
"""Bytes of scores that are computed at a time if chunks are processed in turn: they stay in the L2 cache of a
data-centre GPU."""


def naive_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula in plain torch: the scores are stored, and so are their exponentials."""
    return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, dim=-1) @ value


class Parts(NamedTuple):
    """The values that are stored for each chunk, (B, H, chunks, L, *): the highest score, the sum of exponentials, and
    their weighted values."""

    peak: Tensor
    total: Tensor
    out: Tensor


def in_chunks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All chunks in one batch."""
    return _merged(_parts(query, key, value))


def in_turn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same, with the scores of a few chunks at a time."""
    columns = CACHED // (query.element_size() * query.shape[:-1].numel())
    keys = max(CHUNK, columns - columns % CHUNK)
    parts = [_parts(query, *some) for some in zip(key.split(keys, dim=-2), value.split(keys, dim=-2), strict=True)]
    return _merged(Parts(*(torch.cat(each, dim=2) for each in zip(*parts, strict=True))))


def _parts(query: Tensor, key: Tensor, value: Tensor) -> Parts:
    chunk = CHUNK if key.shape[-2] % CHUNK == 0 else key.shape[-2]
    key, value = (rows.unflatten(-2, (-1, chunk)) for rows in (key, value))
    scores = (query * query.shape[-1] ** -0.5).unsqueeze(2) @ key.mT
    peak = scores.detach().amax(-1, keepdim=True)
    weights = (scores - peak).exp()
    return Parts(
        peak, weights.sum(-1, keepdim=True, dtype=torch.promote_types(query.dtype, torch.float32)), weights @ value
    )


def _merged(parts: Parts) -> Tensor:
    shares = (parts.peak - parts.peak.amax(2, keepdim=True)).to(parts.total.dtype).exp()
    return ((shares * parts.out).sum(2) / (shares * parts.total).sum(2)).to(parts.out.dtype)


def flashinfer_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One sequence at a time, without gradients."""
    from flashinfer import single_prefill_with_kv_cache

    sequences = zip(*(part.transpose(1, 2) for part in (query, key, value)), strict=True)
    return torch.stack([single_prefill_with_kv_cache(*sequence) for sequence in sequences]).transpose(1, 2)


# ---- by name ---------------------------------------------------------------------------------------------------------

FORMS: dict[str, Attend] = {NAIVE: naive_attention, CHUNKS: in_chunks, TURNS: in_turn}


_EAGER = [form + precision for form in FORMS for precision in ("", IN_TF32)]
PLAIN = (*_EAGER, *(name + COMPILED for name in _EAGER if not name.startswith(TURNS)))
"""Every form in float32 and in tf32, and compiled if its program does not grow with the keys."""


def plain(name: str) -> Attend:
    """The function for one of the names in `PLAIN`, or for `FLEX` compiled."""
    form = name.removesuffix(COMPILED).removesuffix(IN_TF32)
    return (lambda *inputs: compiled(_form(form))(*inputs)) if name.endswith(COMPILED) else FORMS[form]


def _form(form: str) -> Attend:
    if form != FLEX:
        return FORMS[form]
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


def stores_scores(name: str) -> bool:
    """True for forms that write all scores. Forms that take chunks in turn also write all scores for their
    gradients."""
    return NAIVE in name


def as_named(name: str, implementation: Implementation) -> Implementation:
    """The implementation and its gradients, where float32 may be multiplied in tf32 if its name says so."""
    if IN_TF32 not in name:
        return implementation

    def run(inputs: Any) -> Results:
        with tf32(True):
            return implementation(inputs)

    return run
