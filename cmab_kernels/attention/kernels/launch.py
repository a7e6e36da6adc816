"""What a GPU must offer, the block sizes, and what every launch needs."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...autograd import traced_as_constant

WIDEST = 256
LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Compute capabilities with 99 KiB in a block (CUDA C++ Programming Guide, technical specifications)."""


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why these kernels cannot run these inputs here; None when they can."""
    if max(key.shape[-1], value.shape[-1]) > WIDEST:
        return f"its heads are at most {WIDEST} wide"
    if max(query.shape[-2], key.shape[-2]) >= 2**31:
        return "it counts queries and keys in 32 bits"
    if query.device.type == "cuda":
        return _gpu_problem(query.device.index)
    if query.device.type != "cpu" or not _interprets():
        return f"it needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1), and the inputs are on {query.device.type}"
    return "Triton's interpreter computes bfloat16 wrongly" if query.dtype == torch.bfloat16 else None


@traced_as_constant
def _interprets() -> bool:
    return triton.knobs.runtime.interpret


@traced_as_constant
def _gpu_problem(index: int | None) -> str | None:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        return f"it needs compute capability 8.0, and the GPU has {major}.{minor}"
    if (major, minor) in LITTLE_SHARED_MEMORY:
        return f"its tiles need 163 KiB of shared memory in a block, and GPUs of compute capability {major}.{minor} have 99"
    return None


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Kernels run on the tensor's GPU, on the stream that is current there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


class Products(NamedTuple):
    """How matrices are multiplied: the type of the operands, and how Triton is to multiply them."""

    operand: torch.dtype
    precision: str

    @property
    def input_precision(self) -> str:
        """The interpreter knows no bf16x6; it multiplies in full whatever it is told."""
        return "ieee" if triton.knobs.runtime.interpret else self.precision


def forward_products(dtype: torch.dtype, width: int, widest_in_parts: int = 64) -> Products:
    """float32 in six products of bfloat16 parts, as good, where these fit in registers; in one of tf32 where torch is allowed that."""
    if dtype != torch.float32:
        return Products(dtype, "ieee")
    return Products(dtype, "tf32" if _allows_tf32() else "bf16x6" if width <= widest_in_parts else "ieee")


def backward_products(dtype: torch.dtype, width: int) -> Products:
    """float16 cannot hold the slopes of 1e6 keys, or of a scaled loss: tf32 has its 11 bits, and the exponents of float32."""
    return Products(torch.float32, "tf32") if dtype == torch.float16 else forward_products(dtype, width, widest_in_parts=32)


def _allows_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


class Tiles(NamedTuple):
    """A block of queries, a tile of keys, and the warps and load stages that they take: Triton's own names."""

    BLOCK_L: int
    BLOCK_N: int
    num_warps: int
    num_stages: int

    def at_most(self, queries: int) -> "Tiles":
        return self._replace(BLOCK_L=min(self.BLOCK_L, max(triton.next_power_of_2(queries), 16)))


# By precision and widest head: the largest tiles that fit in registers and shared memory, as tests/attention/test_cubin.py sees it.
# Lengths play no part, but that a block is no larger than the queries need.
_HALF, _DOUBLE = "half", "double"
_FORWARD = {
    _HALF: {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 32, 8, 3), 256: Tiles(64, 64, 8, 2)},
    "tf32": {32: Tiles(128, 64, 8, 2), 64: Tiles(128, 32, 8, 2), 128: Tiles(64, 32, 8, 1), 256: Tiles(32, 32, 8, 1)},
    "bf16x6": {64: Tiles(128, 32, 8, 2)},
    "ieee": {128: Tiles(32, 16, 8, 1), 256: Tiles(16, 16, 8, 1)},
    _DOUBLE: {16: Tiles(64, 32, 8, 1), 128: Tiles(32, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
}
_BACKWARD = {
    _HALF: {128: Tiles(128, 64, 8, 2), 256: Tiles(32, 32, 8, 1)},
    "tf32": {32: Tiles(128, 64, 8, 2), 64: Tiles(128, 32, 8, 2), 256: Tiles(32, 32, 8, 1)},
    "bf16x6": {16: Tiles(128, 32, 8, 2), 32: Tiles(128, 16, 8, 2)},
    "ieee": {64: Tiles(32, 32, 8, 1), 128: Tiles(32, 16, 8, 1), 256: Tiles(16, 16, 8, 1)},
    _DOUBLE: {64: Tiles(32, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
}
_BACKWARD_KEYS = {
    _HALF: {16: Tiles(128, 64, 8, 2), 64: Tiles(64, 64, 8, 2), 128: Tiles(64, 32, 8, 1), 256: Tiles(32, 32, 8, 1)},
    "tf32": {16: Tiles(128, 64, 8, 2), 64: Tiles(64, 32, 8, 1), 128: Tiles(32, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
    "bf16x6": {16: Tiles(64, 32, 8, 1), 32: Tiles(32, 32, 8, 1)},
    "ieee": {64: Tiles(32, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
    _DOUBLE: {64: Tiles(32, 32, 8, 1), 256: Tiles(16, 16, 8, 1)},
}


def _tiles(table: dict[str, dict[int, Tiles]], products: Products, width: int) -> Tiles:
    kind = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float64: _DOUBLE}.get(products.operand, products.precision)
    return next(tiles for widest, tiles in table[kind].items() if width <= widest)


def forward_tiles(products: Products, width: int, queries: int) -> Tiles:
    return _tiles(_FORWARD, products, width).at_most(queries)


def backward_tiles(products: Products, width: int, queries: int) -> Tiles:
    """Of one pass over the keys, with a block of queries at hand."""
    return _tiles(_BACKWARD, products, width).at_most(queries)


def backward_keys_tiles(products: Products, width: int) -> Tiles:
    """Of one pass over the queries, with a tile of keys at hand."""
    return _tiles(_BACKWARD_KEYS, products, width)


def alignment(*tensors: Tensor) -> int:
    """The largest power of two up to 16 that divides every stride, in elements, except those of the columns."""
    return math.gcd(16, *(stride for tensor in tensors for stride in tensor.stride()[:-1]))


def mask_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return getattr(tl, str(dtype).removeprefix("torch."))
