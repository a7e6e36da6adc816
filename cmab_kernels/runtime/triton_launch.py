# mypy: disable-error-code="no-untyped-def"
"""Common parts of all Triton launches: requirements on the GPU, the launch itself, alignment, and kinds of products."""

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import mangle_type

from .dtypes import allows_tf32 as allows_tf32  # for the launch functions of all sets
from .tracing import traced_as_constant

WIDEST = 256
MOST_ROWS = 2**31 - 2**24
"""The largest number of queries or keys: the ends of runs and tiles, which may be beyond the last row, must fit in 32
bits."""

OLDEST = (3, 6)
"""The oldest Triton that compiles the kernels, which need tuples as arguments, and loops from which nothing is
moved."""

if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST:
    raise ImportError(
        f"the Triton kernels need Triton {'.'.join(map(str, OLDEST))} or newer, and this is {triton.__version__}"
    )

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs the kernels; Triton decides this for the whole process when it is imported."""


# ---- on the host


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """The reason why Triton's kernels cannot run these inputs, as a phrase; None if they can."""
    *_, keys, width = key.shape
    if width > WIDEST or value.shape[-1] > WIDEST:
        return f"its heads are at most {WIDEST} wide"
    if keys > MOST_ROWS or query.shape[-2] > MOST_ROWS:
        return "it counts queries and keys in 32 bits"
    return device_problem(query)


def device_problem(tensor: Tensor) -> str | None:
    """The reason why Triton cannot run on this tensor's device, as a phrase; None if it can."""
    return _gpu_problem(tensor.device.index) if tensor.is_cuda else _interpreter_problem(tensor)


def _interpreter_problem(query: Tensor) -> str | None:
    if query.device.type != "cpu" or not INTERPRETED:
        return (
            f"it needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1), and the inputs are on {query.device.type}"
        )
    return "Triton's interpreter computes bfloat16 wrongly" if query.dtype == torch.bfloat16 else None


@traced_as_constant
def _gpu_problem(index: int | None) -> str | None:
    return _problem_of_gpu(index)


@cache
def _problem_of_gpu(index: int | None) -> str | None:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(index)
    return None if major >= 8 else f"it needs compute capability 8.0, and the GPU has {major}.{minor}"


_HERE = nullcontext()


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which Triton launches kernels on the tensor's GPU, on its current stream."""
    return (
        _HERE
        if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device()
        else torch.cuda.device(tensor.device)
    )


class Kernel:
    """A Triton kernel that is compiled once for each combination of constants and dtypes, and then called directly.

    Its arguments are tensors or None, then numbers, then constants. Each number, or tuple of numbers, is annotated with
    its type, which does not depend on its value. In contrast, Triton's own launch compiles again for a number that is
    1, or a multiple of 16, or beyond 32 bits. It also takes five times as long on the host.
    """

    def __init__(self, function: Callable[..., None], anywhere: tuple[str, ...]) -> None:
        self.jit = triton.jit(function)
        self.__name__ = function.__name__
        self.constants: dict[str, Any] = {}
        self._anywhere = anywhere
        self._tensors = sum(
            p.annotation is inspect.Parameter.empty for p in inspect.signature(function).parameters.values()
        )
        self._typed = False
        self._given: dict[tuple[Any, ...], Kernel] = {}
        self._compiled: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...]]] = {}

    def given(self, dtype: torch.dtype | None = None, **constants: Any) -> "Kernel":
        """This kernel with fixed constants. Its calls do not pass them, and the host does not check them again.

        Equal constants give the same object. If the types of all tensors follow from `dtype`, calls do not check them
        either.
        """
        key = (dtype, *constants.items())
        if key not in self._given:
            self._given[key] = kernel = copy(self)
            kernel._typed = dtype is not None
            kernel.constants, kernel._given, kernel._compiled = self.constants | constants, {}, {}
        return self._given[key]

    def __call__(self, programs: int, *arguments: Any, **constants: Any) -> None:
        """Run this number of programs on the current device. `constants` are the kernel's own constants and Triton's
        options."""
        if INTERPRETED:
            self.jit[(programs,)](*arguments, **self.constants, **constants)
            return
        active = driver.active
        device = active.get_current_device()
        tensors = arguments[: self._tensors]
        types = () if self._typed else [t if t is None else t.dtype for t in tensors]
        key = (device, *constants.values(), *types)
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = self._load(active.get_current_target(), arguments, self.constants | constants)
        launch, function, rest = found
        addresses = [t if t is None else t.data_ptr() for t in tensors]  # for a tensor, `launch` would ask the driver
        launch(
            programs, 1, 1, active.get_current_stream(device), *function, *addresses, *arguments[self._tensors :], *rest
        )

    def _load(self, target: GPUTarget, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """The function that launches the compiled kernel, and the values that it needs before and after `arguments`."""
        source, options = self.source(*arguments, **constants)
        compiled = compiled_kernel(source, target, options)
        launcher = compiled.run  # loads the kernel
        assert not launcher.global_scratch_size, "no kernel takes memory beside its arguments"
        loaded = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
        scratch, hooks = (None, None), (compiled.packed_metadata, None, None, None)
        rest = tuple(constants[name] for name in self.jit.arg_names[len(arguments) :])
        if not hasattr(launcher, "kernel_signature"):  # Triton 3.6 has a launcher compiled for this kernel
            return launcher.launch, (*loaded, *scratch, *hooks), rest
        before = (*loaded, *hooks, *scratch, launcher.arg_annotations, launcher.kernel_signature)
        return _gathering(launcher.launch, len(before) + 4), before, rest

    def source(self, *arguments: Any, **constants: Any) -> tuple[ASTSource, dict[str, Any]]:
        """The kernel with the types of these arguments, and the options that it is compiled with."""
        values = {**dict(zip(self.jit.arg_names, arguments, strict=False)), **constants}
        signature = {
            p.name: "constexpr" if p.is_constexpr else _type(values[p.name], p.annotation) for p in self.jit.params
        }
        constexprs = {name: values[name] for name, kind in signature.items() if kind == "constexpr"}
        aligned = [
            p.num for p in self.jit.params if str(signature[p.name]).startswith("*") and p.name not in self._anywhere
        ]
        options = {name: value for name, value in constants.items() if name not in signature}
        return ASTSource(
            self.jit, signature, constexprs, {(number,): [["tt.divisibility", 16]] for number in aligned}
        ), options


_HOPPER = GPUTarget("cuda", 90, 32)
_LOSES_DESCRIPTORS = (12, 8)
"""The ptxas that Triton 3.6 uses for Hopper, and older versions, have this bug."""
_PTX = 88
"""The PTX version of the ptxas that Triton uses for Blackwell.

ptxas 12.8 cannot read this version. So every entry of Triton's cache with this version was compiled
by the newer ptxas.
"""
_compiling = Lock()


def compiled_kernel(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Any:
    """`triton.compile`, on Hopper with the newer ptxas that Triton includes for Blackwell.

    ptxas 12.8 drops the definitions of some descriptors if tiles of two layouts use the same address of shared memory.
    Then products are wrong, or the address is illegal (cmab_kernels/testing/descriptors.py).
    """
    knobs = triton.knobs.nvidia
    if target != _HOPPER or tuple(map(int, knobs.ptxas.version.split("."))) > _LOSES_DESCRIPTORS:
        return triton.compile(source, target=target, options=options)
    with _compiling, knobs.scope():
        knobs.ptxas = knobs.ptxas_blackwell.path
        return triton.compile(source, target=target, options=options | {"ptx_version": _PTX})


def _gathering(launch: Callable[..., None], first: int) -> Callable[..., None]:
    """Return `launch`, which takes a tuple of kernel arguments, as a function that takes the arguments from `first` on
    one by one."""
    return lambda *arguments: launch(*arguments[:first], arguments[first:])


def _type(value: Any, annotation: str) -> Any:
    """The type of an argument in a signature: a tuple for a tuple, a pointer for a tensor, a constant for None."""
    if isinstance(value, tuple):
        return tuple(_type(item, annotation) for item in value)
    return "constexpr" if value is None else annotation or mangle_type(value)


def kernel(*anywhere: str) -> Callable[[Callable[..., None]], Kernel]:
    """A decorator that makes a function a `Kernel`.

    `anywhere` names the caller's tensors, which may start at any address. The others are allocated for the call and
    start at multiples of 16 bytes.
    """
    return lambda function: Kernel(function, anywhere)


class Products(NamedTuple):
    """How matrices are multiplied: the dtype of the operands, and the `input_precision` of `tl.dot`."""

    operand: torch.dtype
    precision: str

    @property
    def input_precision(self) -> str:
        """The `input_precision` for `product`.

        It is "ieee" in the interpreter, which does not know bf16x6 and always multiplies exactly.
        """
        return "ieee" if INTERPRETED and self.precision == "bf16x6" else self.precision

    @property
    def kind(self) -> str:
        """The kind of product, which decides block sizes: "half", "double", or for float32 its precision."""
        return {torch.bfloat16: "half", torch.float16: "half", torch.float64: "double"}.get(
            self.operand, self.precision
        )


def alignment(*tensors: Tensor) -> tuple[int, ...]:
    """The alignment that kernels may assume: the columns of a row are contiguous, and rows start at multiples of this
    number of elements.

    It is the `natural_alignment` if tensors are contiguous. If one tensor has other strides, it is 0 for all tensors:
    then kernels assume no alignment of any tensor. So a kernel is compiled for two cases, not for every combination of
    strides.
    """
    return (
        tuple([natural_alignment(t.dtype, t.shape[-1]) for t in tensors])
        if is_aligned(*tensors)
        else (0,) * len(tensors)
    )


@cache
def natural_alignment(dtype: torch.dtype, width: int) -> int:
    """The largest power of two, in elements and up to 16 bytes, that divides the width of a row."""
    return math.gcd(width, 16 // dtype.itemsize)


def is_aligned(*tensors: Tensor) -> bool:
    """Whether rows of all tensors start at multiples of `natural_alignment`, with contiguous columns."""
    return all(map(_has_aligned_rows, tensors))


def _has_aligned_rows(tensor: Tensor) -> bool:
    address = tensor.data_ptr()
    if address % 16 == 0 and tensor.is_contiguous():
        return True
    *strides, column = tensor.stride()
    # This is true for slices of contiguous tensors.
    if address % 16 == 0 and column == 1 and math.gcd(*strides) * tensor.element_size() % 16 == 0:
        return True
    elements = natural_alignment(tensor.dtype, tensor.shape[-1])
    if address % (elements * tensor.element_size()):
        return False
    *strides, column = [
        stride if size > 1 else 0 for size, stride in zip(tensor.shape, (*strides, column), strict=True)
    ]
    return column <= 1 and math.gcd(*strides) % elements == 0


def mask_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return getattr(tl, str(dtype).removeprefix("torch."))


# ---- in kernels
