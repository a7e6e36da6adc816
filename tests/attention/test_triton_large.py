"""Scores of 2^20 to 2^60 in Triton's interpreter, where a maximum, a unit or a remainder could be lost.

Every test runs twice: once as the interpreter computes, with every product rounded, and once with products fused into
the following additions, as in code that is compiled for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import triton
from torch import Tensor

from cmab_kernels.attention import triton as kernels
from cmab_kernels.attention.contract import Attention, AttentionBackward
from cmab_kernels.testing.fused import fused_products

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"

EVERYTHING = (True, True, True, False)


@pytest.fixture(params=[False, True], ids=["rounded", "fused"], autouse=True)
def fused(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether a product is not rounded if it is added or subtracted next."""
    with fused_products() if request.param else nullcontext():
        yield request.param


def _state(scores: Tensor, values: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The state of keys with these scores (before the scale), for one query of one head."""
    query = scores.new_ones(1, 1, 1, 1)
    return kernels.attention_forward(Attention(query, scores.view(1, 1, -1, 1), values.view(1, 1, -1, 1), scale=scale))


def _oracle(scores: Tensor, values: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    logits = scores.double() * scale
    return logits.softmax(0) @ values.double(), logits.logsumexp(0)


def _sequence(order: str, dtype: torch.dtype, signs: str, largest: int, seed: int) -> Tensor:
    """200 scores between 2^20 and 2^largest: four tiles of keys or more."""
    generator = torch.Generator().manual_seed(seed)
    scores = (2.0 ** (20 + (largest - 20) * torch.rand(200, generator=generator, dtype=torch.float64))).to(dtype)
    if signs == "both":
        scores *= torch.where(torch.rand(200, generator=generator) < 0.5, -1, 1)
    elif signs == "negative":
        scores = -scores
    return {"mixed": scores, "rising": scores.sort().values, "falling": scores.sort(descending=True).values}[order]


def _apart(first: float, second: float) -> Tensor:
    """One key of each score is in different tiles; the scores of all others are far below."""
    scores = torch.full((200,), -1e30)
    scores[3], scores[150] = first, second
    return scores


@pytest.mark.parametrize(
    "first, second", [(1.8e8, 2.0e8), (1e4, 2e8), (-3e8, -1e4), (-2e8, 1.5e8), (2.0e8, 1.8e8), (1.0, 1e38)]
)
def test_a_maximum_that_changes_its_unit(first: float, second: float) -> None:
    """The larger of two scores has all the weight, in either order, even if the two are stored in different units."""
    values = torch.zeros(200)
    values[3], values[150] = 1.0, 2.0
    scores = _apart(first, second)
    out, lse = _state(scores, values)
    expected, logarithm = _oracle(scores, values)
    assert out.item() == expected.item() and abs(lse.item() - logarithm.item()) <= 1e-7 * abs(logarithm.item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", ["mixed", "rising", "falling"])
@pytest.mark.parametrize("signs", ["positive", "negative", "both"])
def test_scores_of_all_sizes(dtype: torch.dtype, order: str, signs: str, fused: bool) -> None:
    """Results and gradients are those of the largest score; it occurs in one tile, or in two, where it counts twice.

    Float64 logits of 2^53 or more have a gradient if only one of them is the largest, although lse cannot distinguish
    neighbouring scores.
    """
    for seed, (scale, largest) in enumerate([(1.0, 60), (0.7, 60), (3.0, 48)]):
        scores, values = _sequence(order, dtype, signs, largest, seed), torch.randn(200, dtype=dtype)
        out, lse = _state(scores, values, scale)
        expected, logarithm = _oracle(scores, values, scale)
        allowed = (1e-14 if fused else 4 * torch.finfo(dtype).eps) * abs(logarithm.item()) + 1e-6
        assert abs(out.item() - expected.item()) <= 1e-6 and abs(lse.item() - logarithm.item()) <= allowed
        _check_gradients(scores, values, scale, out, lse, allowed)
        top = int(scores.argmax())
        twice = scores.clone()
        twice[(top + 100) % 200] = scores[top]
        assert abs(_state(twice, values, scale)[0].item() - _oracle(twice, values, scale)[0].item()) <= 1e-6


def _check_gradients(scores: Tensor, values: Tensor, scale: float, out: Tensor, lse: Tensor, allowed: float) -> None:
    """With dout = 1 and dlse = 1, dV is the weights; dS is the weight where this is 0 or 1, and dK is the same times
    the scale.

    An error of lse, which may be `allowed`, causes an error of the weights.
    """
    query, key, value = scores.new_ones(1, 1, 1, 1), scores.view(1, 1, -1, 1), values.view(1, 1, -1, 1)
    ones = torch.ones_like(out), torch.ones_like(lse)
    dquery, dkey, dvalue, _ = kernels.attention_backward(
        AttentionBackward(*ones, query, key, value, None, None, out, lse, None, scale, EVERYTHING)
    )
    assert all(grad.isfinite().all() for grad in (dquery, dkey, dvalue))
    weights = torch.zeros_like(scores)
    weights[scores.argmax()] = 1.0
    torch.testing.assert_close(dvalue.flatten(), weights, rtol=1e-6 + allowed, atol=0)
    torch.testing.assert_close(dkey.flatten(), scale * weights, rtol=1e-5 + allowed, atol=0)
    torch.testing.assert_close(dquery.flatten(), scale * scores.max()[None], rtol=1e-5 + allowed, atol=0)


def test_a_lone_largest_score_has_weight_one() -> None:
    """A lone largest score has weight 1 in float64 too, where two neighbouring values of the logarithm belong to
    numbers whose ratio is e^4 to e^64."""
    generator = torch.Generator().manual_seed(0)
    query = (
        2.0 ** torch.randint(15, 21, (1, 64, 1, 1), generator=generator)
        * (1 + torch.rand(1, 64, 1, 1, generator=generator)).double()
    )
    key = 2.0 ** torch.arange(0, 39, 3, dtype=torch.float64) * torch.tensor([1.0, -1.0]).repeat(7)[:13]
    value = torch.eye(13, dtype=torch.float64).expand(1, 64, 13, 13)
    key = key.view(1, 1, 13, 1).expand(1, 64, 13, 1)
    scale = 8**-0.5
    out, lse = kernels.attention_forward(Attention(query, key, value, scale=scale))
    slopes = torch.ones_like(out), torch.zeros_like(lse)
    _, _, dvalue, _ = kernels.attention_backward(
        AttentionBackward(*slopes, query, key, value, None, None, out, lse, None, scale, EVERYTHING)
    )
    assert torch.equal(dvalue[..., 0], torch.eye(13, dtype=torch.float64)[12].expand(1, 64, 13))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", [1e3, 1.3e5, 3e7, 1.7e8])
def test_neighbours(dtype: torch.dtype, level: float) -> None:
    """Scores that differ by a few units get the same weights if a large number is added to all of them."""
    scores = torch.full((200,), level, dtype=dtype)
    step = max(math.ulp(level) * 2 ** (29 if dtype == torch.float32 else 0), 0.25)
    scores += step * torch.randint(-8, 1, (200,), generator=torch.Generator().manual_seed(1))
    values = torch.randn(200, dtype=dtype)
    out, lse = _state(scores, values)
    expected, logarithm = _oracle(scores, values)
    eps = torch.finfo(dtype).eps
    assert (
        abs(out.item() - expected.item()) <= 4 * eps * level + 1e-6
        and abs(lse.item() - logarithm.item()) <= 4 * eps * level
    )


@pytest.mark.parametrize("level", [100.0, 700.0, 3e3, 7e3, 1.1e4])
def test_large_scores_in_float16(level: float) -> None:
    """Weights are multiplied by 2^14. The rounding of a large maximum adds to them, and they must still fit in
    float16."""
    values = torch.arange(200.0).half()
    for step in range(0, 40, 9):
        key = torch.full((1, 1, 200, 1), level + 8 * step, dtype=torch.float16)
        query = torch.full((1, 1, 1, 1), level, dtype=torch.float16)
        out, lse = kernels.attention_forward(Attention(query, key, values.view(1, 1, -1, 1), scale=1.0))
        score = query.double().item() * key[0, 0, 0].double().item()
        assert (
            abs(out.item() - 99.5) <= 2**-10 * 99.5
            and abs(lse.item() - score - math.log(200)) <= 4 * torch.finfo(torch.float32).eps * score
        )
