"""Properties of compiled Triton kernels (registers, spills, shared memory, matrix instructions), found without a GPU.

`record` collects the kernel launches of a call on CPU tensors without running them. `machine_code` compiles a launch as
`Kernel` would. `compiled` returns the figures of the machine code. This module needs Triton.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget

from ..runtime.backends import IMPLEMENTATIONS
from ..runtime.tiles import forget
from ..runtime.triton_launch import Kernel, compiled_kernel
from .descriptors import lost_descriptors

SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Compute capability -> the bytes of shared memory that one block may have (CUDA C++ Programming Guide, technical
specifications)."""

SPILLS = 0.005
"""The largest allowed share of instructions that access local memory. ptxas spills a few values to fit one more block
on a multiprocessor."""

TENSOR_COLUMNS = 512
"""The columns of tensor memory of a multiprocessor of sm_100. A block that needs more cannot be launched."""

_CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"


class Launch(NamedTuple):
    """One launch of a Triton kernel: the kernel, its grid, its tensors, and by name its numbers, its constants and
    Triton's options."""

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


class MachineCode(NamedTuple):
    """The machine code of a launch.

    The fields are: registers per thread; bytes of shared memory, columns of tensor memory, and warps per block; the
    disassembly; and `ttir`, Triton's first intermediate representation of the kernel."""

    registers: int
    shared: int
    tensor_columns: int
    warps: int
    sass: str
    ttir: str


class Figures(NamedTuple):
    """Numbers of a launch's machine code. `local` counts the instructions that access local memory, which holds spilled
    registers."""

    kernel: str
    capability: int
    registers: int
    shared: int
    tensor_columns: int
    local: int
    matrix: int
    instructions: Counter[str]
    ttir: str
    lost: list[str]
    """Matrix instructions of Hopper whose descriptors hold no address."""

    def count(self, *names: str) -> int:
        """Return the number of instructions whose name starts with one of `names`: `FFMA`, `MUFU.EX2`, ..."""
        return sum(count for name, count in self.instructions.items() if name.startswith(names))

    def __str__(self) -> str:
        matrix = next((name for name in ("UTCHMMA", "UTCQMMA", "HGMMA", "HMMA", "DMMA") if self.count(name)), "none")
        return (
            f"{self.kernel:14} sm_{self.capability:<4} registers {self.registers:3}  shared {self.shared / 1024:5.1f} "
            "KiB  "
            f"local {self.local:3}  matrix {self.matrix:3} ({matrix})  ex2 {self.count('MUFU.EX2'):3}  ffma "
            f"{self.count('FFMA'):4}  "
            f"all {self.instructions.total()}"
        )


@contextlib.contextmanager
def as_if_on(capability: int) -> Iterator[None]:
    """Within this context, block sizes are chosen as on a GPU of this compute capability (80, 86, 89, 90, 100 or
    120)."""

    def capability_of(_: object) -> tuple[int, int]:
        return divmod(capability, 10)

    # Import before the patch: a module that is imported later would keep the patched function.
    for operator_set in IMPLEMENTATIONS.values():
        if "triton" in operator_set:
            importlib.import_module(operator_set["triton"])
    ours = [
        module
        for name, module in sys.modules.items()
        if name.startswith("cmab_kernels.") and hasattr(module, "capability_of")
    ]
    with contextlib.ExitStack() as patched:
        for module in ours:
            patched.enter_context(mock.patch.object(module, "capability_of", capability_of))
        patched.callback(forget)
        forget()
        yield


def record(call: Callable[[], Any]) -> list[Launch]:
    """Return the Triton launches of `call` in order, without running them."""
    launches: list[Launch] = []

    def keep(self: Kernel, programs: int, *args: Any, **options: Any) -> None:
        tensors = tuple(value for value in args if value is None or isinstance(value, torch.Tensor))
        numbers = dict(zip(self.jit.arg_names[len(tensors) :], args[len(tensors) :], strict=False))
        launches.append(Launch(self, (programs,), tensors, {**numbers, **self.constants, **options}))

    forget()  # choices must use the functions that a test has replaced
    with mock.patch.object(Kernel, "__call__", keep):
        call()
    forget()
    return launches


def machine_code(launch: Launch, capability: int, folder: Path) -> MachineCode:
    """Compile a launch for one compute capability, and write the object file into `folder`."""
    code, options = launch.kernel.source(*launch.args, **launch.options)
    kernel = compiled_kernel(code, GPUTarget("cuda", capability, 32), options)
    cubin = folder / f"{launch.kernel.__name__}.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    registers = re.findall(r"REG:(\d+)", cuobjdump("--dump-resource-usage", cubin))[-1]
    sass = cuobjdump("--dump-sass", cubin)
    made = kernel.metadata
    return MachineCode(int(registers), made.shared, made.tmem_size or 0, made.num_warps, sass, kernel.asm["ttir"])


def compiled(launch: Launch, capability: int, folder: Path) -> Figures:
    """Compile a launch for one compute capability, write the object file into `folder`, and return the figures."""
    code = machine_code(launch, capability, folder)
    instructions = Counter(
        re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)", code.sass, re.M),
    )
    return Figures(
        launch.kernel.__name__.strip("_"),
        capability,
        code.registers,
        code.shared,
        code.tensor_columns,
        sum(count for name, count in instructions.items() if name.split(".")[0] in ("LDL", "STL")),
        sum(count for name, count in instructions.items() if "MMA" in name.split(".")[0]),
        instructions,
        code.ttir,
        lost_descriptors(code.sass),
    )


def faults(figures: Figures, matrix: bool, spills: float = SPILLS) -> list[str]:
    """Return the faults of a kernel, as sentences.

    `matrix` says that the matrix units must compute its products. `spills` is the share of its instructions that may
    access local memory."""
    found = []
    if figures.local > spills * figures.instructions.total():
        found.append(f"{figures.local} instructions go to local memory: registers were spilled")
    if figures.shared > SHARED_LIMIT[figures.capability]:
        found.append(f"{figures.shared} bytes of shared memory, and a block has {SHARED_LIMIT[figures.capability]}")
    if figures.tensor_columns > TENSOR_COLUMNS:
        found.append(
            f"{figures.tensor_columns} columns of tensor memory, and a multiprocessor has {TENSOR_COLUMNS}: it cannot "
            "be launched"
        )
    if matrix and not figures.matrix:
        found.append("no matrix instruction")
    return found + figures.lost + narrow_offsets(figures.ttir)


def narrow_offsets(ttir: str) -> list[str]:
    """Return the operations that compute tiles of offsets in 32 bits, as sentences. Such offsets overflow from 2**31
    elements on."""
    operation = r"%\S+, %\S+(?: \{[^}]*\})? : "
    narrow = re.findall(
        rf"tt\.addptr {operation}[^,]*, tensor<[0-9x]+xi32>|arith\.muli {operation}tensor<[0-9x]+xi32>", ttir
    )
    return [f"32-bit offsets: {line}" for line in narrow]


def cuobjdump(*arguments: object) -> str:
    """Run the `cuobjdump` that comes with Triton with these arguments, and return its output. It reads nvcc's files as
    well."""
    return subprocess.run([_CUOBJDUMP, *map(str, arguments)], check=True, capture_output=True, text=True).stdout
