"""The devices that callers name."""

from __future__ import annotations

import torch

from .checks import kind_of, wrong


def device_of(device: torch.device | str | int) -> torch.device:
    """The device that is given or named; `TypeError` for what is no name, `ValueError` for a name that torch does not know."""
    if isinstance(device, torch.device):
        return device
    if not isinstance(device, (str, int)):
        raise TypeError(wrong("device", f"is {kind_of(device)}", "a torch.device or its name is needed"))
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(wrong("device", f"is {device!r}", "a torch.device or its name is needed")) from error
