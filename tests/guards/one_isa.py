"""A plugin of pytest that leaves out the tests of instruction sets other than that in CMAB_KERNELS_ISA: their kernels have no sanitizer."""

from __future__ import annotations

import os

import pytest

SETS = ("portable", "avx2", "avx512", "avx512bf16", "amx", "amx_emulated")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        parameters = getattr(item, "callspec", None)
        named = {value for value in parameters.params.values() if value in SETS} if parameters else set()
        (kept if named <= {os.environ["CMAB_KERNELS_ISA"]} else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
