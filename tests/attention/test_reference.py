"""The definition, compared with torch's own attention and log-sum-exp, and with values computed by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from cmab_kernels.attention.reference import attention_backward_reference, attention_reference


def test_by_hand() -> None:
    """Two keys of scores 0 and log 3 have weights 1/4 and 3/4, and lse = log 4."""
    query, key = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [math.log(3.0)]]]])
    value = torch.tensor([[[[4.0], [8.0]]]])
    out, lse = attention_reference(query, key, value, None, None, 1.0)
    torch.testing.assert_close(out, torch.tensor([[[[7.0]]]]))
    assert lse.dtype == torch.float64 and abs(lse.item() - math.log(4.0)) < 1e-7


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_against_torch(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, n, 16, dtype=dtype) for n in (5, 70, 70))
    out, lse = attention_reference(q, k, v, None, None, 0.3)
    wide = [t.double() for t in (q, k, v)]
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(
        out.double(), torch.nn.functional.scaled_dot_product_attention(*wide, scale=0.3), rtol=0, atol=tolerance
    )
    torch.testing.assert_close(lse, (0.3 * wide[0] @ wide[1].mT).logsumexp(-1), rtol=0, atol=10 * tolerance)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_packed_sets_equal_each_set_alone() -> None:
    offsets = [0, 3, 3, 10]
    q, k, v = torch.randn(3, 2, 4, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 5)
    out, lse = attention_reference(q, k, v, None, torch.tensor(offsets), 0.5)
    for i, (start, stop) in enumerate(itertools.pairwise(offsets)):
        alone = attention_reference(q[i : i + 1], k[:, :, start:stop], v[:, :, start:stop], None, None, 0.5)
        torch.testing.assert_close(out[i : i + 1], alone[0])
        torch.testing.assert_close(lse[i : i + 1], alone[1])
    assert lse[1].eq(-math.inf).all() and out[1].eq(0).all()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradient_formula_against_autograd(packed: bool, biased: bool) -> None:
    batch = 1 if packed else 2
    q, k, v = torch.randn(2, 3, 4, 6), torch.randn(batch, 3, 9, 6), torch.randn(batch, 3, 9, 5)
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    mask = torch.rand(batch, 9) < 0.3
    offsets = torch.tensor([0, 4, 9]) if packed else None
    bias = torch.randn(batch, 3, 9).double() if biased else None
    if bias is not None:
        bias[:, 1, 2] = -math.inf
        bias.requires_grad_()
    inputs = (q, k, v) if bias is None else (q, k, v, bias)
    out, lse = attention_reference(q, k, v, mask, offsets, 0.7, bias)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    wanted = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    given = attention_backward_reference(dout, dlse, q, k, v, mask, offsets, out, lse, 0.7, bias)
    assert biased or given[3].shape == (0,)
    for a, b in zip(given, wanted, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_nothing_that_is_ignored_leaks() -> None:
    q, k, v = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 9, 6), torch.randn(2, 3, 9, 5)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 4:] = mask[1] = True
    clean = attention_reference(q, k, v, mask, None, 0.7)
    k[0, :, 4:], v[1] = math.nan, math.inf
    for a, b in zip(attention_reference(q, k, v, mask, None, 0.7), clean, strict=True):
        assert torch.equal(a, b) and not a.isnan().any()
