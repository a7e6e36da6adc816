"""What AMD's compiler, as far as Triton brings it, makes of a launch for gfx942: figures without a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from cmab_kernels.testing.cubin import Launch

ARCH = "gfx942"
TARGET = GPUTarget("hip", ARCH, 64)
TILES = 86
"""The compute capability whose tiles are taken: the one with the least shared memory."""

LDS = 64 * 1024
"""Bytes of local data share that a block may have (AMD CDNA 3 instruction set architecture)."""


def of_launch(launch: Launch, folder: Path) -> dict[str, Any]:
    """Vector registers of a thread and those that were spilled; bytes of LDS and waves of a block; matrix and all instructions."""
    code, options = launch.kernel.source(*launch.args, **launch.options)
    kernel = triton.compile(code, target=TARGET, options=options)
    if kernel.metadata.shared > LDS:
        raise ValueError(f"its tiles take {kernel.metadata.shared // 1024} KiB of LDS, and a block has {LDS // 1024}")
    text = kernel.asm["amdgcn"]
    return {
        "registers": _said(text, "vgpr_count"),
        "spilled": _said(text, "vgpr_spill_count"),
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "matrix": len(re.findall(r"(?m)^\s+v_mfma_", text)),
        "instructions": len(re.findall(r"(?m)^\s+[vs]_|^\s+(?:ds|buffer|global)_", text)),
    }


def _said(text: str, name: str) -> int:
    (value,) = re.findall(rf"\.{name}:\s+(\d+)", text)
    return int(value)
