# mypy: disable-error-code="no-untyped-def"
"""Helpers that all Triton kernels share: requirements on the GPU, loads with any strides, matrix products, runs of keys."""

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

from .dtypes import allows_tf32 as allows_tf32  # for the launchers of all sets
from .tracing import traced_as_constant

WIDEST = 256
MOST_ROWS = 2**31 - 2**24
"""The most queries or keys: the ends of runs and tiles, which may lie beyond the last row, must fit in 32 bits."""

OLDEST = (3, 6)
"""The oldest Triton that compiles the kernels. Their arguments are tuples, and from some loops nothing may be moved."""

if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST:
    raise ImportError(f"the Triton kernels need Triton {'.'.join(map(str, OLDEST))} or newer, and this is {triton.__version__}")

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs the kernels, which Triton decides for the whole process when it is imported."""

GRAIN = tl.constexpr(1024)
"""The least number of keys in a run, except the last of a set: shorter ones are not worth a partial result."""


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
    """The reason why Triton runs nothing where this tensor is, as a phrase; None if it can."""
    return _gpu_problem(tensor.device.index) if tensor.is_cuda else _interpreter_problem(tensor)


def _interpreter_problem(query: Tensor) -> str | None:
    if query.device.type != "cpu" or not INTERPRETED:
        return f"it needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1), and the inputs are on {query.device.type}"
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
    return _HERE if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device() else torch.cuda.device(tensor.device)


class Kernel:
    """A Triton kernel that is compiled once for each combination of constants and dtypes, and then called directly.

    Its arguments are tensors or None, then numbers, then constants. A number, or a tuple of numbers, is annotated with its type, whatever
    its value: Triton's own launch compiles again for a number that is 1, or a multiple of 16, or beyond 32 bits. It also takes five times
    as long on the host.
    """

    def __init__(self, function: Callable[..., None], anywhere: tuple[str, ...]) -> None:
        self.jit = triton.jit(function)
        self.__name__ = function.__name__
        self.constants: dict[str, Any] = {}
        self._anywhere = anywhere
        self._tensors = sum(p.annotation is inspect.Parameter.empty for p in inspect.signature(function).parameters.values())
        self._typed = False
        self._given: dict[tuple[Any, ...], Kernel] = {}
        self._compiled: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...]]] = {}

    def given(self, dtype: torch.dtype | None = None, **constants: Any) -> "Kernel":
        """This kernel with constants that its calls do not name, and the host does not look at again. It is one for equal constants.

        Nor does it look at the types of tensors again if all follow from a `dtype`.
        """
        key = (dtype, *constants.items())
        if key not in self._given:
            self._given[key] = kernel = copy(self)
            kernel._typed = dtype is not None
            kernel.constants, kernel._given, kernel._compiled = self.constants | constants, {}, {}
        return self._given[key]

    def __call__(self, programs: int, *arguments: Any, **constants: Any) -> None:
        """Run this number of programs on the current device. `constants` are the kernel's own and Triton's options."""
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
        addresses = [t if t is None else t.data_ptr() for t in tensors]  # of a tensor, the launcher would ask the driver for it
        launch(programs, 1, 1, active.get_current_stream(device), *function, *addresses, *arguments[self._tensors :], *rest)

    def _load(self, target: GPUTarget, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """The function that launches the compiled kernel, and what it is to be called with before and after `arguments`."""
        source, options = self.source(*arguments, **constants)
        compiled = compiled_kernel(source, target, options)
        launcher = compiled.run  # loads the kernel
        assert not launcher.global_scratch_size, "no kernel takes memory beside its arguments"
        loaded = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
        scratch, hooks = (None, None), (compiled.packed_metadata, None, None, None)
        rest = tuple(constants[name] for name in self.jit.arg_names[len(arguments) :])
        if not hasattr(launcher, "kernel_signature"):  # Triton 3.6: a launcher compiled for this kernel
            return launcher.launch, (*loaded, *scratch, *hooks), rest
        before = (*loaded, *hooks, *scratch, launcher.arg_annotations, launcher.kernel_signature)
        return _gathering(launcher.launch, len(before) + 4), before, rest

    def source(self, *arguments: Any, **constants: Any) -> tuple[ASTSource, dict[str, Any]]:
        """The kernel with the types of these arguments, and the options that it is compiled with."""
        values = {**dict(zip(self.jit.arg_names, arguments, strict=False)), **constants}
        signature = {p.name: "constexpr" if p.is_constexpr else _type(values[p.name], p.annotation) for p in self.jit.params}
        constexprs = {name: values[name] for name, kind in signature.items() if kind == "constexpr"}
        aligned = [p.num for p in self.jit.params if str(signature[p.name]).startswith("*") and p.name not in self._anywhere]
        options = {name: value for name, value in constants.items() if name not in signature}
        return ASTSource(self.jit, signature, constexprs, {(number,): [["tt.divisibility", 16]] for number in aligned}), options


_HOPPER = GPUTarget("cuda", 90, 32)
_LOSES_DESCRIPTORS = (12, 8)
"""The ptxas that Triton 3.6 takes for Hopper, and older ones."""
_PTX = 88
"""The PTX of the ptxas that it takes for Blackwell. 12.8 cannot read it, so nothing in Triton's cache that says so was compiled by it."""
_compiling = Lock()


def compiled_kernel(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Any:
    """`triton.compile`, on Hopper with the newer ptxas that Triton brings for Blackwell.

    ptxas 12.8 drops the definitions of some descriptors where tiles of two layouts come to lie at one address of shared memory: products
    are wrong, or the address is illegal (cmab_kernels/testing/descriptors.py).
    """
    knobs = triton.knobs.nvidia
    if target != _HOPPER or tuple(map(int, knobs.ptxas.version.split("."))) > _LOSES_DESCRIPTORS:
        return triton.compile(source, target=target, options=options)
    with _compiling, knobs.scope():
        knobs.ptxas = knobs.ptxas_blackwell.path
        return triton.compile(source, target=target, options=options | {"ptx_version": _PTX})


def _gathering(launch: Callable[..., None], first: int) -> Callable[..., None]:
    """`launch`, which takes the kernel's arguments as one tuple, as a function that takes them one by one, from number `first` on."""
    return lambda *arguments: launch(*arguments[:first], arguments[first:])


def _type(value: Any, annotation: str) -> Any:
    """The type of an argument in a signature: of a tuple a tuple, of a tensor that of a pointer; None is a constant."""
    if isinstance(value, tuple):
        return tuple(_type(item, annotation) for item in value)
    return "constexpr" if value is None else annotation or mangle_type(value)


def kernel(*anywhere: str) -> Callable[[Callable[..., None]], Kernel]:
    """A decorator that makes a function a `Kernel`.

    `anywhere` names the tensors that may start at any address: those of the caller. The others, allocated for the call, start at multiples
    of 16 bytes.
    """
    return lambda function: Kernel(function, anywhere)


class Products(NamedTuple):
    """How matrices are multiplied: the dtype of the operands, and the `input_precision` of `tl.dot`."""

    operand: torch.dtype
    precision: str

    @property
    def input_precision(self) -> str:
        """The `input_precision` for `product`; "ieee" in the interpreter, which does not know bf16x6 and always multiplies exactly."""
        return "ieee" if INTERPRETED and self.precision == "bf16x6" else self.precision

    @property
    def kind(self) -> str:
        """The kind of product, by which block sizes are chosen: "half", "double", or for float32 its precision."""
        return {torch.bfloat16: "half", torch.float16: "half", torch.float64: "double"}.get(self.operand, self.precision)


def alignment(*tensors: Tensor) -> tuple[int, ...]:
    """What kernels may take for granted of each tensor: columns lie side by side, and rows start at multiples of this number of elements.

    It is that of contiguous tensors (`natural_alignment`). If one tensor has other strides, kernels take nothing for granted of any, which
    0 says: there are two programs, not as many as there are strides.
    """
    return tuple([natural_alignment(t.dtype, t.shape[-1]) for t in tensors]) if is_aligned(*tensors) else (0,) * len(tensors)


@cache
def natural_alignment(dtype: torch.dtype, width: int) -> int:
    """The largest power of two, in elements and up to 16 bytes, that divides the width of a row."""
    return math.gcd(width, 16 // dtype.itemsize)


def is_aligned(*tensors: Tensor) -> bool:
    """Whether rows of all tensors start at multiples of `natural_alignment`, with columns side by side."""
    return all(map(_has_aligned_rows, tensors))


def _has_aligned_rows(tensor: Tensor) -> bool:
    address = tensor.data_ptr()
    if address % 16 == 0 and tensor.is_contiguous():
        return True
    *strides, column = tensor.stride()
    if address % 16 == 0 and column == 1 and math.gcd(*strides) * tensor.element_size() % 16 == 0:  # slices of contiguous tensors
        return True
    elements = natural_alignment(tensor.dtype, tensor.shape[-1])
    if address % (elements * tensor.element_size()):
        return False
    *strides, column = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, (*strides, column), strict=True)]
    return column <= 1 and math.gcd(*strides) % elements == 0


def mask_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return getattr(tl, str(dtype).removeprefix("torch."))


# ---- in kernels


@triton.jit
def run_length(keys, most_runs, grain: tl.constexpr = GRAIN.value, step: tl.constexpr = 128):
    """The number of keys in a run, a multiple of every tile of keys. The host calls it as `run_length.fn`."""
    return max(grain, (keys + most_runs * step - 1) // (most_runs * step) * step)


@triton.jit
def tile_at(base, strides, batch, head, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, column=0):
    """Pointers to a tile of a (B, H, rows, columns) tensor. Offsets are 64-bit, since rows may lie 2**31 elements or more apart.

    ALIGN is what `alignment` says of the tensor; without this hint Triton loads rows element by element.
    """
    first = base + (tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1] + tl.cast(row, tl.int64) * strides[2])
    rows = tl.arange(0, ROWS).to(tl.int64) * strides[2]
    columns = column + tl.arange(0, COLUMNS)
    if ALIGN == 0:
        columns = columns.to(tl.int64) * strides[3]
    else:
        BYTES: tl.constexpr = ALIGN * base.dtype.element_ty.primitive_bitwidth // 8
        first = tl.multiple_of(first, BYTES)
        rows = tl.multiple_of(rows, ALIGN)
    return first + (rows[:, None] + columns[None, :])


@triton.jit
def rows_at(base, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, column=0):
    """Pointers to rows of a contiguous (rows, WIDTH) tensor."""
    return base + (rows.to(tl.int64)[:, None] * WIDTH + (column + tl.arange(0, COLUMNS))[None, :])


@triton.jit
def rows_from(base, row, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, column=0):
    """Pointers to ROWS rows, from `row` on, of a contiguous (rows, WIDTH) tensor."""
    rows = tl.arange(0, ROWS).to(tl.int64)
    return base + tl.cast(row, tl.int64) * WIDTH + (rows[:, None] * WIDTH + (column + tl.arange(0, COLUMNS))[None, :])


@triton.jit
def load_tile(pointers, keep, WIDTH: tl.constexpr, column=0):
    """Load a tile that starts at `column`, with zeros from column WIDTH on and in rows where `keep` is False, which are not read.

    `keep` None keeps all rows.
    """
    columns = column + tl.arange(0, pointers.shape[1])[None, :] < WIDTH
    WHOLE: tl.constexpr = WIDTH > 0 and tl.constexpr(WIDTH) % pointers.shape[1] == 0
    if keep is None:
        tile = tl.load(pointers) if WHOLE else tl.load(pointers, mask=columns, other=0.0)
    elif WHOLE:
        tile = tl.load(pointers, mask=keep[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=keep[:, None] & columns, other=0.0)
    return tile


@triton.jit
def kept_keys(mask, strides, batch, start, last, BLOCK: tl.constexpr, RAGGED: tl.constexpr):
    """Whether each key of a tile takes part, or None if all do, which avoids masked loads. Only RAGGED tiles reach beyond `last`.

    A sum over an axis of length 1 hides the load of bytes, for whose sake Triton 3.6 would fail to multiply in float64 (`as_operand`).
    """
    keys = start + tl.arange(0, BLOCK)
    keep = None
    if mask is not None:
        ignored = tl.load(mask + (tl.cast(batch, tl.int64) * strides[0] + keys.to(tl.int64) * strides[1]), mask=keys < last, other=1)
        keep = tl.sum(ignored[:, None], 1) == 0
    elif RAGGED:
        keep = keys < last
    return keep


@triton.jit
def quotient(x, y):
    """x / y rounded to nearest, where y is a number: the `/` of float32 numbers is off by up to two units in the last place."""
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, tl.full([1], y, tl.float32))


@triton.jit
def as_operand(tile, OPERAND: tl.constexpr, HIDDEN: tl.constexpr = True):
    """The tile converted to the dtype OPERAND for `tl.dot`.

    Triton 3.6 fails to multiply in float64 a tile that is visibly converted from a narrower type; a sum over an axis of length 1 hides
    the conversion. What is in float64 already is HIDDEN too, unless its kernel fares better with tiles that stay in shared memory.
    """
    if tl.float64 == OPERAND and (HIDDEN or tile.dtype != tl.float64):
        tile = tl.sum(tile.to(tl.float64)[:, :, None], 2)
    return tile.to(OPERAND)


@triton.jit
def product(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr, HIDDEN: tl.constexpr = True):
    """The matrix product of two tiles, which are converted to OPERAND (`as_operand`); "tf32x3" multiplies float32 in two parts each."""
    if PRECISION == "tf32x3":
        a_high, a_low = parts(a)
        b_high, b_low = parts(b)
        result = product_of_parts(a_high, a_low, b_high, b_low)
    else:
        result = tl.dot(as_operand(a, OPERAND, HIDDEN), as_operand(b, OPERAND, HIDDEN), input_precision=PRECISION)
    return result


@triton.jit
def product_of_wide(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr, HIDDEN: tl.constexpr = True):
    """`product`, but that a tile which is wider than OPERAND, a half type, is multiplied in parts: what it is rounded to, and the rest.

    Two parts hold 22 bits in float16, and three hold all 24 in bfloat16. An infinity has NaNs for its rest, as in `product_of_parts`.
    """
    if a.dtype.primitive_bitwidth > OPERAND.primitive_bitwidth:
        high, middle, low = _half_parts(a, OPERAND)
        rest = tl.dot(middle, b, tl.dot(low, b)) if tl.bfloat16 == OPERAND else tl.dot(middle, b)
        result = tl.dot(high, b, tl.where(rest > -3.4e38, rest, -3.4e38))
    elif b.dtype.primitive_bitwidth > OPERAND.primitive_bitwidth:
        high, middle, low = _half_parts(b, OPERAND)
        rest = tl.dot(a, middle, tl.dot(a, low)) if tl.bfloat16 == OPERAND else tl.dot(a, middle)
        result = tl.dot(a, high, tl.where(rest > -3.4e38, rest, -3.4e38))
    else:
        result = product(a, b, OPERAND, PRECISION, HIDDEN)
    return result


@triton.jit
def _half_parts(x, OPERAND: tl.constexpr):
    """Three numbers of a half type that add up to x: what x is rounded to, what its rest is rounded to, and what that leaves."""
    high = x.to(OPERAND)
    rest = x - high.to(x.dtype)
    middle = rest.to(OPERAND)
    return high, middle, (rest - middle.to(x.dtype)).to(OPERAND)


@triton.jit
def product_of_parts(a_high, a_low, b_high, b_low):
    """A float32 product as three in tf32, of the `parts` of both. What is left out, low times low, is below 2**-20 of each term.

    An infinity has a NaN for its low part, and the low products are NaN, or infinities of the right sign: as the lowest number they leave
    the result to the product of the high parts.
    """
    low = tl.dot(a_low, b_high, input_precision="tf32")
    low = tl.dot(a_high, b_low, low, input_precision="tf32")
    return tl.dot(a_high, b_high, tl.where(low > -3.4e38, low, -3.4e38), input_precision="tf32")


HALF_OF_CUT = tl.constexpr(0 if INTERPRETED else 4096)
"""Half a unit of the bits that matrix units leave of a tf32 operand; Triton's interpreter leaves all of them."""


@triton.jit
def parts(x):
    """The 11 leading bits of each number, which tf32 holds, and the others, by a mask and a subtraction: conversions are far dearer.

    Matrix units cut off the last 13 bits of a number: half a unit of the others makes that a rounding of the 13 bits that they have to 11.
    """
    high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, ((x - high).to(tl.int32, bitcast=True) + HALF_OF_CUT).to(tl.float32, bitcast=True)


@triton.jit
def in_place(sums, tile):
    """What `product` returned, and the tile that it is to be multiplied by, with columns and rows of each eight in another order.

    In it, the matrix units take as tf32 operands the registers in which they left their sums: a thread that holds the columns 2t and 2t + 1
    of eight needs t and t + 4. The product does not depend on the order.
    """
    ROWS: tl.constexpr = sums.shape[0]
    COLUMNS: tl.constexpr = sums.shape[1]
    WIDTH: tl.constexpr = tile.shape[1]
    sums = tl.reshape(tl.permute(tl.reshape(sums, [ROWS, COLUMNS // 8, 4, 2]), [0, 1, 3, 2]), [ROWS, COLUMNS])
    return sums, tl.reshape(tl.permute(tl.reshape(tile, [COLUMNS // 8, 4, 2, WIDTH]), [0, 2, 1, 3]), [COLUMNS, WIDTH])
