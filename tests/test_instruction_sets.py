"""Promise P2 for the vector widths that this processor has but does not choose; the suites alone run none of their
kernels."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cmab_kernels.runtime.extension import load
from cmab_kernels.testing import OperatorSuite

from .guards.walls import suites

pytest.importorskip("cmab_kernels.attention.native", reason="the extension was not built", exc_type=ImportError)

ROOT = Path(__file__).resolve().parents[1]
CHOSEN = "native and not (portable or avx2 or avx512)"
FAMILIES = ("attention", "intention", "layers", "nystrom", "properties")
SUITES = {
    f"{kind.__module__.removeprefix('tests.').removesuffix('.test_suite')}-{kind.__name__}": kind
    for kind in suites()
    if kind.test_accuracy
}


@pytest.fixture(params=SUITES)
def suite(request: pytest.FixtureRequest) -> Iterator[OperatorSuite]:
    """The suite of an operator with a native implementation."""
    found = SUITES[request.param]()
    found.setup_method()
    yield found
    found.teardown_method()


def test_accuracy(narrow_isa: str, suite: OperatorSuite) -> None:
    """Results and gradients are within the bounds of the oracle, for all dtypes and for all laws that the suite has."""
    longest = max(len(suite.dtypes), len(suite.laws))
    for dtype, law in itertools.islice(
        zip(itertools.cycle(suite.dtypes), itertools.cycle(suite.laws), strict=False), longest
    ):
        suite.check_accuracy("native", dtype, law, suite.inputs(dtype, law, suite.shapes[0]))


def test_huge_logits(narrow_isa: str, suite: OperatorSuite) -> None:
    """Results are within the bounds with logits up to 2^60, for operators with logits."""
    for order in ("rising", "falling", "mixed") if any(suite.logits) else ():
        suite.test_huge_logits("native", torch.float32, order)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("vectors", load().instruction_sets()[:-1])
def test_all_native_tests(vectors: str, family: str) -> None:
    """The ordinary tests of native kernels, except those that choose their vector width, in a process with this
    width."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"tests/{family}", "-k", CHOSEN]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "CMAB_KERNELS_ISA": vectors})
    assert run.returncode == 0
