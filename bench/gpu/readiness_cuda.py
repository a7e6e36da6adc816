"""The CUDA kernels of csrc as nvcc has compiled them into the package: what ptxas said of them, and their machine code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cmab_kernels
from bench.floors import Work, ridge_work, solve_work
from cmab_kernels.runtime.extension import build_report
from cmab_kernels.testing.cubin import cuobjdump

from .readiness_cases import Case

DTYPES = {"f": "float32", "d": "float64", "NS_7Float16E": "float16", "NS_8BFloat16E": "bfloat16"}
CAPABILITIES = {"sm_80": (80, 86, 89), "sm_90a": (90,), "sm_100": (100,), "sm_120": (120,)}
"""The machine code that GPUs run, and their compute capabilities."""
WARPS = 8
"""Warps of every block at these shapes."""


class Kernel(NamedTuple):
    """`shared`: bytes of a block, from the bytes of a sum. `multiply_adds`: of all blocks together, padding included, and `work`; of a step
    None, for it is a launch and its barriers, whose time no count implies."""

    operator: str
    shape: str
    width: int
    shared: Callable[[int], int]
    multiply_adds: float | None = None
    work: Callable[[str], Work] | None = None
    dtypes: tuple[str, ...] = tuple(DTYPES.values())


def _step_shared(value_width: int, landmarks: int) -> Callable[[int], int]:
    """csrc/continual/step.cuh, Layout."""
    return lambda size: size * (8 * 256 + 256 + 16 + 4 * 128 + 2 * 256 + max(256, value_width + 2) + (4 * landmarks + 2) * landmarks)


def _ridge_shared(size: int) -> int:
    """csrc/gram/gram_block.cuh, of 64 columns of keys and of values: a panel of 64 x 128 sums, and tiles of 16 keys."""
    return 64 * 128 * 8 + 16 * (128 + 1) * size


def _solve_shared(size: int) -> int:
    """csrc/solve/solve_block.cuh, of order 64 with 64 columns."""
    return (64 + 64 + 1) * 65 * size + 4


KERNELS = {
    "ridge_kernel": Kernel(
        "ridge_solve",
        "256 x (N 1,024, d 64)",
        64,
        _ridge_shared,
        256 * 1024 * 7 * 32 * 32,
        lambda dtype: ridge_work(256 * 1024, 64, 64, dtype),
    ),
    "solve_kernel": Kernel(
        *("regularised_solve", "256 x (order 64, 64 columns)", 64, _solve_shared),
        256 * (64**3 / 6 + 64**2 * 64),
        lambda dtype: solve_work(256, 64, 64, dtype),
        ("float32", "float64"),
    ),
    "attention_step_kernel": Kernel("continual_attention_step", "n 64, d 64, a block a head", 64, _step_shared(64, 0)),
    "nystrom_step_kernel": Kernel("continual_nystrom_step", "m 16, n 64, d 64, a block a head", 64, _step_shared(64, 16)),
}
"""`ridge_kernel` forms 7 patches of 32 x 32 sums of the 8 of its panel."""


class Compiled(NamedTuple):
    """One kernel on GPUs of one capability, as the build reported it."""

    kernel: str
    dtype: str
    capability: int
    registers: int
    spilled: int
    mangled: str
    target: str


def case(name: str, dtype: str) -> Case:
    kernel = KERNELS[name]
    return Case(kernel.operator, "in CUDA", kernel.shape, dtype, kernel.width, None, kernel.work and kernel.work(dtype))


def cases_of(name: str) -> list[Case]:
    return [case(name, dtype) for dtype in KERNELS[name].dtypes]


def cases() -> list[Case]:
    return [one for name in KERNELS for one in cases_of(name)]


def compiler() -> str | None:
    """The version of nvcc; None where the package was built without it."""
    report = build_report()["cuda"]
    return report["compiler"] if report["built"] else None


def compiled() -> list[Compiled]:
    found = []
    for one in build_report()["cuda"].get("kernels", []):
        if one["target"] not in CAPABILITIES:  # a GPU of which no figures are kept
            continue
        name, dtype = re.search(r"(?<=\d)([a-z]+(?:_[a-z]+)*_kernel)I(\w+?)E?EvNS", one["kernel"]).groups()
        dtype = next(readable for mangled, readable in DTYPES.items() if dtype in (mangled, mangled.removesuffix("E")))
        figures = one["registers"], one["stores"] + one["loads"], one["kernel"], one["target"]
        found += [Compiled(name, dtype, capability, *figures) for capability in CAPABILITIES[one["target"]]]
    return found


def disassembled() -> dict[tuple[str, str], str]:
    """(kernel's mangled name, target) -> its machine code."""
    (library,) = Path(cmab_kernels.__file__).parent.glob("_cuda*.so")
    found, target = {}, ""
    for part in re.split(r"(?m)^(?=arch = |\t\tFunction : )", cuobjdump("--dump-sass", library)):
        if part.startswith("arch = "):
            target = part.split()[2]
        elif part.startswith("\t\tFunction : "):
            found[part.split()[2], target] = part
    return found
