"""Every example in a public docstring runs."""

from __future__ import annotations

import doctest

import cmab_models
import pytest
import torch

import cmab_kernels
import cmab_kernels.distributed
import cmab_kernels.integrations
import cmab_kernels.nn
from cmab_kernels.intention import variants

MODULES = (cmab_kernels, cmab_kernels.distributed, cmab_kernels.integrations, cmab_kernels.nn, variants, cmab_models)
PUBLIC = {f"{module.__name__}.{name}": getattr(module, name) for module in MODULES for name in module.__all__}


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring(name: str) -> None:
    item = PUBLIC[name]
    assert item.__doc__, f"{name} has no docstring"
    namespace = {"torch": torch, "cmab_kernels": cmab_kernels, "cmab_models": cmab_models}
    found = doctest.DocTestFinder(exclude_empty=False).find(item, name, globs=namespace)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for example in found:
        runner.run(example)
    assert runner.failures == 0
    if callable(item) and not (isinstance(item, type) and issubclass(item, tuple)):
        assert runner.tries > 0, f"{name} has no example"
