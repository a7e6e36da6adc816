"""The definition: its two forms, its limits, its gradients, and the `info` of a solve."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.intention.reference import gram_backward_reference, gram_reference
from cmab_kernels.intention.solve.reference import regularised_solve_reference
from cmab_kernels.testing import oracles


def _inputs(length: int = 9, width: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, 3, n, w, dtype=torch.float64) for n, w in ((5, width), (length, width), (length, 6)))


MASK = torch.tensor([[False] * 7 + [True] * 2, [True] + [False] * 8])
WEIGHTS = torch.rand(2, 9, dtype=torch.float64).masked_fill(torch.arange(9) % 4 == 1, 0.0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [4, 20])
@pytest.mark.parametrize("form", ["primal", "dual", "auto"])
def test_both_forms_are_the_formula(impl: str, form: str, width: int, weighted: bool, masked: bool) -> None:
    q, k, v = _inputs(width=width)
    weights, mask, alpha = (
        WEIGHTS if weighted else None,
        MASK if masked else None,
        torch.rand(2, 3, dtype=torch.float64) + 0.1,
    )
    inputs = [t.requires_grad_() for t in (q, k, v, alpha)] + ([weights.clone().requires_grad_()] if weighted else [])
    given = inputs[4] if weighted else None
    ours = ck.intention(q, k, v, alpha, form=form, weights=given, key_padding_mask=mask, impl=impl)
    wanted = oracles.intention(q, k, v, alpha, given, mask)
    torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-12)
    direction = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, direction), torch.autograd.grad(wanted, inputs, direction), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [4, 20])
def test_sigma_is_the_formula(impl: str, width: int, weighted: bool, masked: bool) -> None:
    q, k, v = (t.requires_grad_() for t in _inputs(width=width))
    weights, mask = WEIGHTS if weighted else None, MASK if masked else None
    ours = ck.sigma_intention(q, k, v, 0.3, weights=weights, key_padding_mask=mask, impl=impl)
    wanted = oracles.sigma_intention(q, k, v, 0.3, weights, mask)
    torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-12)
    for a, b in zip(torch.autograd.grad(ours.sum(), (q, k)), torch.autograd.grad(wanted.sum(), (q, k)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("length", [9, 3])
def test_the_limits_of_a_large_penalty(impl: str, length: int) -> None:
    """For a large alpha, and queries scaled by it, results tend to linear attention and to attention.

    The error is of the size of K'K / alpha.
    """
    q, k, v = _inputs(length)
    alpha = 1e8
    torch.testing.assert_close(ck.intention(alpha * q, k, v, alpha, impl=impl), q @ k.mT @ v, rtol=1e-6, atol=1e-5)
    attention = ck.latent_attention(q, k, v, scale=1.0, impl="reference")
    torch.testing.assert_close(ck.sigma_intention(alpha * q, k, v, alpha, impl=impl), attention, rtol=1e-6, atol=1e-5)


def test_interpolation_without_penalty(impl: str) -> None:
    """With alpha = 0 and fewer keys than columns the dual form fits every point exactly;
    masked keys and keys of weight 0 do not count."""
    _, k, v = _inputs(length=3, width=8)
    torch.testing.assert_close(ck.intention(k, k, v, 0.0, impl=impl), v)
    mask = torch.tensor([[False, True, False], [False, False, False]])
    k[0, :, 1] = torch.nan
    out = ck.intention(k.nan_to_num(), k, v, 0.0, key_padding_mask=mask, impl=impl)
    torch.testing.assert_close(out[0, :, ::2], v[0, :, ::2])
    weights = torch.tensor([[1.0, 0.0, 2.0], [3.0, 1.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(
        ck.intention(k[1:], k[1:], v[1:], 0.0, weights=weights[:1], impl=impl)[0, :, ::2], v[1, :, ::2]
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_the_sums(weighted: bool) -> None:
    k, v = (t.requires_grad_() for t in _inputs()[1:])
    weights = torch.rand(2, 3, 9, dtype=torch.float64).requires_grad_() if weighted else None
    sums = gram_reference(k, v, weights, MASK, exact=True)
    directions = [torch.randn_like(s) for s in sums]
    ours = gram_backward_reference(*directions, k, v, weights, MASK, exact=True)
    inputs = [k, v, *([] if weights is None else [weights])]
    for a, b in zip(ours, torch.autograd.grad(sums, inputs, directions), strict=False):
        torch.testing.assert_close(a.masked_fill(MASK[:, None, :, None], 0.0) if a.dim() == 4 else a, b)


def test_info_of_the_definition() -> None:
    spectrum = torch.tensor([[1.0, 1.0], [1.0, 1e-3], [1.0, 1e-7], [1.0, 0.0], [1.0, -1.0], [torch.nan, 1.0]])
    _, info = regularised_solve_reference(torch.diag_embed(spectrum), torch.ones(6, 2, 1), torch.zeros(6))
    assert info.tolist() == [0, 0, 2, 1, 1, 1]
    _, info = regularised_solve_reference(torch.diag_embed(spectrum), torch.ones(6, 2, 1), torch.full((6,), 0.1))
    assert info.tolist() == [0, 0, 0, 0, 1, 1]
