"""What every call of a CUDA kernel needs: a check that the GPU can run it, and the stream that it runs on."""

from __future__ import annotations

import torch
from torch import Tensor

from .extension import load_cuda
from .tracing import traced_as_constant

CUDA = load_cuda()
MAX_WIDTH = CUDA.MAX_WIDTH


@traced_as_constant
def gpu_problem(index: int | None) -> str | None:
    """The reason why the GPU of this index cannot run the CUDA kernels, as a phrase; None if it can run them."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        return f"it was built for compute capability 8.0 and up, and the GPU has {major}.{minor}"
    available = CUDA.shared_memory(torch.cuda.current_device() if index is None else index)
    if available < CUDA.SHARED_BYTES:
        return f"it needs {CUDA.SHARED_BYTES // 1024} KiB of shared memory in a block, and the GPU has {available // 1024}"
    return None


def stream_of(tensor: Tensor) -> int:
    """The CUDA stream (a cudaStream_t, as an int) that is current on the tensor's device."""
    return torch.cuda.current_stream(tensor.device).cuda_stream
