"""The options of `pytest bench`."""

from __future__ import annotations

import pytest
import torch

from .devices import measure_on


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only the cases that matter most")
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="the device to measure on (default: cpu)")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the device before the cases are made."""
    if config.option.device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device: got cuda, expected a device that torch can use: it finds no GPU")
    measure_on(config.option.device)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.quick:
        items[:] = [item for item in items if item.callspec.params["case"].quick]
