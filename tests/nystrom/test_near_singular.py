"""Nyström attention with landmarks that are close to each other: small windows, more iterations, small logits.

Then the pseudo-inverse multiplies the rounding errors of its matrix by up to (13/4)^iterations, and torch's own error
on one input is random. The tests therefore use the largest error over equivalent evaluations, as derived below.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import cmab_kernels as ck
from cmab_kernels.testing import bound, oracles

from .pinv_cases import ORDERS, check_nearly_singular

DTYPES = [torch.float64, torch.float32]

Results = tuple[Tensor, ...]


def _moved(matrix: Tensor) -> Tensor:
    """Return the matrix with each element changed by at most an eps of it at random, as another exponential would
    do."""
    eps = torch.finfo(matrix.dtype).eps
    return matrix * (1 + eps * (2 * torch.rand_like(matrix) - 1)) if eps > 1e-10 else matrix


def _attention(
    query: Tensor, key: Tensor, value: Tensor, order: Tensor, iterations: int, move: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return Nyström attention with segment means as landmarks, in the given order, which changes only roundings."""
    near, far = (oracles.segment_means(t, len(order))[:, :, order] for t in (query, key))
    scale = query.shape[-1] ** -0.5
    gamma, by_query, by_key = (
        move((scale * a @ b.mT).softmax(-1)) for a, b in ((near, far), (query, far), (near, key))
    )
    return by_query @ (oracles.iterative_pinv(gamma, iterations) @ (by_key @ value))


def _differentiated(formula: Callable[..., Tensor], inputs: Results, dout: Tensor) -> Results:
    leaves = tuple(t.detach().requires_grad_() for t in inputs)
    out = formula(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype)))


def _errors(results: Results, right: Results) -> list[Tensor]:
    """Return the error of each row, relative to it or to a twentieth of the largest row of its head."""
    sizes = (t.norm(dim=-1).clamp(min=1e-300) for t in right)
    return [
        (ours.double() - wanted).norm(dim=-1) / torch.maximum(size, 0.05 * size.amax(-1, keepdim=True))
        for ours, wanted, size in zip(results, right, sizes, strict=True)
    ]


def _own_errors(evaluate: Callable[[Tensor], Results], right: Results, number: int) -> list[Tensor]:
    """Return the largest error of float32 torch in each head, for each result that it has with landmarks in some order.

    Gamma enters the iteration with an error of about an eps in each element, and the iteration rounds A Z, whose terms
    are as large as |A| |Z|, four times in each step. To first order, both errors change the result by a sum of many
    terms. Each term is a rounding error times a derivative of the result. The size of the change depends on how these
    errors add up. So it depends on the order of the sums and on the exponential, and the definition determines neither.
    A single evaluation may have an error near 0 and says little: in one head out of a thousand with five tokens and
    five landmarks, and in one out of twenty with sixteen tokens, it had less than a third of the kernel's error. The
    largest error of several evaluations that differ in nothing else is the error of float32. Over 80 heads each of nine
    shapes, kernel errors had a median of 0.5 to 0.8 of it.
    """
    evaluations = [_errors(evaluate(torch.randperm(number)), right) for _ in range(ORDERS)]
    return [
        torch.stack(errors).amax(0).amax(-1, keepdim=True).nan_to_num(1.0, 1.0)
        for errors in zip(*evaluations, strict=True)
    ]


def _check(impls: Sequence[str], length: int, number: int, iterations: int, width: int, size: float) -> None:
    inputs = tuple(factor * torch.randn(1, 4, length, width) for factor in (size, size, 1.0))
    dout = torch.randn(1, 4, length, width)
    wide = tuple(t.double() for t in inputs)
    right = _differentiated(
        lambda *leaves: _attention(*leaves, torch.arange(number), iterations, lambda t: t), wide, dout
    )  # type: ignore[misc]
    own = _own_errors(
        lambda order: _differentiated(lambda *leaves: _attention(*leaves, order, iterations, _moved), inputs, dout),  # type: ignore[misc]  # three tensors, of a list
        right,
        number,
    )
    score = float((wide[0] @ wide[1].mT).abs().max()) * width**-0.5
    for impl, given in itertools.product(impls, (wide, inputs)):
        dtype = given[0].dtype
        ours = _differentiated(
            lambda q, k, v, impl=impl: ck.nystrom_attention(q, k, v, number, pinv_iterations=iterations, impl=impl),
            given,
            dout,
        )
        shrink = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
        for name, error, others in zip(("out", "dquery", "dkey", "dvalue"), _errors(ours, right), own, strict=True):
            allowed = bound(dtype, score, shrink * others, 1.0 if name == "out" else 4.0)
            assert (error <= allowed).all(), (impl, dtype, name, float((error / allowed).max()))


@pytest.mark.parametrize("size", [0.1, 1.0])
@pytest.mark.parametrize("length, number", [(2, 2), (5, 5), (16, 5), (8, 8), (64, 16)])
def test_attention(impls: Sequence[str], length: int, number: int, size: float) -> None:
    for iterations, width in itertools.product((6, 12, 20), (8, 128)):
        _check(impls, length, number, iterations, width, size)


@pytest.mark.parametrize("seed", [10, 139, 268, 310])
def test_five_tokens_and_five_landmarks(impls: Sequence[str], seed: int) -> None:
    """Twelve iterations at width 128,
    in heads where torch's own error is four times as large with the landmarks in another order."""
    torch.manual_seed(seed)
    inputs = tuple(torch.randn(1, 64, 5, 128) for _ in range(3))
    query, key, value = (t.double() for t in inputs)
    right = (_attention(query, key, value, torch.arange(5), 12, lambda t: t),)
    (own,) = _own_errors(lambda order: (_attention(*inputs, order, 12, _moved),), right, 5)  # type: ignore[misc]  # three tensors, of a list
    for impl in impls:
        ours = ck.nystrom_attention(*inputs, 5, pinv_iterations=12, impl=impl)
        (error,) = _errors((ours,), right)
        assert (error <= bound(torch.float32, 0.0, own)).all(), (
            impl,
            float((error / bound(torch.float32, 0.0, own)).max()),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("iterations", [6, 12, 20])
@pytest.mark.parametrize("number", [2, 5, 16, 40])
def test_pseudo_inverse(impl: str, number: int, iterations: int, dtype: torch.dtype) -> None:
    check_nearly_singular(
        lambda matrices: ck.iterative_pinv(matrices, iterations, impl=impl), 20, number, iterations, dtype
    )
