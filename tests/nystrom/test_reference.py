"""The definition equals the formulas as written, and known results."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import cmab_kernels as ck
from cmab_kernels.nystrom.reference import landmark_kernel, segment_ends, segment_means
from cmab_kernels.testing import oracles, row_error
from cmab_kernels.testing.oracles import nystrom_attention as dense


def _tokens(length: int, width: int = 8, value_width: int = 5) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, 3, length, w, dtype=torch.float64) for w in (width, width, value_width))


@pytest.mark.parametrize("length, segments", [(1, 1), (7, 1), (7, 3), (8, 4), (11, 4), (13, 13), (130, 64)])
def test_segments(length: int, segments: int) -> None:
    tokens, mask = torch.randn(2, 3, length, 4, dtype=torch.float64), torch.rand(2, length) < 0.6
    mask[1] = True
    assert segment_ends(length, segments)[-1] == length
    torch.testing.assert_close(
        segment_means(tokens, segments), oracles.segment_means(tokens, segments), rtol=1e-13, atol=1e-14
    )
    torch.testing.assert_close(
        segment_means(tokens, segments, mask), oracles.segment_means(tokens, segments, mask), rtol=1e-13, atol=1e-14
    )


@pytest.mark.parametrize("length, segments", [(1, 1), (20, 1), (20, 3), (21, 4), (33, 33), (200, 16)])
def test_segment_means_as_landmarks(impl: str, length: int, segments: int) -> None:
    q, k, v = _tokens(length)
    ours = ck.nystrom_attention(q, k, v, segments, impl=impl)
    wanted = dense(q, k, v, (oracles.segment_means(q, segments), oracles.segment_means(k, segments)))
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("iterations", [1, 6, 12, 0])
def test_given_landmarks(impl: str, iterations: int, shared: bool) -> None:
    """Any number of given landmarks works, for any numbers of queries and keys."""
    _, k, v = _tokens(40)
    q = torch.randn(2, 3, 17, 8, dtype=torch.float64)
    landmarks = tuple(torch.randn(*((3,) if shared else (2, 3)), 9, 8, dtype=torch.float64) for _ in range(2))
    pinv = {"pinv": "exact"} if iterations == 0 else {"pinv_iterations": iterations}
    ours = ck.nystrom_attention(q, k, v, landmarks=landmarks, scale=0.7, impl=impl, **pinv)
    wanted = dense(q, k, v, tuple(t.expand(2, 3, 9, 8) for t in landmarks), iterations, 0.7)
    assert row_error(ours, wanted).max() < (1e-12 if iterations else 1e-9)


def test_every_token_a_landmark_is_attention(impl: str) -> None:
    """If every token is a landmark and the pseudo-inverse is exact, the result is attention, since A pinv(A) A = A."""
    q, k, v = _tokens(12)
    ours = ck.nystrom_attention(q, k, v, 12, pinv="exact", impl=impl)
    torch.testing.assert_close(ours, scaled_dot_product_attention(q, k, v), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("hidden", [[0], [3, 4, 5], list(range(15, 20)), list(range(0, 20, 2)), list(range(20))])
def test_a_mask_hides_tokens_and_empty_segments(impl: str, hidden: list[int]) -> None:
    """A mask has the same effect as leaving out masked keys and empty segments, even if padding is NaN."""
    q, k, v = _tokens(20)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0, hidden] = True
    near, far = oracles.segment_means(q, 6, mask), oracles.segment_means(k, 6, mask)
    there = oracles.segment_means((~mask).double()[:, None, :, None], 6)[0, 0, :, 0] > 0
    one = [t[:1] for t in (q, k, v)]
    present = ~mask[0]
    wanted = (
        dense(one[0], *(t[:, :, present] for t in one[1:]), (near[:1, :, there], far[:1, :, there]))
        if present.any()
        else None
    )
    for tokens in (q, k, v):
        tokens[0, :, hidden] = torch.nan
    ours = ck.nystrom_attention(q, k, v, 6, key_padding_mask=mask, impl=impl)
    torch.testing.assert_close(
        ours[1:], dense(*(t[1:] for t in (q, k, v)), (near[1:], far[1:])), rtol=1e-12, atol=1e-12
    )
    if wanted is None:
        assert ours[0].eq(0).all()
    else:
        torch.testing.assert_close(ours[:1, :, present], wanted[:, :, present], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_shapes_on_the_meta_device(impl: str, dtype: torch.dtype) -> None:
    """The meta device has no autocast, and torch raises an error if asked about it."""
    tokens = torch.empty(2, 3, 20, 8, device="meta", dtype=dtype)
    assert ck.nystrom_attention(tokens, tokens, tokens, 4, impl=impl).shape == tokens.shape
    assert ck.iterative_pinv(tokens[..., :8, :], impl=impl).shape == (2, 3, 8, 8)


@pytest.mark.parametrize("number", [1, 2, 3, 16, 33])
def test_pinv(impl: str, number: int) -> None:
    matrix = torch.randn(2, 3, number, number, dtype=torch.float64).softmax(-1)
    matrix[0, 1] = 0.0
    for iterations in (1, 6):
        ours = ck.iterative_pinv(matrix, iterations, impl=impl)
        torch.testing.assert_close(ours, oracles.iterative_pinv(matrix, iterations), rtol=1e-11, atol=1e-11)
    assert ours[0, 1].eq(0).all()


def test_pinv_converges_to_the_exact_one(impl: str) -> None:
    matrix = torch.eye(8, dtype=torch.float64) + 0.3 * torch.rand(4, 8, 8, dtype=torch.float64)
    matrix[:, :, 7] = matrix[:, :, 6]  # singular
    ours = ck.iterative_pinv(matrix, 25, impl=impl)
    torch.testing.assert_close(ours, torch.linalg.pinv(matrix), rtol=1e-7, atol=1e-7)


def test_each_matrix_has_its_own_norms(impl: str) -> None:
    """A neighbour in the batch, however large, changes no bit of a matrix's inverse."""
    matrix = torch.rand(3, 5, 5, dtype=torch.float64)
    matrix[1] *= 1e6
    whole = ck.iterative_pinv(matrix, impl=impl)
    assert all(torch.equal(ck.iterative_pinv(matrix[i], impl=impl), whole[i]) for i in range(3))


def test_logits_beyond_the_range_are_at_its_end() -> None:
    """The definition's softmax over landmarks is finite even if products of their elements are not."""
    landmarks = 1e20 * torch.tensor([[1.0], [-1.0], [2.0]])
    assert landmark_kernel(landmarks, landmarks, None, 1.0).isfinite().all()


def test_an_ignored_query_is_one_of_zeros() -> None:
    tokens, mask = torch.randn(1, 2, 6, 4), torch.tensor([[False, True, False, False, True, False]])
    query = tokens.masked_fill(mask[:, None, :, None], torch.nan)
    ours, right = (
        ck.nystrom_attention(q, tokens, tokens, 3, key_padding_mask=mask) for q in (query, query.nan_to_num(0.0))
    )
    assert torch.equal(ours, right)
