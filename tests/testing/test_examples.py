"""The examples in the docstrings of `cmab_kernels.testing` run, and importing the package does not import `testing`."""

from __future__ import annotations

import doctest
import subprocess
import sys

import pytest
import torch

import cmab_kernels
from cmab_kernels import testing


@pytest.mark.parametrize("name", ["OperatorSuite", "bound", "lazily_negated", "poisoned_memory", "row_error"])
def test_docstring(name: str) -> None:
    item = getattr(testing, name)
    namespace = {
        "torch": torch,
        "cmab_kernels": cmab_kernels,
        **{public: getattr(testing, public) for public in testing.__all__},
    }
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for example in doctest.DocTestFinder(recurse=False).find(item, name, globs=namespace):
        runner.run(example)
    assert runner.failures == 0 and runner.tries > 0


def test_every_public_name_says_what_it_is() -> None:
    assert [
        name for name in testing.__all__ if callable(getattr(testing, name)) and not getattr(testing, name).__doc__
    ] == []


def test_the_package_imports_without_its_testing() -> None:
    code = "import sys, cmab_kernels; sys.exit('cmab_kernels.testing' in sys.modules or 'pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
