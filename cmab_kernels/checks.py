"""How every error of the package reads: which argument, what was given, what is allowed."""

from __future__ import annotations

import torch

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def wrong(argument: str, given: str, allowed: str) -> str:
    """The text of an error: «`key` has shape (2, 3): (B, H, N, D) is needed»."""
    return f"`{argument}` {given}: {allowed}"
