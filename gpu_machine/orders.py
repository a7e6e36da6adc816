"""A check in several orders of blocks and warps; its results must have the same bits in all orders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from .machine import Machine


def in_orders(
    check: Callable[[], object],
    place: Callable[[Machine], AbstractContextManager[None]],
    orders: int = 2,
    lenient: bool = False,
) -> set[str]:
    """Run a check within `place(machine)` in several orders; return the names of the kernels that ran.

    The results of every kernel are compared bit by bit. Random numbers of the check are the same each time.
    Approximations have errors as on hardware.
    """
    found = []
    for seed in range(orders):
        machine = Machine(seed, lenient, rough=True)
        torch.manual_seed(0)
        with place(machine):
            check()
        found.append(machine.ran)
    for other in found[1:]:
        assert other == found[0], "the bits depend on the order of blocks and warps"
    return {name for name, _ in found[0]}
