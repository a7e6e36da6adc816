"""What a GPU must offer, the block sizes, and what every launch needs."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runs import MOST_QUERIES

WIDEST = 256


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why these kernels cannot run these inputs here; None when they can."""
    if max(key.shape[-1], value.shape[-1]) > WIDEST:
        return f"its heads are at most {WIDEST} wide"
    if max(query.shape[-2], key.shape[-2]) >= 2**31:
        return "it counts queries and keys in 32 bits"
    if query.device.type == "cpu" and triton.knobs.runtime.interpret:
        return "Triton's interpreter computes bfloat16 wrongly" if query.dtype == torch.bfloat16 else None
    if query.device.type != "cuda":
        return f"it needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1), and the inputs are on {query.device.type}"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(query.device)
    return None if capability >= (8, 0) else f"it needs compute capability 8.0, and the GPU has {capability[0]}.{capability[1]}"


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Kernels run on the tensor's GPU, on the stream that is current there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


class Tiles(NamedTuple):
    """A block of queries, a tile of keys, and the warps and load stages that they take: Triton's own names."""

    BLOCK_L: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


def _query_block(queries: int, largest: int) -> int:
    return min(max(triton.next_power_of_2(queries), 16), largest)


def forward_tiles(dtype: torch.dtype, width: int, queries: int) -> Tiles:
    return Tiles(_query_block(queries, MOST_QUERIES), 64, 4, 3)


def backward_tiles(dtype: torch.dtype, width: int, queries: int) -> Tiles:
    return Tiles(_query_block(queries, MOST_QUERIES), 64, 8, 2)


def alignment(*tensors: Tensor) -> int:
    """The largest power of two up to 16 that divides every stride, in elements, except those of the columns."""
    return math.gcd(16, *(stride for tensor in tensors for stride in tensor.stride()[:-1]))


def mask_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return getattr(tl, str(dtype).removeprefix("torch."))


def precision(dtype: torch.dtype) -> str:
    """How float32 is multiplied: in three tf32 products, as good as float32, or in one where torch is allowed that in its own."""
    matmul = torch.backends.cuda.matmul
    tf32 = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "ieee" if dtype != torch.float32 else "tf32" if tf32 else "tf32x3"
