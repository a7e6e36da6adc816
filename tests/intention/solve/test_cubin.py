"""The Triton solve compiled for GPUs that this machine need not have: these tests read the machine code."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from cmab_kernels.intention.solve import triton as kernels
from cmab_kernels.intention.solve.contract import RegularisedSolve
from cmab_kernels.testing.cubin import SHARED_LIMIT, Launch, as_if_on, compiled, faults, record

pytestmark = pytest.mark.thorough

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
ORDINARY = [("fp32", 16, 80), ("fp64", 64, 90), ("fp32", 256, 86), ("fp64", 256, 90)]
NIGHTLY = [case for case in itertools.product(DTYPES, (16, 32, 64, 128, 256), SHARED_LIMIT) if case not in ORDINARY]


def _launch(dtype: torch.dtype, order: int, columns: int = 7, systems: int = 3, transposed: bool = False) -> Launch:
    gram, rhs = (torch.empty(systems, order, n, dtype=dtype, device="meta") for n in (order, columns))
    (one,) = record(
        lambda: kernels.regularised_solve(RegularisedSolve(gram.mT if transposed else gram, rhs, gram[:, 0, 0]))
    )
    return one


def _check(launched: Launch, capability: int, folder: Path) -> list[str]:
    figures = compiled(launched, capability, folder)
    print(figures)
    found = faults(figures, matrix=False)
    # A line of a tile, which threads do exchange.
    if figures.shared > launched.options["COLUMNS"] * launched.args[0].element_size():
        found.append(f"{figures.shared} bytes of shared memory: tiles are exchanged between threads")
    return found


@pytest.mark.parametrize("name, order, capability", ORDINARY)
def test_compiled(name: str, order: int, capability: int, tmp_path: Path) -> None:
    with as_if_on(capability):
        assert _check(_launch(DTYPES[name], order), capability, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name, order, capability", NIGHTLY)
def test_compiled_everywhere(name: str, order: int, capability: int, tmp_path: Path) -> None:
    with as_if_on(capability):
        assert _check(_launch(DTYPES[name], order), capability, tmp_path) == []


def test_no_program_grows_with_the_order(tmp_path: Path) -> None:
    """Loops over lines stay loops: order 256 takes no longer to compile than order 32.

    Unrolled, they would take minutes.
    """
    small, large = (compiled(_launch(torch.float32, order), 90, tmp_path).instructions.total() for order in (32, 256))
    assert large <= 1.05 * small


def test_one_program_for_all_shapes_of_a_size() -> None:
    """Neither the order (within its padded size) nor columns, systems or strides make Triton compile again."""

    def compiled_as(launched: Launch) -> tuple[str, str]:
        source, options = launched.kernel.source(*launched.args, **launched.options)
        return source.hash(), str(sorted(options.items(), key=str))

    many = [
        _launch(torch.float32, order, *rest)
        for order in (33, 48, 64)
        for rest in ((1, 1), (16, 4), (1000, 70_000, True))
    ]
    assert len({compiled_as(one) for one in many}) == 1
    assert compiled_as(_launch(torch.float32, 65)) != compiled_as(many[0]) != compiled_as(_launch(torch.float64, 64))


# ---- each check refuses a planted fault


def test_spills_are_seen(tmp_path: Path) -> None:
    launched = _launch(torch.float32, 16)
    launched.options.update(maxnreg=64)
    assert any("spilled" in fault for fault in _check(launched, 90, tmp_path))


def test_exchanged_tiles_are_seen(tmp_path: Path) -> None:
    """With more warps than columns need, Triton divides lines among them, and threads exchange eliminated elements."""
    launched = _launch(torch.float64, 64)
    launched.options.update(num_warps=8, COLUMNS=64)
    assert any("exchanged" in fault for fault in _check(launched, 90, tmp_path))
