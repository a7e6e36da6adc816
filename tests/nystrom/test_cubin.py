"""The Triton kernels, compiled for GPUs that this machine need not have: these tests read the machine code."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cmab_kernels.nystrom import triton as kernels
from cmab_kernels.nystrom.contract import LandmarkValues, LandmarkValuesBackward, Pinv, PinvBackward
from cmab_kernels.nystrom.triton import launch
from cmab_kernels.testing.cubin import SHARED_LIMIT, Launch, as_if_on, compiled, faults, record
from tests.machine_code import wrong

pytestmark = pytest.mark.thorough

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
ORDINARY = [("fp32", 16, 90), ("fp64", 16, 90), ("fp32", 16, 80)]
KERNELS = ("_pinv", "_landmark_values", "_pinv_backward", "_landmark_values_backward")
GRADIENTS = KERNELS[2:]
IN_BLOCKS = ("fp64", 64, 100)
"""These run in blocks: `test_float64_without_matrix_units_goes_in_blocks`."""
EVERY = [case for case in itertools.product(DTYPES, (1, 17, 64), (80, 90, 100)) if case != IN_BLOCKS]
SPILLING = {
    ("fp32", 64, 80): {"_landmark_values": 0.02, "_pinv_backward": 0.1, "_landmark_values_backward": 0.04},
    ("fp32", 64, 90): {"_pinv_backward": 0.01, "_landmark_values_backward": 0.015},
    ("fp32", 64, 100): {
        "_pinv": 0.03,
        "_landmark_values": 0.03,
        "_pinv_backward": 0.09,
        "_landmark_values_backward": 0.08,
    },
    ("fp64", 17, 100): {"_pinv_backward": 0.035, "_landmark_values_backward": 0.035},
    ("fp64", 64, 80): {"_pinv_backward": 0.01, "_landmark_values_backward": 0.01},
}
"""Kernels known to spill, and the largest share of their instructions that may access local memory.

Float32 on sm_80 and sm_90: the bfloat16 parts take the registers. Float32 and float64 on sm_100: without matrix units a
thread holds whole rows and columns. Float64 on sm_80: three squares have the layouts of its matrix unit. No other
number of warps spills less.
"""


def _launches(name: str, m: int, width: int = 64, absent: bool = True) -> dict[str, Launch]:
    """Record the launches of all four operators by the name of the kernel."""
    rows = torch.empty(3, m, width, dtype=DTYPES[name])
    matrix = torch.empty(3, m, m, dtype=DTYPES[name])
    given = LandmarkValues(rows, rows, rows, torch.zeros(3, m, dtype=torch.bool) if absent else None, 0.125, 6)

    def call() -> None:
        kernels.iterative_pinv(Pinv(matrix, 6))
        kernels.iterative_pinv_backward(PinvBackward(matrix, matrix, 6))
        kernels.landmark_values(given)
        kernels.landmark_values_backward(LandmarkValuesBackward(rows, *given))

    return {one.kernel.__name__: one for one in record(call)}


def _check(launched: Launch, capability: int, folder: Path) -> list[str]:
    return wrong([launched], capability, folder, _by_matrix_units)


def _by_matrix_units(launched: Launch, capability: int) -> bool:
    """Return whether matrix units multiply: float32 in bfloat16 parts,
    and float64 on sm_80 and sm_90, as Triton 3.6 does."""
    if launched.options["PRECISION"] == "bf16x6":
        return True
    return launched.options["OPERAND"] == launch.triton_dtype(torch.float64) and capability in (80, 90)


@pytest.mark.parametrize("name, m, capability", ORDINARY)
def test_compiled(name: str, m: int, capability: int, tmp_path: Path) -> None:
    found = _launches(name, m)
    assert len(found) == 4
    assert [fault for one in found.values() for fault in _check(one, capability, tmp_path)] == []


def test_the_largest_matrices_stay_in_registers(tmp_path: Path) -> None:
    """The iteration with 64 landmarks stays in registers, with bfloat16 parts and Hopper's own matrix instructions."""
    launched = _launches("fp32", 64)["_pinv"]
    assert _check(launched, 90, tmp_path) == [] and compiled(launched, 90, tmp_path).count("HGMMA")


def test_landmark_values_lose_no_descriptor(tmp_path: Path) -> None:
    assert _check(_launches("fp32", 64)["_landmark_values"], 90, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", GRADIENTS)
def test_gradients_lose_no_descriptor(kernel: str, tmp_path: Path) -> None:
    assert compiled(_launches("fp32", 64)[kernel], 90, tmp_path).lost == []


@pytest.mark.parametrize("capability", SHARED_LIMIT)
@pytest.mark.parametrize("name", DTYPES)
def test_products_in_blocks(name: str, capability: int, tmp_path: Path) -> None:
    """Every operator with more than 64 landmarks launches one kernel,
    as often as it has products, within 99 KiB of shared memory."""
    with as_if_on(capability):
        matrix, rows = (torch.empty(2, 65, width, dtype=DTYPES[name]) for width in (65, 8))
        launched = record(lambda: kernels.iterative_pinv(Pinv(matrix, 6)))
        launched += record(
            lambda: kernels.landmark_values_backward(LandmarkValuesBackward(rows, rows, rows, rows, None, 0.5, 6))
        )
    assert {one.kernel.__name__ for one in launched} == {"_multiply"} and len(launched) == 4 * 6 + (
        1 + 4 * 6 + 1 + 11 * 6 + 3
    )
    added = next(one for one in launched if one.args[2] is not None)
    assert [fault for one in (launched[1], added) for fault in _check(one, capability, tmp_path)] == []
    assert compiled(added, capability, tmp_path).shared <= min(SHARED_LIMIT.values())


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name, m, capability", EVERY)
def test_compiled_everywhere(name: str, m: int, capability: int, kernel: str, tmp_path: Path) -> None:
    with as_if_on(capability):
        launched = _launches(name, m)[kernel]
    spilling = {known: share for known, share in SPILLING.get((name, m, capability), {}).items() if known == kernel}
    assert wrong([launched], capability, tmp_path, _by_matrix_units, spilling) == []
    figures = compiled(launched, capability, tmp_path)
    assert bool(figures.matrix) == _by_matrix_units(launched, capability), f"{figures}: not in full, but in tf32"


@pytest.mark.parametrize(
    "m, capability, in_blocks", [(33, 80, False), (64, 90, False), (32, 100, False), (33, 100, True), (64, 86, True)]
)
def test_float64_without_matrix_units_goes_in_blocks(m: int, capability: int, in_blocks: bool) -> None:
    """In one program, half of the instructions for 64 landmarks would access local memory (`test_products_in_blocks`
    compiles the blocks)."""
    with as_if_on(capability):
        assert set(_launches("fp64", m)) == ({"_multiply"} if in_blocks else set(KERNELS))


@pytest.mark.parametrize("capability", SHARED_LIMIT)
def test_only_hopper_takes_eight_warps_for_64_rows(capability: int) -> None:
    """On other targets, the second four warps would repeat the rows of the first four; on sm_100, all rows are
    multiplied."""
    with as_if_on(capability):
        found = {one.options["num_warps"] for name, one in _launches("fp32", 64).items() if name not in GRADIENTS}
    assert found == {8 if capability in (90, 100) else 4}


def test_a_mask_makes_no_operand_a_byte(tmp_path: Path) -> None:
    """If operands depend on a load of bytes, Triton 3.6 treats float32 as exact in tf32 on sm_100, and fails to compile
    this."""
    with as_if_on(100):
        launched = _launches("fp32", 64)["_landmark_values"]
    figures = compiled(launched, 100, tmp_path)
    assert figures.count("FFMA") > 4000 and not figures.matrix


def test_what_does_not_fit_in_tensor_memory_is_multiplied_in_full(tmp_path: Path) -> None:
    """Bfloat16 parts would need 928 columns of tensor memory, where 512 exist,
    and no GPU could launch the kernel; so it has no such parts."""
    with as_if_on(100):
        launched = _launches("fp32", 64)["_pinv"]
    assert launched.options["PRECISION"] == "ieee"
    assert not any("tensor memory" in fault for fault in _check(launched, 100, tmp_path))
    launched.options.update(PRECISION="bf16x6")
    assert any("tensor memory" in fault for fault in _check(launched, 100, tmp_path))


# ---- each check reports a planted fault


def test_spills_are_seen(tmp_path: Path) -> None:
    """The check reports spills when a single warp holds all rows and columns in its registers."""
    launched = _launches("fp32", 17)["_pinv"]
    launched.options.update(num_warps=1)
    assert any("spilled" in fault for fault in _check(launched, 90, tmp_path))


def test_lost_descriptors_are_seen(tmp_path: Path) -> None:
    """The check reports the error of ptxas 12.8 in the landmark values, whose tiles share addresses with squares."""

    def by_default(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Any:
        return triton.compile(source, target=target, options=options)

    with mock.patch("cmab_kernels.testing.cubin.compiled_kernel", by_default):
        found = _check(_launches("fp32", 64)["_landmark_values"], 90, tmp_path)
    assert found and all("no address in the descriptor" in fault for fault in found)


def test_missing_matrix_instructions_are_seen(tmp_path: Path) -> None:
    launched = _launches("fp32", 16)["_pinv"]
    assert faults(compiled(launched, 90, tmp_path), True) == ["no matrix instruction"]


def test_float32_is_never_multiplied_in_tf32() -> None:
    """The pseudo-inverse is not multiplied in tf32, even where torch may use tf32."""
    with mock.patch("cmab_kernels.runtime.triton_launch.allows_tf32", lambda: True):
        for m in (16, 32, 64):
            assert {one.options["PRECISION"] for one in _launches("fp32", m).values()} == {
                "bf16x6" if m == 64 else "ieee"
            }


def test_the_scale_is_a_double() -> None:
    """The scale reaches the kernel as a float64: Triton passes a Python number as a float32 unless told otherwise."""
    found = _launches("fp64", 16)
    for name in ("_landmark_values", "_landmark_values_backward"):
        assert found[name].kernel.source(*found[name].args, **found[name].options)[0].signature["scale"] == "fp64"


def test_strides_beyond_32_bits_reach_the_kernel() -> None:
    """Strides beyond 32 bits are passed as 64 bits. Tensors are on the meta device, and need no memory."""
    with torch.device("meta"):
        matrix = torch.empty(0).as_strided((3, 8, 8), (2**34, 2**33, 1))
        (one,) = record(lambda: kernels.iterative_pinv(Pinv(matrix, 6)))
    assert one.options["strides"] == (2**34, 0, 2**33, 1)
