"""The Triton kernels in Triton's interpreter. tests/test_interpreter.py runs this file with TRITON_INTERPRET=1.

The interpreter checks no bounds: inputs lie between margins of NaN, results between margins that must stay as they
were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from cmab_kernels.nystrom import triton as kernels
from cmab_kernels.nystrom.contract import LandmarkValuesBackward, Pinv
from cmab_kernels.nystrom.reference import iterative_pinv_reference, landmark_kernel, landmark_values_reference
from cmab_kernels.nystrom.triton import large, launch
from cmab_kernels.testing import between_margins, guarded_results

from .pinv_cases import (
    MATRICES,
    Landmarks,
    check_landmarks,
    check_nearly_singular,
    check_pinv,
    landmarks,
    with_gradient,
    with_gradients,
)

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns where a masked lane overflows

DTYPES = [torch.float64, torch.float32]


@pytest.fixture(autouse=True)
def margins() -> Iterator[None]:
    """Put results between margins of memory, and check at the end of the test that no kernel wrote to the margins."""
    with guarded_results():
        yield


def _landmarks(*shape: int, **options: Any) -> Landmarks:
    given = landmarks(*shape, **options)
    absent = None if given.absent is None else between_margins(given.absent)
    return Landmarks(*map(between_margins, given.tensors), absent, *given[4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, iterations", [(1, 2), (3, 6), (16, 0), (16, 1), (17, 2), (33, 1), (64, 1)])
def test_inverses(dtype: torch.dtype, m: int, iterations: int) -> None:
    check_pinv(kernels, between_margins(MATRICES["normal"](2, m).to(dtype)), iterations)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("iterations", [6, 12])
def test_nearly_singular_matrices(dtype: torch.dtype, iterations: int) -> None:
    check_nearly_singular(
        lambda matrices: kernels.iterative_pinv(Pinv(between_margins(matrices), iterations)), 4, 5, iterations, dtype
    )


@pytest.mark.parametrize(
    "kind, dtype", [*(("normal", dtype) for dtype in DTYPES), ("signs", torch.float32), ("zero", torch.float64)]
)
def test_inverses_in_blocks(kind: str, dtype: torch.dtype) -> None:
    """Matrices that do not fit in one program; their last blocks are not full."""
    check_pinv(kernels, between_margins(MATRICES[kind](2, 70).to(dtype)), 1)


@pytest.mark.parametrize("m, in_blocks", [(32, False), (40, True)])
def test_float64_goes_in_blocks_without_matrix_units(m: int, in_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "capability_of", lambda device: (8, 6))
    seen, in_large = [], large.iterative_pinv
    monkeypatch.setattr(large, "iterative_pinv", lambda given: seen.append(given) or in_large(given))
    check_pinv(kernels, MATRICES["normal"](2, m), 1)
    assert bool(seen) == in_blocks


@pytest.mark.parametrize("some_absent, dtype", zip([False, True], DTYPES, strict=True))
def test_landmarks_in_blocks(some_absent: bool, dtype: torch.dtype) -> None:
    absent = torch.rand(2, 67) < 0.4 if some_absent else None
    given = _landmarks(2, 67, 9, 3, dtype=dtype, absent=absent, iterations=1)
    dout = torch.randn(given.values.shape).to(dtype)
    check_landmarks(kernels, given, dout if absent is None else dout.masked_fill(absent[..., None], math.nan))


@pytest.mark.parametrize("kind", sorted(set(MATRICES) - {"normal"}))
def test_matrices(kind: str) -> None:
    check_pinv(kernels, MATRICES[kind](2, 5), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, width, value_width", [(1, 1, 1), (5, 3, 17), (16, 16, 64), (17, 65, 3), (4, 8, 0)])
def test_landmarks(dtype: torch.dtype, m: int, width: int, value_width: int) -> None:
    check_landmarks(kernels, _landmarks(2, m, width, value_width, dtype=dtype, iterations=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 5, 17])
def test_absent_landmarks_are_not_there(dtype: torch.dtype, m: int) -> None:
    """Some, none, all, or all but one of the landmarks are absent, and have NaN in rows and gradients."""
    absent = torch.rand(4, m) < 0.4
    absent[1], absent[2], absent[3] = False, True, True
    absent[3, m // 2] = False
    given = _landmarks(4, m, dtype=dtype, absent=absent, iterations=1)
    check_landmarks(kernels, given, torch.randn(given.values.shape).to(dtype).masked_fill(absent[..., None], math.nan))


@pytest.mark.parametrize("logit", [1e4, -1e4, 88.8, -104.0, 1e38, -1e38])
def test_extreme_logits(logit: float) -> None:
    """There are extreme logits between each query and its own key."""
    own = torch.eye(5).expand(1, 5, 5)
    given = landmarks(1, 5, 5, 3, dtype=torch.float32, iterations=1)._replace(
        landmark_query=logit * own, landmark_key=own, scale=1.0
    )
    check_landmarks(kernels, given, torch.zeros_like(given.values) if abs(logit) > 1e30 else None)
    assert all(
        not g.isnan().any()
        for g in kernels.landmark_values_backward(LandmarkValuesBackward(torch.ones_like(given.values), *given))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [5, 16])
def test_huge_logits_in_any_order(dtype: torch.dtype, m: int) -> None:
    """Logits from 2^20 to 2^60: the largest logit of each query has all the weight, and no gradient is infinite."""
    for order in (torch.arange(m), torch.arange(m).flip(0), torch.randperm(m)):
        given = landmarks(1, m, 4, 3, dtype=dtype, iterations=2)
        query, key = torch.zeros(2, 1, m, 4, dtype=dtype)
        query[..., 0] = 2.0**20 * (1.0 - 2.0 * (torch.arange(m) % 2))
        key[..., 0] = (2.0 ** torch.linspace(0, 40, m))[order] * (1.0 - 2.0 * (torch.arange(m) % 3 == 2))
        given = given._replace(landmark_query=query, landmark_key=key)
        wanted = landmark_values_reference(query.double(), key.double(), given.values.double(), None, given.scale, 2)
        error = (kernels.landmark_values(given) - wanted).norm() / wanted.norm()
        assert error < 64 * torch.finfo(dtype).eps
        *_, dvalues = grads = kernels.landmark_values_backward(
            LandmarkValuesBackward(torch.ones_like(given.values), *given)
        )
        inverse = iterative_pinv_reference(landmark_kernel(query.double(), key.double(), None, given.scale), 2)
        assert all(grad.isfinite().all() for grad in grads)
        torch.testing.assert_close(
            dvalues.double(), inverse.mT @ torch.ones_like(given.values).double(), rtol=1e-5, atol=1e-5
        )


def test_logits_beyond_the_range_are_at_its_end() -> None:
    far = landmarks(1, 4, 2, 3, dtype=torch.float32)._replace(scale=1.0)
    far.landmark_query[:], far.landmark_key[:] = torch.tensor([1e20, 0.0]), torch.tensor([1e20, 0.0])
    tied = far._replace(landmark_query=torch.zeros_like(far.landmark_query))
    assert torch.equal(kernels.landmark_values(far), kernels.landmark_values(tied))


@pytest.mark.parametrize("exponent", [-60, 60])
def test_inverses_of_any_size(exponent: int) -> None:
    """The inverse of 2^n A is 2^-n times that of A, to the last bit: norms must not be multiplied with each other."""
    matrix, dinverse = torch.randn(1, 3, 3), torch.randn(1, 3, 3)
    scaled = matrix * 2.0**exponent
    ours = with_gradient(kernels, Pinv(scaled, 3), dinverse * 2.0**exponent)
    right = with_gradient(kernels, Pinv(matrix, 3), dinverse)
    assert all(torch.equal(a * 2.0**exponent, b) for a, b in zip(ours, right, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_a_matrix_leaves_its_neighbours_alone(bad: float) -> None:
    """A matrix with a NaN or an infinity, or a matrix of zeros, changes no bit of the others in its batch."""
    matrix, dinverse = torch.randn(3, 4, 4), torch.randn(3, 4, 4)
    alone = [with_gradient(kernels, Pinv(one, 1), g) for one, g in zip(matrix.split(1), dinverse.split(1), strict=True)]
    matrix[1] = matrix[1] * bad if bad == 0 else matrix[1].index_fill(0, torch.tensor(3), bad)
    ours = with_gradient(kernels, Pinv(matrix, 1), dinverse)
    for all_of_them, right in zip(ours, zip(*alone, strict=True), strict=True):
        assert torch.equal(all_of_them[::2], torch.cat(right[::2]))
        assert (all_of_them[1] == 0).all() if bad == 0 else all_of_them[1].isnan().all()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns first": lambda t: t.mT.contiguous().mT,
    "step 2": lambda t: torch.stack([t, torch.full_like(t, math.nan)], -1).flatten(-2)[..., ::2],
    "offset 3": lambda t: torch.cat([t.new_full((3,), math.nan), t.flatten()])[3:].view(t.shape),
    "batch inside": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "expanded": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_no_bit(layout: str) -> None:
    move = LAYOUTS[layout]
    absent = (torch.arange(5) == 3).expand(2, 5)
    given = landmarks(2, 5, 8, 3, dtype=torch.float32, absent=absent, iterations=1)
    spread = Landmarks(*(move(t) for t in given.tensors), torch.stack([absent, ~absent], -1)[..., 0], *given[4:])
    plain = Landmarks(*(t.contiguous() for t in spread[:4]), *given[4:])
    dout = move(torch.randn(given.values.shape))
    values = with_gradients(kernels, spread, dout), with_gradients(kernels, plain, dout.contiguous())
    matrix, dinverse = move(torch.randn(2, 5, 5)), move(torch.randn(2, 5, 5))
    right = with_gradient(kernels, Pinv(matrix.contiguous(), 1), dinverse.contiguous())
    pinvs = with_gradient(kernels, Pinv(matrix, 1), dinverse), right
    assert all(torch.equal(a, b) for pair in (values, pinvs) for a, b in zip(*pair, strict=True))


def test_no_matrices() -> None:
    check_pinv(kernels, torch.zeros(0, 4, 4), 2)
    check_landmarks(kernels, landmarks(0, 4, dtype=torch.float32))


def test_what_is_not_supported() -> None:
    assert kernels.unsupported(torch.zeros(1, 256, 256)) is None
    assert "256" in str(kernels.unsupported(torch.zeros(1, 257, 257)))
    assert "bfloat16" in str(kernels.unsupported(torch.zeros(1, 2, 2, dtype=torch.bfloat16)))
