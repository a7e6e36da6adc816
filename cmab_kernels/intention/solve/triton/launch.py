"""Launch options of the solve: padded size, columns at a time, number of warps; scratch memory."""

from typing import Any

import torch
from torch import Tensor

from ....runtime.tiles import padded
from ....runtime.triton_launch import triton_dtype
from ....runtime.triton_launch import unsupported as unsupported_rows

MOST_SCRATCH = 2**26
"""The most bytes of scratch memory of a launch; programs that would take more solve several systems, one after the
other."""


def unsupported(gram: Tensor, rhs: Tensor) -> str | None:
    """The reason why Triton's kernel cannot run these inputs, as a phrase; None if it can."""
    if gram.dtype not in (torch.float64, torch.float32):
        return f"no Triton kernel for {gram.dtype}"
    return unsupported_rows(gram, gram, gram)


def options(gram: Tensor) -> dict[str, Any]:
    """The padded size of the systems, the columns at a time, the dtype, and Triton's options."""
    size = padded(gram.shape[-1])
    columns = min(2 * size, 256)
    return {
        "SIZE": size,
        "COLUMNS": columns,
        "DTYPE": triton_dtype(gram.dtype),
        "EPSILON": torch.finfo(gram.dtype).eps,
        "num_warps": columns // 32,  # a column of a tile to a thread
        "num_stages": 1,
        "maxnreg": 255,  # or values would be spilled for the sake of one more block
    }


def scratch_for(gram: Tensor, size: int, columns: int) -> Tensor:
    """Uninitialised scratch memory (programs, size, size + columns): for each program a factor, and the right-hand
    sides at hand."""
    most = max(MOST_SCRATCH // (size * (size + columns) * gram.element_size()), 1)
    return gram.new_empty((min(gram.shape[0], most), size, size + columns))
