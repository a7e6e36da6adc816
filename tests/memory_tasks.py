"""Tasks of known size and speed, importable by the process that measures memory."""

from __future__ import annotations

import os
import time

import torch

from cmab_kernels.measure import Task

MIB = 2**20


def planted(scratch: int, result: int = 4, leftover: int = 0) -> Task:
    """A task that holds `scratch` bytes while it runs, and returns `result` bytes. Its construction leaves `leftover`
    freed bytes in the allocator."""
    blocks = [torch.ones(2**13) for _ in range(leftover >> 15)]
    del blocks

    def task() -> list[torch.Tensor]:
        held = torch.ones(scratch // 4)
        return [torch.full((result // 4,), float(held[:1].sum()))]

    return task


def failing(kind: str) -> Task:
    def task() -> list[torch.Tensor]:
        if kind == "hangs":
            time.sleep(60)
        if kind == "dies":
            os._exit(3)
        if kind == "raises":
            raise ValueError("what went wrong")
        return []

    return task
