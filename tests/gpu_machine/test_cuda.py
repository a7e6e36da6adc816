"""The CUDA kernels of csrc on the machine, compiled by nvcc: the checks of the tests on the CPU, in several orders with
equal bits."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest
import torch

from gpu_machine import cuda_launch
from gpu_machine.machine import Machine
from gpu_machine.orders import in_orders
from gpu_machine.report import Fault

if cuda_launch.COMPILER is None or cuda_launch.nvcc() is None:
    pytest.skip("no nvcc, or no C++ compiler, to compile the CUDA kernels with", allow_module_level=True)
pytest.importorskip("cmab_kernels.intention.solve.cuda", exc_type=ImportError)

from cmab_kernels.intention.solve.contract import RegularisedSolve

from ..emulated_cuda import once
from ..intention.solve import test_cuda as solve
from ..nystrom.continual import test_cuda as steps

pytestmark = pytest.mark.thorough
NIGHTLY = [pytest.param(dtype, marks=pytest.mark.nightly) for dtype in (torch.float64, torch.float16)]
DTYPES = [torch.float32, torch.bfloat16, *NIGHTLY]
Run = Callable[..., set[str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> cuda_launch.Built:
    return cuda_launch.built_in(once(tmp_path_factory, "cuda", cuda_launch.build))


@pytest.fixture
def run(built: cuda_launch.Built) -> Run:
    """Run a check in two orders; the value is a function that returns the names of the kernels that ran."""

    def in_both(check: Callable[[], object], lenient: bool = False) -> set[str]:
        def place(machine: Machine) -> AbstractContextManager[None]:
            return cuda_launch.cuda_on_machine(machine, built, solve.cuda, steps.cuda_step)

        return {re.findall(r"\d([a-z_]+_kernel)I", name)[0] for name in in_orders(check, place, lenient=lenient)}

    return in_both


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width, columns", [(1, 1), (9, 4), pytest.param(33, 17, marks=pytest.mark.nightly)])
def test_solve(width: int, columns: int, dtype: torch.dtype, run: Run) -> None:
    factor, rhs = torch.randn(3, width, width, dtype=dtype), torch.randn(3, width, columns, dtype=dtype)
    gram, alpha = factor @ factor.mT, torch.rand(3, dtype=dtype) + 0.1

    def check() -> None:
        weight, info = solve.cuda.regularised_solve(RegularisedSolve(gram, rhs, alpha))
        matrix = gram.double() + alpha.double()[:, None, None] * torch.eye(width)
        assert (info == 0).all() and (solve.lapack_ratio(matrix, weight, rhs) < 10).all()

    assert run(check, lenient=True) == {"solve_kernel"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("landmarks", [None, 3])
@pytest.mark.parametrize("retroactive", [False, True])
def test_steps(landmarks: int | None, retroactive: bool, dtype: torch.dtype, run: Run) -> None:
    """A stream in chunks of one and of several tokens."""
    stream = steps._tokens(1, 2, 17, 8, 5, dtype)
    ran = run(lambda: steps._compare(stream, 12, landmarks, [1, 3, 1], retroactive))
    assert ran == {"attention_step_kernel" if landmarks is None else "nystrom_step_kernel"}


def test_what_the_host_makes_belongs_to_the_machine_that_runs(built: cuda_launch.Built) -> None:
    """Two machines that run one after the other give equal tensors of the next state. The position is made in C++."""
    stream = steps._tokens(1, 2, 13, 8, 5, torch.float32)
    for seed in range(2):
        machine = Machine(seed, rough=True)
        with cuda_launch.cuda_on_machine(machine, built, solve.cuda, steps.cuda_step):
            steps._compare(stream, 12, 3, [1], False)
        assert any("1x2, int64" in part.name for part in machine.memory.results)


class OneColumnMore(Machine):
    """A machine that tells the solver that the right-hand side has one column more."""

    def launch(
        self, ptx: str, name: str, grid: Sequence[int], threads: int, shared_bytes: int, parameters: Sequence[bytes]
    ) -> None:
        (call,) = parameters
        assert struct.unpack_from("<qii", call, 8) == (1, 9, 4), (
            "matrices, order and columns of csrc/solve/regularised_solve.cuh"
        )
        super().launch(ptx, name, grid, threads, shared_bytes, [call[:20] + struct.pack("<i", 5) + call[24:]])


def test_a_column_too_many_is_reported(built: cuda_launch.Built) -> None:
    machine = OneColumnMore(lenient=True)
    with (
        cuda_launch.cuda_on_machine(machine, built, solve.cuda),
        pytest.raises(Fault, match=r"(?s)out of bounds.*\.cuh:\d+"),
    ):
        solve.cuda.regularised_solve(RegularisedSolve(torch.eye(9)[None], torch.randn(1, 9, 4), torch.ones(1)))
