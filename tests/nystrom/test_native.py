"""The iterative pseudo-inverse and the values of landmarks in C++, compared with float64, for every instruction set,
size and layout."""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cmab_kernels.nystrom.contract import LandmarkValues, LandmarkValuesBackward, Pinv, PinvBackward
from cmab_kernels.testing import LAWS

from .pinv_cases import MATRICES, Landmarks, check_landmarks, check_pinv, landmarks, with_gradient, with_gradients

native = pytest.importorskip("cmab_kernels.nystrom.native", reason="the extension was not built", exc_type=ImportError)

DTYPES = [torch.float64, torch.float32]
SIZES = [1, 2, 3, 4, 7, 8, 9, 16, 17, 33, 64, 65, 100]


pytestmark = pytest.mark.usefixtures("threads")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MATRICES)
def test_inverses(isa: str, dtype: torch.dtype, kind: str) -> None:
    for m in SIZES:
        for iterations in (0, 1, 6):
            check_pinv(native, MATRICES[kind](3, m).to(dtype), iterations)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("law", LAWS)
def test_landmarks(isa: str, dtype: torch.dtype, law: str) -> None:
    for m in SIZES:
        check_landmarks(native, landmarks(3, m, dtype=dtype, law=LAWS[law]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, value_width", [(1, 1), (3, 17), (16, 64), (65, 3), (64, 0)])
def test_widths(isa: str, dtype: torch.dtype, width: int, value_width: int) -> None:
    for m in (1, 16, 33):
        check_landmarks(native, landmarks(2, m, width, value_width, dtype, iterations=4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 16, 17, 40, 65])
def test_absent_landmarks_are_not_there(isa: str, dtype: torch.dtype, m: int) -> None:
    """Some, none, all, or all but one of the landmarks are absent, and have NaN in rows and gradients.

    All bits equal those of the other landmarks alone.
    """
    absent = torch.rand(5, m) < 0.4
    absent[1], absent[2], absent[3] = False, True, True
    absent[3, m // 2] = False
    given = landmarks(5, m, dtype=dtype, absent=absent)
    dout = torch.randn(given.values.shape).to(dtype).masked_fill(absent[..., None], math.nan)
    check_landmarks(native, given, dout)
    ours = with_gradients(native, given, dout)
    for i in range(5):
        here = ~absent[i]
        alone = [t[i, here][None] for t in given.tensors]
        theirs = with_gradients(native, LandmarkValues(*alone, None, *given[4:]), dout[i, here][None])
        assert all(torch.equal(a[0], b[i, here]) for a, b in zip(theirs, ours, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 4, 17])
@pytest.mark.parametrize("logit", [1e4, -1e4, 88.8, -104.0, 1e38, -1e38])
def test_extreme_logits(isa: str, dtype: torch.dtype, m: int, logit: float) -> None:
    """There are extreme logits everywhere, between each query and its own key, or between one query and its key."""
    own = torch.eye(m, dtype=dtype).expand(2, m, m)
    for query, key in (
        (torch.ones_like(own), own[:, :1].expand(2, m, m)),
        (own, own),
        (own * torch.arange(m).eq(m // 2)[:, None], own),
    ):
        given = landmarks(2, m, m, 3, dtype)._replace(landmark_query=logit * query, landmark_key=key, scale=1.0)
        gradients = native.landmark_values_backward(LandmarkValuesBackward(torch.ones_like(given.values), *given))
        assert all(not g.isnan().any() for g in gradients)
        # All at the end of the range, or all columns equal except for rounding.
        undecided = abs(logit) > 1e30 or not query.equal(own)
        check_landmarks(native, given, torch.zeros_like(given.values) if undecided else None)


@pytest.mark.parametrize("scale", [1.0, -1.0, 1e-30])
def test_logits_beyond_the_range_are_at_its_end(isa: str, scale: float) -> None:
    """Products of 1e40 exceed float32 and count as its largest number;
    with a scale of 1e-30 they are ordinary logits."""
    given = landmarks(1, 4, 2, 3, torch.float32)._replace(scale=scale)
    given.landmark_query[:] = torch.tensor([1e20, 0.0])
    given.landmark_key[:] = torch.tensor([1e20, 0.0]) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
    values = native.landmark_values(given)
    if abs(scale) == 1:
        tied = given._replace(landmark_query=torch.zeros_like(given.landmark_query))
        assert torch.equal(values, native.landmark_values(tied))
    else:
        check_landmarks(native, given, torch.zeros_like(given.values))
    assert values.isfinite().all()


@pytest.mark.parametrize("m", [1, 2, 16, 33])
@pytest.mark.parametrize("exponent", [-90, -60, -30, 30, 60, 90])
def test_inverses_of_any_size(isa: str, m: int, exponent: int) -> None:
    """The inverse of 2^n A is 2^-n times that of A, to the last bit, unless numbers overflow or underflow.

    Norms must not be multiplied with each other first.
    """
    matrix, dinverse = torch.randn(2, m, m), torch.randn(2, m, m)
    inverse, gradient = with_gradient(native, Pinv(matrix, 6), dinverse)
    scaled = matrix * 2.0**exponent
    scaled_inverse, scaled_gradient = with_gradient(native, Pinv(scaled, 6), dinverse * 2.0**exponent)
    assert torch.equal(scaled_inverse * 2.0**exponent, inverse)
    assert torch.equal(scaled_gradient * 2.0**exponent, gradient)


@pytest.mark.parametrize("m", [1, 2, 16, 17, 65])
def test_a_zero_matrix_among_others(isa: str, m: int) -> None:
    matrix, dinverse = torch.randn(3, m, m), torch.randn(3, m, m)
    matrix[1] = 0
    assert all(not part[1].any() for part in with_gradient(native, Pinv(matrix, 6), dinverse))
    check_pinv(native, matrix, 6, dinverse)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("m", [1, 16, 17])
def test_a_bad_matrix_leaves_its_neighbours_alone(isa: str, m: int, bad: float) -> None:
    matrix, dinverse = torch.randn(3, m, m), torch.randn(3, m, m)
    right = with_gradient(native, Pinv(matrix, 6), dinverse)
    matrix[1, m - 1, m // 2] = bad
    ours = with_gradient(native, Pinv(matrix, 6), dinverse)
    for a, b in zip(ours, right, strict=True):
        assert a[1].isnan().all() and torch.equal(a[::2], b[::2])


@pytest.mark.parametrize("which", range(4))
def test_a_nan_landmark_is_seen(isa: str, which: int) -> None:
    """A NaN in a query, a key, a value or an incoming gradient shows in the result."""
    given = landmarks(3, 9, dtype=torch.float32)
    dout = torch.randn(given.values.shape)
    right = with_gradients(native, given, dout)
    (*given.tensors, dout)[which][1, 4, 2] = math.nan
    ours = with_gradients(native, given, dout)
    seen = [(True, True, True, True), (True, True, True, True), (True, True, True, False), (False, True, True, True)][
        which
    ]
    for a, b, nan in zip(ours, right, seen, strict=True):
        assert bool(a[1].isnan().any()) == nan and torch.equal(a[::2], b[::2])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns first": lambda t: t.mT.contiguous().mT,
    "step 2": lambda t: torch.stack([t, torch.full_like(t, math.nan)], -1).flatten(-2)[..., ::2],
    "rows of step 2": lambda t: torch.stack([t, torch.full_like(t, math.nan)], 2).flatten(1, 2)[:, ::2],
    "offset 1": lambda t: torch.cat([t.new_full((1,), math.nan), t.flatten()])[1:].view(t.shape),
    "offset 3": lambda t: torch.cat([t.new_full((3,), math.nan), t.flatten()])[3:].view(t.shape),
    "batch inside": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_change_no_bit(isa: str, layout: str, dtype: torch.dtype) -> None:
    move = LAYOUTS[layout]
    for m in (1, 5, 16, 33):
        matrix, dinverse = (torch.randn(3, m, m).to(dtype) for _ in range(2))
        pinvs = (
            with_gradient(native, Pinv(move(matrix), 3), move(dinverse)),
            with_gradient(native, Pinv(matrix, 3), dinverse),
        )
        absent = torch.rand(3, m) < 0.3
        given = landmarks(3, m, dtype=dtype, absent=absent)
        spread = Landmarks(*(move(t) for t in given.tensors), torch.stack([absent, ~absent], -1)[..., 0], *given[4:])
        dout = torch.randn(given.values.shape).to(dtype)
        values = with_gradients(native, given, dout), with_gradients(native, spread, move(dout))
        assert all(torch.equal(a, b) for pair in (pinvs, values) for a, b in zip(*pair, strict=True))


def test_expanded_operands(isa: str) -> None:
    """Operands of stride 0: expanded over the batch, or the gradient of a sum."""
    matrix = torch.randn(1, 9, 9)
    one = matrix.new_ones(1, 1, 1).expand(4, 9, 9)
    right = native.iterative_pinv_backward(PinvBackward(one.contiguous(), matrix.repeat(4, 1, 1), 6))
    assert (
        torch.equal(native.iterative_pinv_backward(PinvBackward(one, matrix.expand(4, 9, 9), 6)), right)
        and (right == right[:1]).all()
    )
    given = landmarks(1, 9, 8, 5, torch.float32, torch.arange(9)[None] == 4)
    spread = Landmarks(*(t.expand(4, -1, -1) for t in given.tensors), given.absent.expand(4, 9), *given[4:])
    ones = torch.ones(1, 1, 1)
    for ours, right in zip(
        with_gradients(native, spread, ones.expand(4, 9, 5)),
        with_gradients(native, given, torch.ones(1, 9, 5)),
        strict=True,
    ):
        assert torch.equal(ours, right.expand(ours.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, count", [(3, 3000), (16, 200), (33, 40), (65, 9)])
def test_same_bits_for_any_threads_and_alone(
    isa: str, dtype: torch.dtype, m: int, count: int, threads: Callable[[int], None]
) -> None:
    matrix, dinverse = (torch.randn(count, m, m).to(dtype) for _ in range(2))
    given = landmarks(count, m, dtype=dtype, absent=torch.rand(count, m) < 0.2)
    dout = torch.randn(given.values.shape).to(dtype)

    def results(part: slice) -> tuple[Tensor, ...]:
        some = Landmarks(*(t[part] for t in given[:4]), *given[4:])
        return *with_gradient(native, Pinv(matrix[part], 6), dinverse[part]), *with_gradients(native, some, dout[part])

    right = results(slice(None))
    for team in (2, 4, 2):
        threads(team)
        assert all(torch.equal(a, b) for a, b in zip(results(slice(None)), right, strict=True))
    threads(1)
    for part in (slice(0, 1), slice(count - 1, count), slice(2, 7)):
        assert all(torch.equal(a, b[part]) for a, b in zip(results(part), right, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_matrices(isa: str, dtype: torch.dtype) -> None:
    empty = torch.zeros(0, 4, 4, dtype=dtype)
    assert all(part.shape == (0, 4, 4) for part in with_gradient(native, Pinv(empty, 6), empty))
    check_landmarks(native, landmarks(0, 4, dtype=dtype))


def test_more_than_65535_matrices() -> None:
    matrix = torch.randn(70_001, 2, 2)
    assert torch.equal(native.iterative_pinv(Pinv(matrix, 2))[-3:], native.iterative_pinv(Pinv(matrix[-3:], 2)))


@pytest.mark.parametrize("far", [0, 1, 2])
def test_offsets_beyond_32_bits(far: int) -> None:
    """Elements are 2^31 apart in one dimension: an offset of 32 bits would wrap.

    The memory between them is reserved and never accessed.
    """
    strides = [5, 2, 1]
    strides[far] = 2**31
    with tempfile.TemporaryFile() as sparse:
        sparse.truncate((2**31 + 64) * 4)
        memory = torch.frombuffer(mmap.mmap(sparse.fileno(), 0), dtype=torch.float32)
        spread = memory.as_strided((2, 2, 2), strides)
        matrix, other = torch.randn(2, 2, 2), torch.randn(2, 2, 2)
        right = native.iterative_pinv(Pinv(matrix, 6)), native.iterative_pinv_backward(PinvBackward(matrix, other, 6))
        values = native.landmark_values(LandmarkValues(matrix, other, other, None, 1.0, 6))
        spread.copy_(matrix)
        assert torch.equal(native.iterative_pinv(Pinv(spread, 6)), right[0])
        assert torch.equal(native.iterative_pinv_backward(PinvBackward(spread, other, 6)), right[1])
        assert torch.equal(native.landmark_values(LandmarkValues(spread, other, other, None, 1.0, 6)), values)
        del memory, spread


def test_what_is_not_supported() -> None:
    matrix = torch.zeros(1, 2, 2)
    assert native.unsupported(matrix) is None
    assert "meta" in str(native.unsupported(matrix.to("meta")))
    assert native.unsupported(matrix.bfloat16()) is None, "which reaches the kernels as float32"
    assert "int64" in str(native.unsupported(matrix.long()))
