"""Every other attention that there is on a GPU, as functions of (B, H, N, D) tensors; what is not installed says so when asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import cmab_kernels as ck
from bench.scans.attention import BACKENDS, by_backend, flash_attention, naive_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours() -> Attention:
    return lambda q, k, v: ck.latent_attention(q, k, v, impl="triton")


def _compiled_flex() -> Attention:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


PEERS: dict[str, Callable[[], Attention]] = {
    **{f"torch {name.removesuffix('_ATTENTION').lower()}": lambda name=name: by_backend(name) for name in BACKENDS["cuda"]},
    "flash-attn": lambda: flash_attention,
    "naive": lambda: naive_attention,
}
COMPILED: dict[str, Callable[[], Attention]] = {
    "torch flex": _compiled_flex,
    "naive, compiled": lambda: torch.compile(naive_attention, dynamic=False),
}
"""They take seconds to prepare."""
