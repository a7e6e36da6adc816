"""The parts of a scan: a case is one operation at one shape, with all its implementations.

A scan declares its cases by a function of their sizes. The decorator `declared` makes it possible to call it in another
process, and with other sizes.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cmab_kernels
from cmab_kernels.runtime.backends import IMPLEMENTATIONS, OPERATORS

from ..devices import device, generator, lacking_memory, normal
from ..floors import Passes, Work
from ..runs import AUTO, KERNELS, Value

EAGER = "eager torch"
PACKAGE = "nystrom-attention 0.0.14"
CONTINUAL_INFERENCE = "continual-inference 1.2.4"
FLASH = "flash-attention"
FLASHINFER = "flashinfer"
MODULES = {
    PACKAGE: "nystrom_attention",
    CONTINUAL_INFERENCE: "continual",
    FLASH: "flash_attn",
    FLASHINFER: "flashinfer",
}
"""Peer from a package -> the module that it is imported as."""
INSTALLED_AS = {FLASH: "flash-attn", FLASHINFER: "flashinfer-python"}
"""Peer from a package -> the package's name, where the peer's name does not begin with it."""

COMPILED = ", compiled"
"""Last part of the names of what `torch.compile` made."""
IN_TF32 = ", tf32"
"""Part of the names of implementations that may multiply float32 in tf32."""

COLD_BYTES = 2**28
"""Calls cycle through copies of the inputs with this total size, so that data are read from memory and not from a
cache."""

DTYPES = (torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that are measured in addition to float32."""

Results = Sequence[Tensor]
Implementation = Callable[[Any], Results]
"""A function of a case's inputs that returns its results."""


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled as one graph for a shape.

    After eight shapes torch runs a function as it is. As one graph, that is an error, so a row cannot be eager torch
    under another name. `harness.measure` forgets the shapes of earlier cases. A separate worker process would outlive
    the process in which memory is measured, so code is compiled in this process.
    """
    from torch._inductor import config

    config.compile_threads = 1
    return torch.compile(function, fullgraph=True, dynamic=False)


def everything_runs(implementation: str) -> str | None:
    """The refusal of a case in which every implementation is accepted."""
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One operation at one shape: a group of rows, which are timed in turn."""

    scan: str
    """The measured public operator or module."""
    name: str
    sizes: Mapping[str, Value]
    """The sizes and choices that matter to the operator, by the letters of the formulas:
    a plot goes along one of them."""
    inputs: Callable[[int], Any]
    """Seed -> a tuple with the tensors that the implementations take."""
    implementations: Mapping[str, Implementation]
    oracle: Callable[[Any], Results | Mapping[str, Results]]
    """Inputs -> the results in float64, computed in another way; by name if implementations compute different
    things."""
    baselines: tuple[str, ...]
    """Ratios are to the fastest of these implementations."""
    others: tuple[str, ...] = ()
    """Implementations that compute something else: shown for comparison, without a share of the floor."""
    work: Passes | None = None
    """The work that a result needs, for one step if a call does several steps; None if a floor has no meaning."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Implementation -> the number of steps of one call, if it is not one."""
    counted: Mapping[str, str] = field(default_factory=dict)
    """A compiled implementation -> one with the same products, which can be counted."""
    uncaptured: tuple[str, ...] = ()
    """Peers that must not be captured in a CUDA graph, because torch's batched factorisations (MAGMA) then end the
    process."""
    refusal: Callable[[str], str | None] = everything_runs
    """Implementation -> why it cannot be measured here; None if it can."""
    smaller: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the same case on little data; calling it starts thread pools and loads libraries."""
    dtype: torch.dtype = torch.float32
    threads: int | None = None
    """None means the number of threads of the run."""
    quick: bool = False
    """Whether a quick run has it, too."""
    made_by: Callable[..., Case] = field(default=lambda: NotImplemented, repr=False)

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[..., Case], tuple[()]]:
        return self.made_by, ()

    @property
    def parameters(self) -> Mapping[str, Value]:
        return {**self.sizes, "dtype": dtype_name(self.dtype), "threads": self.threads or torch.get_num_threads()}

    def expected(self, inputs: Any) -> dict[str, Results]:
        """Implementation -> its results in float64."""
        found = self.oracle(inputs)
        return {name: found[name] if isinstance(found, Mapping) else found for name in self.implementations}

    def varied(self, **arguments: Any) -> Case:
        """The same operation with other sizes or choices."""
        return self.made_by(**arguments)

    def small(self) -> Case:
        return self.varied(**self.smaller)


def declared(threads: int | None = 1) -> Callable[[Callable[..., Case]], Callable[..., Case]]:
    """Let a function that builds a case also take `threads` and `quick`, and remember its arguments.

    The usual `threads` are given here. An argument `dtype` is also the dtype of the case.
    """
    usual = threads

    def decorate(build: Callable[..., Case]) -> Callable[..., Case]:
        signature = inspect.signature(build)

        @functools.wraps(build)
        def made(*args: Any, threads: int | None = usual, quick: bool = False, **kwargs: Any) -> Case:
            arguments = signature.bind(*args, **kwargs).arguments
            case = build(**arguments)
            name = case.name if threads == usual else f"{case.name}-{threads}-thread{'' if threads == 1 else 's'}"
            again = partial(made, threads=threads, quick=quick, **arguments)
            return replace(
                case, name=name, threads=threads, quick=quick, dtype=arguments.get("dtype", case.dtype), made_by=again
            )

        return made

    return decorate


# ---- what cases have in common ---------------------------------------------------------------------------------------


def kernels(operator: str, definition: bool = True) -> tuple[str, ...]:
    """Implementations of a public operator for the measured device, and its definition; "auto" first if there is a
    choice."""
    found = tuple(name for name in KERNELS[device()] if name in IMPLEMENTATIONS[OPERATORS[operator]])
    found = (AUTO, *found) if len(found) > 1 else found
    return (*found, "reference") if definition else found


def refusing(
    operator: str, *shapes: Sequence[int], dtype: torch.dtype = torch.float32, memory: float = 0.0
) -> Callable[[str], str | None]:
    """The refusal of a case: an implementation of `operator` that does not support such tensors, a package that is not
    installed, or less free memory than `memory` bytes."""

    def refusal(implementation: str) -> str | None:
        tensors = [torch.empty(shape, dtype=dtype, device=device()) for shape in shapes]
        reasons = {row.impl: row.reason for row in cmab_kernels.explain(operator, *tensors) if not row.usable}
        return missing(implementation) or reasons.get(implementation.split(",")[0]) or lacking_memory(memory)

    return refusal


def missing(implementation: str) -> str | None:
    """Return a report if an implementation comes from a package that is not installed."""
    if implementation in MODULES and importlib.util.find_spec(MODULES[implementation]) is None:
        return f"not installed: pip install {INSTALLED_AS.get(implementation, implementation.split(' ')[0])}"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a peer computes with half-precision operands, so that its result is right."""
    return dtype if dtype.itemsize >= 4 else torch.float32


def identity(like: Tensor) -> Tensor:
    """The identity matrix that can be added to `like`."""
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def doubled(inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Copies in float64 that require gradients if the inputs do."""
    return tuple(part.detach().double().requires_grad_(part.requires_grad) for part in inputs)


def moved(size: int, dtype: str) -> Work | None:
    """Work that consists only of bytes; None if a cache may hold them from one call to the next."""
    return Work(bytes=size, dtype=dtype) if size >= COLD_BYTES // 8 else None


class Operands(NamedTuple):
    """The inputs of a layer."""

    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor
    """Gradient of the output; empty without a backward."""


def drawn(seed: int, *shapes: Sequence[int], backward: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Operands of these shapes, which require gradients for a backward pass, and the gradient of an output with the
    shape of the first operand. Without a backward pass, this gradient is empty."""
    random = generator(seed)
    operands = [normal(random, *shape, dtype=dtype, grad=backward) for shape in shapes]
    return [*operands, normal(random, *(shapes[0] if backward else (0,)), dtype=dtype)]


def direction(backward: bool) -> str:
    """The value of the parameter `pass`."""
    return "forward + backward" if backward else "forward"


def way(backward: bool) -> str:
    """The same value as a part of a name."""
    return direction(backward).replace(" ", "")


def passes(function: Callable[..., Any], operands: int, backward: bool) -> Implementation:
    """An implementation that passes the first inputs to `function`, as many as it takes.

    With a backward pass, it returns the results and then their gradients. The incoming gradients of the results are the
    remaining inputs.
    """

    def run(inputs: Results) -> Results:
        given, douts = inputs[:operands], inputs[operands:]
        outs = function(*given)
        outs = (outs,) if isinstance(outs, Tensor) else tuple(outs)
        if not backward:
            return outs
        return *(out.detach() for out in outs), *torch.autograd.grad(outs, given, douts[: len(outs)])

    return run


def operator(
    functions: Mapping[str, Callable[..., Any]],
    exact: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    operands: int,
    backward: bool = False,
    implementations: Mapping[str, Implementation] | None = None,
    **declared: Any,
) -> Case:
    """A case whose implementations are functions of the first inputs; with a backward pass, autograd differentiates
    them.

    `exact`: the right result, by name if the name differs; it gets the inputs in float64. `implementations`: further
    ones.
    """
    run = partial(passes, operands=operands, backward=backward)
    every = {name: run(function) for name, function in functions.items()} | dict(implementations or {})

    def oracle(inputs: Any) -> Mapping[str, Results]:
        meant = exact if isinstance(exact, Mapping) else dict.fromkeys(every, exact)
        found = {function: run(function)(doubled(inputs)) for function in set(meant.values())}
        return {name: found[function] for name, function in meant.items()}

    return Case(implementations=every, oracle=oracle, **declared)
