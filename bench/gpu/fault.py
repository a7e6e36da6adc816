"""A kernel that writes beyond the end of a tensor, for a sanitizer to find: `python -m bench.gpu.fault`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _fill(target, BLOCK: tl.constexpr):
    tl.store(target + tl.arange(0, BLOCK), 1.0)


if __name__ == "__main__":
    _fill[(1,)](torch.zeros(16, device="cuda"), BLOCK=4096)
    torch.cuda.synchronize()
