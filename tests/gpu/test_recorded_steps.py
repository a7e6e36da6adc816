"""The gradients of recorded steps on a GPU, compared with the definition."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing.suite.gpu import no_waiting

from ..nystrom.continual.streams import step_of
from . import DEVICE

pytestmark = pytest.mark.gpu

N, LENGTH, LANDMARKS, WIDTH, VALUES = 64, 40, 16, 40, 33


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("chunk", [1, 5, 40])
@pytest.mark.parametrize(
    "kind, output",
    [
        ("fixed", "single"),
        ("fixed", "retroactive"),
        ("continual", "single"),
        ("continual", "retroactive"),
        ("exact", "single"),
    ],
)
@pytest.mark.parametrize("dtype, size", [(torch.float64, 1.0), (torch.float64, 30.0), (torch.float32, 1.0)])
def test_gradients(dtype: torch.dtype, size: float, kind: str, output: str, chunk: int, impl: str) -> None:
    """With fixed landmarks and exact attention, no step waits for the GPU. The error in float32 is at most a small
    multiple of that of the definition."""
    inputs = [torch.randn(2, 3, N + LENGTH, width) for width in (WIDTH, WIDTH, VALUES)]
    inputs += [torch.randn(3, LANDMARKS, WIDTH) for _ in range(2)]
    inputs[1] *= size
    inputs = [t.to(DEVICE, dtype) for t in inputs]
    exact = _gradients(inputs, torch.float64, kind, output, chunk, "reference")
    ours, theirs = (
        [(a - b).abs().max() / b.abs().max() for a, b in zip(found, exact, strict=True)]
        for found in (_gradients(inputs, dtype, kind, output, chunk, each) for each in (impl, "reference"))
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a <= (1e-10 if dtype == torch.float64 else 3 * b + 4 * torch.finfo(dtype).eps)


def _gradients(
    inputs: list[Tensor], dtype: torch.dtype, kind: str, output: str, chunk: int, impl: str
) -> tuple[Tensor, ...]:
    given = [t.detach().to(dtype).requires_grad_() for t in inputs]
    first, rest = zip(*(t.split([N, LENGTH], 2) for t in given[:3]), strict=True)
    state: Any = ck.continual_attention_init(*first)
    if kind != "exact":
        chosen: Any = {"landmarks": (given[3], given[4])} if kind == "fixed" else {"num_landmarks": LANDMARKS}
        state = ck.continual_nystrom_init(*first, **chosen)
    total = torch.zeros((), device=DEVICE, dtype=torch.float64)
    leaves = given[: 5 if kind == "fixed" else 3]
    with nullcontext() if kind == "continual" or impl == "reference" else no_waiting():
        for parts in zip(*(t.split(chunk, 2) for t in rest), strict=True):
            out, state = step_of(state)(state, *parts, output=output, impl=impl)
            total = total + out.double().square().sum()
        return torch.autograd.grad(total, leaves)
