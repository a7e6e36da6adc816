"""On the CPU, a half type costs only the rounding of the result.

Kernels widen float16 and bfloat16 to float32. Results are those of the same numbers in float32, rounded once: to half a
step of the type. Below 6e-5, the spacing of float16 numbers is always 2^-24, and rounding alone may be any error
relative to a small result, such as a gradient of small inputs and scales. So a bound on the relative error has to allow
for half a step. A bound from torch's own error includes the same rounding.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import oracles

HALF = [torch.float16, torch.bfloat16]
HALF_STEP = {torch.float16: 2.0**-25, torch.bfloat16: 0.0}
"""Maps a dtype to half the distance between its subnormal numbers."""


def _pick(*choices: float) -> float:
    return choices[int(torch.randint(len(choices), ()))]


def _check_rounded(ours: Tensor, single: Tensor, name: str) -> None:
    assert single.dtype == torch.float32 and torch.equal(ours, single.to(ours.dtype)), name


def _gradients(inputs: list[Tensor], dout: Tensor, scale: float) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    state = ck.attention_state(*leaves, scale=scale, impl="native")
    return (*state, *torch.autograd.grad(state.out, leaves, dout))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("keys", [64, 65, 513, 2049])
@pytest.mark.parametrize("width, value_width", [(1, 64), (4, 100), (16, 256), (64, 129)])
def test_gradients_are_those_of_float32_rounded(
    isa: str, width: int, value_width: int, keys: int, dtype: torch.dtype
) -> None:
    """Gradients are also right for values of size 0.01 and a scale of 1e-3, where they are as small as 1e-10."""
    latents = int(_pick(1, 3, 40))
    for size, scale in ((0.01, 1e-3), (0.01, width**-0.5), (1.0, 1e-3), (1.0, width**-0.5)):
        inputs = [
            (size * torch.randn(1, 2, n, w)).to(dtype)
            for n, w in ((latents, width), (keys, width), (keys, value_width))
        ]
        dout = torch.randn(1, 2, latents, value_width)
        ours, single = (_gradients(given, dout, scale) for given in (inputs, [t.float() for t in inputs]))
        for name, a, b in zip(
            ("out", "dquery", "dkey", "dvalue"), (ours[0], *ours[2:]), (single[0], *single[2:]), strict=True
        ):
            _check_rounded(a, b, f"{name} at size {size}, scale {scale}")
        assert torch.equal(ours[1], single[1])


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_are_right_to_half_a_step(isa: str, dtype: torch.dtype) -> None:
    """Each element differs from float64 by at most half a step of the type, plus the error of float32."""
    for _ in range(20):
        latents, keys, width, value_width = (
            int(_pick(*choices)) for choices in ((1, 3, 40), (64, 200), (1, 8, 64), (64, 128))
        )
        size, scale = _pick(0.003, 0.01, 0.1), _pick(1e-3, 1e-2, width**-0.5)
        inputs = [
            (size * torch.randn(1, 2, n, w)).to(dtype)
            for n, w in ((latents, width), (keys, width), (keys, value_width))
        ]
        dout = torch.randn(1, 2, latents, value_width)
        wide = [t.double().requires_grad_() for t in inputs]
        expected = oracles.attention(*wide, scale=scale)
        right = torch.autograd.grad(expected[0], wide, dout.double())
        terms = oracles.attention_terms(dout.double(), *wide, *expected)
        for name, ours, wanted, term in zip("qkv", _gradients(inputs, dout, scale)[2:], right, terms, strict=True):
            if name != "v":
                term = term * (scale * width**0.5)  # terms assume a scale of D^-1/2
            rounding = (torch.finfo(dtype).eps / 2 * wanted.abs()).clamp(min=HALF_STEP[dtype])
            float32 = (
                4
                * 32
                * torch.finfo(torch.float32).eps
                * torch.maximum(wanted.abs(), 0.05 * term.norm(dim=-1, keepdim=True))
            )
            assert ((ours.double() - wanted).abs() <= rounding + float32).all(), name


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("exact", [False, True], ids=["nystrom", "attention"])
@pytest.mark.parametrize("output", ["single", "retroactive"])
def test_streams_are_those_of_float32_rounded(isa: str, output: str, exact: bool, dtype: torch.dtype) -> None:
    """Streams of values of size 1e-4, which are subnormal in float16, equal those of float32, rounded."""
    for size, value_size in ((1.0, 1.0), (0.01, 1e-4), (3.0, 1e-2)):
        tokens = [
            (factor * torch.randn(1, 2, 90, width)).to(dtype)
            for factor, width in ((size, 8), (size, 8), (value_size, 5))
        ]
        landmarks = None if exact else (size * torch.randn(2, 4, 8), size * torch.randn(2, 4, 8))
        found = []
        for given in (tokens, [t.float() for t in tokens]):
            first = [t[:, :, :33] for t in given]
            state = (
                ck.continual_attention_init(*first) if exact else ck.continual_nystrom_init(*first, landmarks=landmarks)
            )
            step = ck.continual_attention_step if exact else ck.continual_nystrom_step
            found.append(step(state, *(t[:, :, 33:] for t in given), output=output, impl="native")[0])  # type: ignore[operator]
        _check_rounded(*found, f"size {size}, values {value_size}")
