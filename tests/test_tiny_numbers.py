"""Numbers below the smallest normal one: the native attention kernels give 0,
because x86 processors are slow with them."""

from __future__ import annotations

import platform
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import row_error

TINY = 2.0**-133
"""A float32 number below the smallest normal number, 2^-126."""

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="other processors keep such numbers"
)


def _rows(latents: int = 16, keys: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, and values whose mean is TINY."""
    return torch.randn(1, 4, latents, 8), torch.randn(1, 4, keys, 8), torch.full((1, 4, keys, 8), TINY)


def _state(latents: int = 16, keys: int = 16) -> ck.AttentionState:
    return ck.attention_state(*_rows(latents, keys), impl="native")


def _gradient(latents: int, keys: int) -> Tensor:
    query, key, value = _rows(latents, keys)
    value.requires_grad_()
    out = ck.latent_attention(query, key, value, impl="native")
    return torch.autograd.grad(out, value, torch.full_like(out, TINY))[0]


def _merged() -> Tensor:
    first = ck.AttentionState(torch.full((1, 4, 16, 8), TINY), torch.zeros(1, 4, 16, dtype=torch.float64))
    return ck.merge_states(first, first).out


def _projected() -> Tensor:
    weights = torch.randn(32, 32), torch.full((32, 32), TINY)
    return ck.projected_attention_state(_rows()[0], torch.ones(1, 16, 32), *weights, impl="native").out


def _feed_forward() -> Tensor:
    weights = torch.randn(32, 16), torch.full((16, 16), TINY)
    return ck.feed_forward_layer(torch.zeros(64, 16), *weights, expand_bias=torch.ones(32), impl="native")


def _attention_layer() -> Tensor:
    weights = torch.randn(3, 16, 16), torch.full((16, 16), TINY)
    return ck.attention_layer(
        torch.zeros(1, 64, 16), *weights[0], weights[1], context=torch.randn(1, 8, 16), num_heads=2, impl="native"
    )


def _stream(kind: str) -> Tensor:
    query, key, value = _rows()
    new = query[:, :, :1], key[:, :, :1], value[:, :, :1]
    if kind == "attention":
        return ck.continual_attention_step(ck.continual_attention_init(query, key, value), *new, impl="native").out
    landmarks = query[0, :, :1].contiguous(), key[0, :, :1].contiguous()
    state = ck.continual_nystrom_init(query, key, value, landmarks=landmarks)
    return ck.continual_nystrom_step(state, *new, impl="native").out


CASES: dict[str, Callable[[], Tensor]] = {
    "attention": lambda: _state().out,
    "attention in pieces": lambda: _state(keys=5000).out,
    "gradients": lambda: _gradient(64, 64),
    "gradients in pieces": lambda: _gradient(16, 2000),
    "merge": _merged,
    "prefixes": lambda: ck.prefix_attention_states(*_rows(), impl="native").out,
    "projected": _projected,
    "feed-forward layer": _feed_forward,
    "attention layer": _attention_layer,
    "pseudo-inverse": lambda: ck.iterative_pinv(1.5 * 2.0**126 * torch.eye(8).expand(64, 8, 8), impl="native"),
    "continual Nyström step": lambda: _stream("nystrom"),
    "continual attention step": lambda: _stream("attention"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [1, 2])
def test_results_are_0(threads: Callable[[int], None], case: str, count: int) -> None:
    """Results are 0 on every thread of a call. Afterwards the caller's arithmetic is the same as before."""
    threads(count)
    assert CASES[case]().eq(0).all()
    assert (torch.tensor(2.0**-100) * 2.0**-33).item() == TINY


def test_operands_keep_their_value() -> None:
    """Keys below the smallest normal number make logits of 1 with queries of 2^124."""
    query, key, value = (
        2.0**124 * torch.randn(1, 2, 40, 16),
        2.0**-127 * torch.randn(1, 2, 30, 16),
        torch.randn(1, 2, 30, 8),
    )
    right = ck.latent_attention(query.double(), key.double(), value.double(), impl="reference")
    assert row_error(ck.latent_attention(query, key, value, impl="native"), right).max() < 1e-5


@pytest.mark.parametrize("size", [1e-19, 1e15])
def test_intention_of_small_keys(size: float) -> None:
    """Sums of squares may be as small as the smallest normal number: 1e-38 is not small compared with others there."""
    query, key, value = size * torch.randn(1, 2, 20, 16), size * torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 8)
    alpha = 300 * size**2
    right = ck.intention(query.double(), key.double(), value.double(), alpha, impl="reference")
    assert row_error(ck.intention(query, key, value, alpha, impl="native"), right).max() < 1e-5


def test_sums_of_a_state_may_be_of_any_size() -> None:
    """Sums of a state are float64, where the product of any two float32 numbers is exact."""
    key, value = 1e-36 * torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 8)
    weight, info = ck.solve_ridge(ck.ridge_state(key, value, impl="native"), 0.0, impl="native")
    right = torch.linalg.lstsq(1e36 * key.double(), value.double()).solution
    assert info.eq(0).all() and row_error(1e-36 * weight, right).max() < 1e-12
