"""A plugin of pytest that leaves out the tests of all instruction sets except the compiled one, which CMAB_KERNELS_ISA
names."""

from __future__ import annotations

import os

import pytest

from tests.mutations.tree import ENGINES, VECTORS

COMPILED = {"portable": ("portable",), "avx2": ("avx2",), "avx512": ("avx512", *ENGINES)}
"""Vectors -> the instruction sets whose kernels are compiled with a sanitizer, the best last."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    (compiled,) = (sets for sets in COMPILED.values() if os.environ["CMAB_KERNELS_ISA"] in sets)
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        parameters = getattr(item, "callspec", None)
        named = (
            {value for value in parameters.params.values() if value in (*VECTORS, *ENGINES)} if parameters else set()
        )
        (kept if named <= set(compiled) else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
