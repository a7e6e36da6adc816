"""The CUDA C++ kernels of sums and solves, compiled for the CPU: numerics, layouts, empty extents, and equal bits for
any order of blocks.

The threads of a block run one after the other, phase by phase (csrc/common/block.cuh). These tests see neither a
missing fence between blocks nor what a GPU makes of the instructions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cmab_kernels.intention.solve.contract import RegularisedSolve, RidgeSolve
from cmab_kernels.runtime.dtypes import state_dtype
from cmab_kernels.testing import lapack_ratio
from tests import emulated_cuda

if emulated_cuda.COMPILER is None:
    pytest.skip("no C++ compiler to build the emulated kernels with", allow_module_level=True)
cuda = pytest.importorskip("cmab_kernels.intention.cuda", exc_type=ImportError)
cuda_solve = pytest.importorskip("cmab_kernels.intention.solve.cuda", exc_type=ImportError)

Emulated = emulated_cuda.EmulatedCuda


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated_cuda.shared(tmp_path_factory)


@pytest.fixture(autouse=True)
def played(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """Let launchers call the emulated kernels; fill all memory that they allocate with NaN."""
    player = Emulated(library)
    for module in (cuda, cuda_solve):
        monkeypatch.setattr(module, "CUDA", player)
        monkeypatch.setattr(module, "launch", emulated_cuda.launch)
    torch.use_deterministic_algorithms(True)
    yield player
    torch.use_deterministic_algorithms(False)


Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]


def _inputs(
    batch: int,
    heads: int,
    keys: int,
    width: int,
    value_width: int,
    dtype: torch.dtype,
    weighted: bool = False,
    masked: bool = False,
) -> Inputs:
    key, value = (
        torch.randn(batch, heads, keys, width).to(dtype),
        torch.randn(batch, heads, keys, value_width).to(dtype),
    )
    weights = torch.rand(batch, heads, keys, dtype=state_dtype(dtype)) if weighted else None
    mask = torch.rand(batch, keys) < 0.3 if masked else None
    return key, value, weights, mask, torch.rand(batch, heads, dtype=torch.float64) + 0.1


def _sums(
    key: Tensor, value: Tensor, weights: Tensor | None, mask: Tensor | None, alpha: Tensor
) -> tuple[Tensor, Tensor]:
    """Return K'WK and K'WV in float64."""
    absent = torch.zeros(key.shape[0], 1, key.shape[2], 1).bool() if mask is None else mask[:, None, :, None]
    k, v = (t.double().masked_fill(absent, 0.0) for t in (key, value))
    weighted = k if weights is None else k * weights.double()[..., None].masked_fill(absent, 0.0)
    return weighted.mT @ k, weighted.mT @ v


def _check(inputs: Inputs) -> tuple[Tensor, ...]:
    """Compare the sums with float64, relative to the sizes of their terms, and check the solution by LAPACK's ratio."""
    weight, gram, info = cuda.ridge_solve(RidgeSolve(*inputs))
    key, value, weights, mask, alpha = inputs
    tolerance = 1e-14 if key.dtype == torch.float64 else 2e-6
    expected, moment = _sums(*inputs)
    moduli, moment_moduli = _sums(key.abs(), value.abs(), weights, mask, alpha)
    assert ((gram - expected).abs() <= tolerance * moduli).all() and torch.equal(gram, gram.mT)
    system = gram + alpha[..., None, None] * torch.eye(key.shape[-1], dtype=torch.float64)
    assert info.eq(0).all() and weight.shape == moment.shape
    residual = (system @ weight - moment).abs()
    terms = system.abs() @ weight.abs()
    assert (residual <= tolerance * moment_moduli + 1e-14 * terms).all()
    return weight, gram, info


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted, masked", [(False, False), (True, True)])
@pytest.mark.parametrize(
    "width, value_width", [(1, 1), (3, 17), (16, 16), (17, 65), (32, 40), (64, 64), (65, 3), (96, 0), (128, 130)]
)
def test_sums_and_solution(dtype: torch.dtype, weighted: bool, masked: bool, width: int, value_width: int) -> None:
    _check(_inputs(2, 1, 150, width, value_width, dtype, weighted, masked))


@pytest.mark.parametrize("keys", [0, 1, 15, 16, 17, 127, 511, 512, 513, 1023, 1025, 2049])
@pytest.mark.parametrize("width", [8, 40])
def test_lengths(keys: int, width: int) -> None:
    _check(_inputs(1, 2, keys, width, 9, torch.float32, weighted=keys % 2 == 1))


CUTS = {
    "leaves": (2, 1, 3000, 8, 8),
    "groups of leaves": (1, 2, 20_000, 8, 4),
    "panels": (1, 2, 600, 128, 130),
    "panels and leaves": (1, 1, 2500, 100, 70),
    "panels and groups": (1, 1, 18_000, 33, 100),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_several_blocks_to_a_matrix(cut: str, dtype: torch.dtype) -> None:
    _check(_inputs(*CUTS[cut], dtype, weighted=True, masked=True))


@pytest.mark.parametrize("cut", CUTS)
def test_same_bits_in_any_order_and_alone(cut: str, played: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run in any order, threads forwards and backwards, in one launch or several,
    with a matrix alone or in a batch: same bits."""
    batch, heads, *rest = CUTS[cut]
    key, value, weights, mask, alpha = _inputs(batch + 1, heads, *rest, torch.float32, weighted=True, masked=True)
    whole = cuda.ridge_solve(RidgeSolve(key, value, weights, mask, alpha))
    for played.seed in range(1, 5):
        assert all(
            torch.equal(a, b)
            for a, b in zip(cuda.ridge_solve(RidgeSolve(key, value, weights, mask, alpha)), whole, strict=True)
        )
    monkeypatch.setattr(cuda, "MOST_WORKSPACE", 1)
    assert all(
        torch.equal(a, b)
        for a, b in zip(cuda.ridge_solve(RidgeSolve(key, value, weights, mask, alpha)), whole, strict=True)
    )
    assert weights is not None and mask is not None
    for b in range(batch + 1):
        one = slice(b, b + 1)
        alone = cuda.ridge_solve(RidgeSolve(key[one], value[one], weights[one], mask[one], alpha[one]))
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, whole, strict=True))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads inside": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns first": lambda t: t.mT.contiguous().mT,
    "step 2": lambda t: t.repeat_interleave(2, -1).repeat_interleave(2, -2)[..., ::2, ::2],
    "offset by 3": lambda t: torch.cat([t.new_full((3,), math.nan), t.reshape(-1)])[3:].view(t.shape),
    "rows of 4 more": lambda t: torch.cat([t, t.new_full((*t.shape[:-1], 4), math.nan)], -1)[..., : t.shape[-1]],
    "expanded": lambda t: t[:1, :1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 6])
def test_layouts(layout: str, dtype: torch.dtype, width: int) -> None:
    """Strided inputs give the bits of contiguous ones."""
    lay = LAYOUTS[layout]
    key, value, weights, mask, alpha = _inputs(2, 2, 77, width, 12, dtype, weighted=True, masked=True)
    assert weights is not None and mask is not None
    strange = (lay(key), lay(value), lay(weights[..., None])[..., 0], mask.T.contiguous().T, alpha[:, :1].expand(2, 2))
    plain = [t.contiguous() for t in strange]
    assert all(
        torch.equal(a, b)
        for a, b in zip(cuda.ridge_solve(RidgeSolve(*strange)), cuda.ridge_solve(RidgeSolve(*plain)), strict=True)
    )
    _check(strange)


def test_offsets_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows lie 2^31 elements apart: a stride of 32 bits would wrap. Memory between them is never touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    far = torch.empty(3 * 2**31 + 64, dtype=torch.float16)
    key = far.as_strided((1, 1, 3, 4), (1, 1, 2**31, 1))
    key.copy_(torch.randn(1, 1, 3, 4))
    _check((key, key, None, None, torch.ones(1, 1).double()))


@pytest.mark.parametrize("weighted", [False, True])
def test_overflow_is_repeated_in_float64(weighted: bool) -> None:
    """The sums or weighted keys of one run of 512 keys overflow float32, and the runs around it do not."""
    key, value, weights, mask, alpha = _inputs(1, 1, 1600, 20, 7, torch.float32, weighted, masked=True)
    run = slice(512, 1024)
    key[:, :, run] *= 1e20
    if weights is not None:
        weights[:, :, run] *= 1e20
    assert (key * key).sum(2).isinf().any()
    _check((key, value, weights, mask, alpha))


def test_nothing_of_an_absent_key_is_seen() -> None:
    for weighted in (False, True):
        key, value, weights, mask, alpha = _inputs(2, 2, 530, 9, 5, torch.float32, weighted, masked=True)
        assert mask is not None
        hidden = mask[:, None, :, None]
        clean = cuda.ridge_solve(
            RidgeSolve(key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), weights, None, alpha)
        )
        poisoned = None if weights is None else weights.masked_fill(mask[:, None], math.nan)
        dirty = cuda.ridge_solve(
            RidgeSolve(key.masked_fill(hidden, math.nan), value.masked_fill(hidden, math.inf), poisoned, mask, alpha)
        )
        assert all(torch.equal(a, b) for a, b in zip(dirty, clean, strict=True))
        everything = torch.ones_like(mask)
        weight, gram, info = cuda.ridge_solve(RidgeSolve(key, value, weights, everything, alpha))
        assert not weight.any() and not gram.any() and not info.any()


def test_a_bad_matrix_leaves_its_neighbours_alone() -> None:
    """A column of zeros without a penalty, a NaN in a key, or no keys at all:
    such a matrix is reported, and the others keep their bits."""
    key, value, _, _, alpha = _inputs(3, 2, 50, 20, 33, torch.float32)
    clean = cuda.ridge_solve(RidgeSolve(key, value, None, None, alpha))
    key[0, 1, :, 13], alpha[0, 1] = 0.0, 0.0
    key[2, 0, 17, 3] = math.nan
    weight, gram, info = cuda.ridge_solve(RidgeSolve(key, value, None, None, alpha))
    bad = torch.tensor([[False, True], [False, False], [True, False]])
    assert torch.equal(info, bad.int()) and weight[bad].isnan().all()
    assert torch.equal(weight[~bad], clean[0][~bad]) and torch.equal(gram[~bad], clean[1][~bad])
    weight, gram, info = cuda.ridge_solve(
        RidgeSolve(key[:, :, :0], value[:, :, :0], None, None, torch.zeros(3, 2).double())
    )
    assert info.eq(1).all() and weight.isnan().all() and not gram.any()


@pytest.mark.parametrize("batch, heads", [(0, 2), (2, 0), (3000, 1)])
def test_batches(batch: int, heads: int) -> None:
    _check(_inputs(batch, heads, 2, 1, 1, torch.float32))


def test_a_negative_penalty_is_told_by_info() -> None:
    """A GPU's penalties are not read by the host: info says which are not allowed,
    and the other systems keep their bits."""
    key, value, _, _, alpha = _inputs(3, 2, 50, 20, 33, torch.float32)
    clean = cuda.ridge_solve(RidgeSolve(key, value, None, None, alpha))
    alpha[0, 1], alpha[2, 0] = -1e-3, math.nan
    bad = torch.tensor([[False, True], [False, False], [True, False]])
    for given in (alpha, alpha.mT.contiguous().mT):
        weight, gram, info = cuda.ridge_solve(RidgeSolve(key, value, None, None, given))
        assert torch.equal(info, bad.int()) and weight[bad].isnan().all()
        assert torch.equal(weight[~bad], clean[0][~bad]) and torch.equal(gram, clean[1])
    alone, info = cuda_solve.regularised_solve(
        RegularisedSolve(gram.flatten(0, 1), weight.flatten(0, 1).nan_to_num(), alpha.flatten())
    )
    assert torch.equal(info, bad.flatten().int()) and torch.equal(alone.isnan().all(-1).all(-1), bad.flatten())


# ---- the solve by itself


def _systems(
    matrices: int, order: int, columns: int, dtype: torch.dtype, condition: float = 10.0
) -> tuple[Tensor, Tensor]:
    basis = torch.linalg.qr(torch.randn(matrices, order, order).double()).Q
    spectrum = torch.logspace(0, -math.log10(condition), order, dtype=torch.float64)
    return (basis * spectrum @ basis.mT).to(dtype), torch.randn(matrices, order, columns, dtype=dtype)


def _regularised(gram: Tensor, alpha: Tensor) -> Tensor:
    lower = gram.double().tril()
    return lower + lower.tril(-1).mT + alpha.double()[:, None, None] * torch.eye(gram.shape[-1]).double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("order", [1, 3, 7, 8, 9, 16, 32, 33, 64, 65, 100, 128])
@pytest.mark.parametrize("columns", [0, 1, 31, 65, 130])
def test_solve(dtype: torch.dtype, order: int, columns: int) -> None:
    gram, rhs = _systems(3, order, columns, dtype, 1e3)
    alpha = torch.tensor([0.0, 1e-3, 10.0], dtype=dtype)
    weight, info = cuda_solve.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    assert not info.any() and weight.shape == rhs.shape
    assert not columns or lapack_ratio(_regularised(gram, alpha), weight, rhs).max() < 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_solve_reads_the_lower_triangle_of_any_strides(dtype: torch.dtype, played: Emulated) -> None:
    gram, rhs = _systems(4, 21, 70, dtype)
    alpha = torch.rand(4, dtype=dtype)
    weight, info = cuda_solve.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    upper = torch.ones(21, 21).triu(1).bool()
    strange = gram.masked_fill(upper, math.nan).mT.contiguous().mT, rhs.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    for played.seed in range(3):
        assert torch.equal(cuda_solve.regularised_solve(RegularisedSolve(*strange, alpha))[0], weight)
    for i in range(4):
        one = slice(i, i + 1)
        assert torch.equal(
            cuda_solve.regularised_solve(RegularisedSolve(gram[one], rhs[one], alpha[one]))[0], weight[one]
        )
    columns = [
        cuda_solve.regularised_solve(RegularisedSolve(gram, rhs[..., e : e + 1], alpha))[0] for e in range(0, 70, 23)
    ]
    assert torch.equal(torch.cat(columns, -1), weight[..., ::23]), "each column by itself"
    assert (
        cuda_solve.regularised_solve(RegularisedSolve(gram[:0], rhs[:0], alpha[:0]))[0].shape == (0, 21, 70)
        and not info.any()
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("order", [2, 5, 16, 40, 100])
def test_ill_conditioned_systems_are_told(dtype: torch.dtype, order: int) -> None:
    """The estimated condition number is a lower bound within a factor of ten."""
    eps = torch.finfo(dtype).eps
    for share in (1e-4, 5e-3, 0.2, 1.0):
        gram, rhs = _systems(8, order, 1, dtype, share / eps / math.sqrt(order))
        condition = torch.linalg.cond(gram.double(), 1) * eps
        weight, info = cuda_solve.regularised_solve(RegularisedSolve(gram, rhs, torch.zeros(8, dtype=dtype)))
        assert not info[condition < 0.9e-2].any()
        assert info[condition > 1e-1].ne(0).all()
        assert torch.equal(info == 1, weight.isnan().any(-1).any(-1))


def test_the_estimate_is_close() -> None:
    """The estimate is within a factor of two in hard cases: a Hilbert matrix,
    and keys of which one is nearly the sum of the others."""
    i = torch.arange(12).double()
    keys = torch.randn(200, 64).double()
    keys[:, 0] = keys[:, 1:].sum(1) + 1e-6 * torch.randn(200).double()
    for gram, factor in ((1 / (i[:, None] + i + 1), 1.15), (keys.mT @ keys, 1.4)):
        alpha = torch.logspace(-17, -9, 200).double() * gram.abs().sum(0).max()
        systems = gram + alpha[:, None, None] * torch.eye(len(gram)).double()
        condition = torch.linalg.cond(systems, 1) * torch.finfo(torch.float64).eps
        _, info = cuda_solve.regularised_solve(
            RegularisedSolve(gram.expand_as(systems), torch.ones(200, len(gram), 1).double(), alpha)
        )
        assert not info[condition < 0.99e-2].any() and info[condition > factor * 1e-2].ne(0).all()
        assert 0 < info.ne(0).sum() < 200


def test_solve_of_bad_matrices() -> None:
    """Indefinite, infinite, NaN and singular matrices are reported, and the good ones keep their bits."""
    gram, rhs = _systems(6, 24, 5, torch.float64)
    alpha = torch.zeros(6).double()
    clean, _ = cuda_solve.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    gram[1] -= 2 * torch.eye(24)
    gram[2, 20, 20] = math.inf
    gram[3, 11, 4] = math.nan
    gram[4] = 0.0
    weight, info = cuda_solve.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    assert info.tolist() == [0, 1, 1, 1, 1, 0] and weight[1:5].isnan().all()
    assert torch.equal(weight[[0, 5]], clean[[0, 5]])


# ---- sanitizers


@pytest.mark.nightly
def test_under_sanitizers() -> None:
    """Tests of this file run again under sanitizers:
    an access out of bounds or undefined behaviour ends the process."""
    emulated_cuda.run_under_sanitizers(
        __file__, "several or bad or reads or (layouts and 16-dtype1) or (lengths and 40) or (test_solve and 65)"
    )
