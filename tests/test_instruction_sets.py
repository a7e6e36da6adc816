"""Promise P2 for the vectors that this processor has and does not choose: the suites alone run no kernel of theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cmab_kernels.testing import OperatorSuite

from .guards.walls import suites

pytest.importorskip("cmab_kernels.attention.native", reason="the extension was not built", exc_type=ImportError)

SUITES = {
    f"{kind.__module__.removeprefix('tests.').removesuffix('.test_suite')}-{kind.__name__}": kind
    for kind in suites()
    if kind.test_accuracy and "normal" in kind.laws
}


@pytest.fixture(params=SUITES)
def suite(request: pytest.FixtureRequest) -> Iterator[OperatorSuite]:
    """The suite of an operator with a native implementation."""
    found = SUITES[request.param]()
    found.setup_method()
    yield found
    found.teardown_method()


def _check(suite: OperatorSuite, dtype: torch.dtype, shape: int) -> None:
    suite.check_accuracy("native", dtype, "normal", suite.inputs(dtype, "normal", suite.shapes[shape]))


def test_accuracy(narrow_isa: str, suite: OperatorSuite) -> None:
    """Results and gradients in float32 are within the bounds of the oracle."""
    _check(suite, torch.float32 if torch.float32 in suite.dtypes else suite.dtypes[0], 0)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_accuracy_in_every_shape(narrow_isa: str, suite: OperatorSuite, dtype: torch.dtype) -> None:
    """The same for all shapes and dtypes that the suite has."""
    if dtype in suite.dtypes:
        for shape in range(len(suite.shapes)):
            _check(suite, dtype, shape)
