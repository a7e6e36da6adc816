"""Sums over rows and the solve of their system on an NVIDIA GPU, fused in one CUDA kernel (csrc/gram)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda_launch import CUDA, MAX_WIDTH, capability, gpu_problem, launch
from ..dtypes import FLOATING, allows_tf32

PATCH = 32
"""The kernel forms sums of 32 x 32 columns (csrc/gram/cut.cuh)."""

TENSOR_CORES_SAVE = {
    "half": {(8, 0): 0.083, (9, 0): 0.033, (10, 0): 0.025},
    "tf32": {(8, 0): 0.056, (9, 0): 0.026, (10, 0): 0.017},
    "float32": {(9, 0): 0.009},
}
"""Operands -> compute capability -> the picoseconds that Triton's sums save for each multiply-add of this kernel, without tensor cores:
by the compiled code of both (docs/gpu_readiness.md, not measured). Where there is no figure, this kernel is as fast or faster."""

LAUNCHES_COST = 10e6
"""The picoseconds that Triton's sums and a solve of their own take longer for their launches than one fused kernel."""

MOST_WORKSPACE = 2**25
"""The most float64 partial sums held at a time (256 MiB), unless a single matrix needs more."""


def unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """The reason why this implementation cannot run these inputs, as a phrase; None if it can run them."""
    if key.device.type != "cuda":
        return f"it needs a GPU, and key is on {key.device}"
    if key.dtype not in FLOATING:
        return f"no CUDA kernel for {key.dtype}"
    if key.shape[-1] > MAX_WIDTH:
        return f"its keys are at most {MAX_WIDTH} wide, and key is {key.shape[-1]} wide"
    return gpu_problem(key.device.index, "ridge_shared_bytes", key.shape[-1], value.shape[-1], key.dtype == torch.float64)


def is_slower(key: Tensor, value: Tensor, weights: Tensor | None) -> bool:
    """Whether Triton's sums, followed by a solve, take less time than the fused kernel, by the table `TENSOR_CORES_SAVE`."""
    half, wide = key.dtype in (torch.bfloat16, torch.float16), key.dtype == torch.float64
    operands = "half" if half and weights is None else "float64" if wide else "tf32" if allows_tf32() else "float32"
    saved = TENSOR_CORES_SAVE.get(operands, {}).get(capability(key.device.index), 0.0)
    batch, heads, length, width = key.shape
    rows, columns = -(-width // PATCH), -(-(width + value.shape[-1]) // PATCH)
    patches = rows * columns - rows * (rows - 1) // 2  # of K'K only the lower triangle
    return saved * batch * heads * length * patches * PATCH**2 > LAUNCHES_COST


def ridge_solve(
    key: Tensor, value: Tensor, weights: Tensor | None, key_padding_mask: Tensor | None, alpha: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weight, gram, info): weight = (gram + alpha I)^-1 K'WV in float64, with gram = K'WK."""
    (batch, heads, _, width), value_width = key.shape, value.shape[-1]
    together, workspace_size, ticket_count = CUDA.ridge_needs(key=key, value=value, most_workspace=MOST_WORKSPACE)
    weight = key.new_empty((batch, heads, width, value_width), dtype=torch.float64)
    gram = key.new_empty((batch, heads, width, width), dtype=torch.float64)
    info = key.new_empty((batch, heads), dtype=torch.int32)
    launch(
        CUDA.ridge_solve,
        key.device,
        key=key,
        value=value,
        weights=weights,
        key_padding_mask=key_padding_mask,
        alpha=alpha,
        weight=weight,
        gram=gram,
        info=info,
        workspace=key.new_empty(workspace_size, dtype=torch.float64),
        tickets=key.new_zeros(ticket_count, dtype=torch.int32),
        together=together,
    )
    return weight, gram, info
