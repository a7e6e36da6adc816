"""The native tests under sanitizers; each sanitizer reports the faults that are planted for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cmab_kernels.runtime.extension import load
from tests.mutations.fault import Fault
from tests.mutations.tree import ROOT

from .sanitizers import COMPILER, SANITIZERS, Sanitized

pytest.importorskip("cmab_kernels.attention.native", reason="the extension was not built", exc_type=ImportError)
FAULTS = [fault for sanitizer in SANITIZERS.values() for fault in sanitizer.faults]


@pytest.mark.parametrize("fault", FAULTS, ids=[Path(fault.path).stem for fault in FAULTS])
def test_the_fault_can_be_planted(fault: Fault) -> None:
    assert (ROOT / fault.path).read_text().count(fault.right) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("vectors", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("kind", SANITIZERS)
def test_under_a_sanitizer(kind: str, vectors: str, tmp_path: Path) -> None:
    """The sanitizer reports nothing at first, and then each planted fault."""
    if vectors not in load().instruction_sets():
        pytest.skip(f"this processor has no {vectors}")
    if "clang" in COMPILER:
        pytest.skip(f"the names of the sanitizers' libraries are those of GCC's, and the compiler is {COMPILER}")
    sanitized = Sanitized(kind, vectors, tmp_path / "tree")
    silent = sanitized.run(sanitized.sanitizer.tests)
    assert silent.returncode == 0, silent.stdout[-5000:]
    for fault in sanitized.sanitizer.faults:
        assert sanitized.reports(fault), f"{fault.path}: {fault.wrong}"
