"""`pytest bench --device` chooses the device of all cases, and raises an error for a missing device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import conftest, devices


def _configured(device: str) -> str:
    config: Any = SimpleNamespace(option=SimpleNamespace(device=device))
    conftest.pytest_configure(config)
    return devices.device()


def test_the_device_is_chosen_before_the_cases_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_device", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _configured("cuda") == "cuda" and _configured("cpu") == "cpu"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_device", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.UsageError, match=r"--device: got cuda, expected .*: it finds no GPU"):
        _configured("cuda")
    assert devices.device() == "cpu"
