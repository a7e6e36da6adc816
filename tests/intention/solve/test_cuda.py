"""The CUDA C++ kernel of solves, compiled for the CPU: numerics, layouts, empty extents, and equal bits for any order
of blocks.

The threads of a block run one after the other, phase by phase (csrc/common/block.cuh). These tests see neither a
missing fence between blocks nor what a GPU makes of the instructions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cmab_kernels.intention.solve.contract import RegularisedSolve
from cmab_kernels.testing import lapack_ratio
from tests import emulated_cuda

if emulated_cuda.COMPILER is None:
    pytest.skip("no C++ compiler to build the emulated kernels with", allow_module_level=True)
cuda = pytest.importorskip("cmab_kernels.intention.solve.cuda", exc_type=ImportError)

Emulated = emulated_cuda.EmulatedCuda
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated_cuda.shared(tmp_path_factory)


@pytest.fixture(autouse=True)
def played(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """Let launchers call the emulated kernels; fill all memory that they allocate with NaN."""
    player = Emulated(library)
    monkeypatch.setattr(cuda, "CUDA", player)
    monkeypatch.setattr(cuda, "launch", emulated_cuda.launch)
    torch.use_deterministic_algorithms(True)
    yield player
    torch.use_deterministic_algorithms(False)


def test_a_negative_penalty_is_told_by_info() -> None:
    """The host does not read penalties on a GPU. `info` says which penalties are not allowed, and the other systems
    keep their bits."""
    gram, rhs = _systems(6, 20, 33, torch.float64)
    alpha = torch.rand(6, dtype=torch.float64) + 0.1
    clean, _ = cuda.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    alpha[1], alpha[4] = -1e-3, math.nan
    bad = torch.tensor([False, True, False, False, True, False])
    weight, info = cuda.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    assert torch.equal(info, bad.int()) and torch.equal(weight.isnan().all(-1).all(-1), bad)
    assert torch.equal(weight[~bad], clean[~bad])


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
    weight, info = cuda.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    assert not info.any() and weight.shape == rhs.shape
    assert not columns or lapack_ratio(_regularised(gram, alpha), weight, rhs).max() < 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_solve_reads_the_lower_triangle_of_any_strides(dtype: torch.dtype, played: Emulated) -> None:
    gram, rhs = _systems(4, 21, 70, dtype)
    alpha = torch.rand(4, dtype=dtype)
    weight, info = cuda.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    upper = torch.ones(21, 21).triu(1).bool()
    strange = gram.masked_fill(upper, math.nan).mT.contiguous().mT, rhs.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    for played.seed in range(3):
        assert torch.equal(cuda.regularised_solve(RegularisedSolve(*strange, alpha))[0], weight)
    for i in range(4):
        one = slice(i, i + 1)
        assert torch.equal(cuda.regularised_solve(RegularisedSolve(gram[one], rhs[one], alpha[one]))[0], weight[one])
    columns = [cuda.regularised_solve(RegularisedSolve(gram, rhs[..., e : e + 1], alpha))[0] for e in range(0, 70, 23)]
    assert torch.equal(torch.cat(columns, -1), weight[..., ::23]), "each column by itself"
    assert (
        cuda.regularised_solve(RegularisedSolve(gram[:0], rhs[:0], alpha[:0]))[0].shape == (0, 21, 70)
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
        weight, info = cuda.regularised_solve(RegularisedSolve(gram, rhs, torch.zeros(8, dtype=dtype)))
        assert not info[condition < 0.9e-2].any()
        assert info[condition > 1e-1].ne(0).all()
        assert torch.equal(info == 1, weight.isnan().any(-1).any(-1))


def test_the_estimate_is_close() -> None:
    """The estimate is within a factor of two in hard cases: a Hilbert matrix, and keys where one key is nearly the sum
    of the others."""
    i = torch.arange(12).double()
    keys = torch.randn(200, 64).double()
    keys[:, 0] = keys[:, 1:].sum(1) + 1e-6 * torch.randn(200).double()
    for gram, factor in ((1 / (i[:, None] + i + 1), 1.15), (keys.mT @ keys, 1.4)):
        alpha = torch.logspace(-17, -9, 200).double() * gram.abs().sum(0).max()
        systems = gram + alpha[:, None, None] * torch.eye(len(gram)).double()
        condition = torch.linalg.cond(systems, 1) * torch.finfo(torch.float64).eps
        _, info = cuda.regularised_solve(
            RegularisedSolve(gram.expand_as(systems), torch.ones(200, len(gram), 1).double(), alpha)
        )
        assert not info[condition < 0.99e-2].any() and info[condition > factor * 1e-2].ne(0).all()
        assert 0 < info.ne(0).sum() < 200


def test_solve_of_bad_matrices() -> None:
    """Indefinite, infinite, NaN and singular matrices are reported, and the good ones keep their bits."""
    gram, rhs = _systems(6, 24, 5, torch.float64)
    alpha = torch.zeros(6).double()
    clean, _ = cuda.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    gram[1] -= 2 * torch.eye(24)
    gram[2, 20, 20] = math.inf
    gram[3, 11, 4] = math.nan
    gram[4] = 0.0
    weight, info = cuda.regularised_solve(RegularisedSolve(gram, rhs, alpha))
    assert info.tolist() == [0, 1, 1, 1, 1, 0] and weight[1:5].isnan().all()
    assert torch.equal(weight[[0, 5]], clean[[0, 5]])


# ---- sanitizers


@pytest.mark.nightly
def test_under_sanitizers() -> None:
    """Tests of this file run again under sanitizers:
    an access out of bounds or undefined behaviour ends the process."""
    emulated_cuda.run_under_sanitizers(__file__, "bad or reads or (test_solve and 65)")
