"""Every other attention that there is on a GPU, as functions of (B, H, N, D) tensors; what is not installed says so when asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cmab_kernels as ck
from bench.scans.attention import naive_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def ours() -> Attention:
    return lambda q, k, v: ck.latent_attention(q, k, v, impl="triton")


def _backend(backend: SDPBackend) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return attention


def _flash_attention() -> Attention:
    from flash_attn import flash_attn_func  # of PyPI's flash-attn

    return lambda q, k, v: flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def _compiled_flex() -> Attention:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


PEERS: dict[str, Callable[[], Attention]] = {
    **{f"torch {b.name.removesuffix('_ATTENTION').lower()}": lambda b=b: _backend(b) for b in BACKENDS},
    "flash-attn": _flash_attention,
    "naive": lambda: naive_attention,
}
COMPILED: dict[str, Callable[[], Attention]] = {
    "torch flex": _compiled_flex,
    "naive, compiled": lambda: torch.compile(naive_attention, dynamic=False),
}
"""They take seconds to prepare."""
