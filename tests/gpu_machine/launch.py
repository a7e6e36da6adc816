"""Triton's launches go to the machine: within `on_machine`, operators run their Triton kernels on tensors on the CPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from cmab_kernels.testing.cubin import Launch, as_if_on, source

from .machine import Machine

FORMATS = {"i1": "<?", "i8": "<b", "u8": "<B", "i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "fp32": "<f", "fp64": "<d"}
WARP = 32


@contextmanager
def on_machine(machine: Machine) -> Iterator[None]:
    """Within this context launches of Triton kernels are executed by the machine, and `Tensor.new_empty` gives memory nobody wrote."""
    plain = Tensor.new_empty

    def new_empty(like: Tensor, *arguments: Any, **options: Any) -> Tensor:
        made = plain(like, *arguments, **options)
        machine.memory.give(made, "a result", written=False)
        return made

    def run(self: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        execute(machine, Launch(self, grid, args, options))

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(Tensor, "new_empty", new_empty))
        patched.enter_context(mock.patch.object(JITFunction, "run", run))
        patched.enter_context(as_if_on(80))
        yield


def execute(machine: Machine, launch: Launch) -> None:
    """Compile a launch for compute capability 8.0, and execute its PTX."""
    code, options = source(launch, 80)
    compiled = triton.compile(code, target=GPUTarget("cuda", 80, WARP), options=options)
    values = {**dict(zip(launch.kernel.arg_names, launch.args, strict=False)), **launch.options}
    parameters = [packed for name, kind in code.signature.items() for packed in _packed(machine, name, kind, values.get(name))]
    made = compiled.metadata
    if made.global_scratch_size or made.profile_scratch_size:
        raise NotImplementedError("a kernel with scratch memory of Triton's own")
    parameters += [bytes(8), bytes(8)]  # the two pointers to scratch memory
    machine.launch(compiled.asm["ptx"], made.name, launch.grid, made.num_warps * WARP, made.shared, parameters)


def _packed(machine: Machine, name: str, kind: Any, value: Any) -> Iterator[bytes]:
    """Yield the bytes of an argument as the kernel takes it; tuples become several parameters, constants none."""
    if isinstance(kind, tuple):
        for number, (inner, part) in enumerate(zip(kind, value, strict=True)):
            yield from _packed(machine, f"{name}[{number}]", inner, part)
    elif isinstance(value, Tensor) and kind != "constexpr":
        machine.memory.give(value, name)
        yield struct.pack("<Q", value.data_ptr())
    elif kind != "constexpr":
        yield struct.pack(FORMATS[kind], value)
