"""Tests that need a GPU, in addition to the suite that every operator inherits: `python -m pytest -m gpu tests` runs
both."""

from __future__ import annotations

from cmab_kernels.runtime.backends import IMPLEMENTATIONS

DEVICE = "cuda"


def impls(operator_set: str) -> list[str]:
    """The implementations of an operator set that run on a GPU."""
    return [impl for impl in IMPLEMENTATIONS[operator_set] if impl != "native"]
