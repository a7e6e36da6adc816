"""Many more threads than cores: 32 threads give the same bits as one thread, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck

ONE_SET = {
    "latent_attention": ck.latent_attention,
    "attention_state": lambda q, k, v: ck.attention_state(q, k, v).lse,
    "prefix_attention_states": lambda q, k, v: ck.prefix_attention_states(q, k, v, every=100).out,
    "nystrom_attention": lambda q, k, v: ck.nystrom_attention(k, k, v, 16),
    "intention": lambda q, k, v: ck.intention(q, k, v, alpha=0.1),
    "ridge_state": lambda q, k, v: ck.ridge_state(k, v).gram,
}


@pytest.mark.parametrize("name", ONE_SET)
def test_the_bits_of_one_thread(name: str, threads: Callable[[int], None]) -> None:
    inputs = [torch.randn(2, 3, rows, 16, requires_grad=True) for rows in (7, 1000, 1000)]

    def bits() -> list[Tensor | None]:
        out = ONE_SET[name](*inputs)
        return [out, *torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)]

    assert ck.explain("latent_attention", *inputs)[0].usable, "there is no native extension whose threads could differ"
    threads(1)
    alone = bits()
    threads(32)
    for one, many in zip(alone, bits(), strict=True):
        assert one is many is None or torch.equal(one, many)
