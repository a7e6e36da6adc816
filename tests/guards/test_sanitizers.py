"""The native tests under sanitizers, each of which reports the faults that are planted for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutations.fault import Fault
from tests.mutations.tree import ROOT

from .sanitizers import SANITIZERS, Sanitized

pytest.importorskip("cmab_kernels.attention.native", reason="the extension was not built", exc_type=ImportError)
FAULTS = [(kind, fault) for kind, sanitizer in SANITIZERS.items() for fault in sanitizer.faults]


@pytest.mark.parametrize("kind, fault", FAULTS, ids=[f"{kind}-{Path(fault.path).stem}" for kind, fault in FAULTS])
def test_the_fault_can_be_planted(kind: str, fault: Fault) -> None:
    assert (ROOT / fault.path).read_text().count(fault.right) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("kind", SANITIZERS)
def test_under_a_sanitizer(kind: str, tmp_path: Path) -> None:
    """Nothing is reported, and then each planted fault is."""
    sanitized = Sanitized(kind, tmp_path / "tree")
    silent = sanitized.run(sanitized.sanitizer.tests)
    assert silent.returncode == 0 and " passed" in silent.stdout, silent.stdout[-5000:]
    for fault in sanitized.sanitizer.faults:
        found = sanitized.run_with(fault)
        assert found.returncode != 0 and re.search(sanitized.sanitizer.report, found.stdout), f"{fault.path}:\n{found.stdout[-3000:]}"
