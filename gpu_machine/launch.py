"""Triton's launches run on the machine: within `on_machine`, operators run their Triton kernels on tensors on the
CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cmab_kernels.runtime.triton_launch import Kernel

from .driver import Launched, stub
from .machine import Machine
from .parse import parse


@contextmanager
def on_machine(machine: Machine) -> Iterator[None]:
    """Within this context Triton's kernels are compiled for compute capability 8.0 and executed by the machine.

    The kernels may access the tensors with which they are called. The memory that `torch.empty` and similar functions
    return counts as unwritten.
    """
    stops: list[BaseException] = []

    def run(launched: Launched) -> None:
        if not stops:
            try:
                _execute(machine, launched)
            except Exception as stop:  # an exception must not pass through the driver, which is written in C
                stops.append(stop)

    def call(kernel: Kernel, programs: int, *arguments: Any, **constants: Any) -> None:
        for name, value in zip(kernel.jit.arg_names, arguments, strict=False):
            if isinstance(value, Tensor):
                machine.memory.give(value, name)
        plain_call(kernel, programs, *arguments, **constants)
        if stops:
            raise stops.pop()

    plain_call = Kernel.__call__
    with ExitStack() as patched:
        patched.enter_context(stub(80, run))
        patched.enter_context(mock.patch.object(Kernel, "__call__", call))
        patched.enter_context(fresh_memory(machine))
        yield


@contextmanager
def fresh_memory(machine: Machine) -> Iterator[None]:
    """Within this context, the memory that `torch.empty` and similar functions return belongs to the machine and counts
    as unwritten."""

    def given(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, **options: Any) -> Tensor:
            tensor = plain(*arguments, **options)
            machine.memory.give(tensor, "a result", written=False)
            return tensor

        return made

    with ExitStack() as patched:
        for owner, name in ((Tensor, "new_empty"), (torch, "empty"), (torch, "empty_like")):
            patched.enter_context(mock.patch.object(owner, name, given(getattr(owner, name))))
        yield


def _execute(machine: Machine, launched: Launched) -> None:
    """Pass a launch to the machine as the driver sees it; the PTX gives the number of bytes of each parameter."""
    text = launched.ptx.read_text()
    ((name, kernel),) = parse(text).items()
    sizes = kernel.parameters.values()
    parameters = [ctypes.string_at(launched.parameters[number], size) for number, size in enumerate(sizes)]
    machine.launch(text, name, launched.grid, launched.threads, launched.shared, parameters)
