"""What cannot run on this machine, and why: rows that are passed over say so."""

from __future__ import annotations

import torch

import cmab_kernels as ck
from cmab_kernels.backends import OPERATORS


def why_not(operator: str, impl: str, device: str) -> str:
    """ "" where `impl` can run small float32 inputs."""
    inputs = [torch.zeros(1, 1, 16, 16, device=device)] * (2 if OPERATORS[operator] == "intention.solve" else 3)
    (found,) = (one for one in ck.explain(operator, *inputs) if one.impl == impl)
    return "" if found.usable else found.reason
