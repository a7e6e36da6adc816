"""The declarations of all operators: the classes of every test_suite.py that inherit the suite."""

from __future__ import annotations

import functools
import importlib
import inspect
from pathlib import Path

from cmab_kernels.testing import OperatorSuite

TESTS = Path(__file__).parent


@functools.cache
def declarations() -> tuple[type[OperatorSuite], ...]:
    """Return the classes that pytest runs, in the order of files and names."""
    found: dict[type[OperatorSuite], None] = {}
    for path in sorted(TESTS.rglob("test_suite.py")):
        module = importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))
        classes = (item for name, item in inspect.getmembers(module, inspect.isclass) if name.startswith("Test"))
        found |= dict.fromkeys(item for item in classes if issubclass(item, OperatorSuite) and item.operator)
    return tuple(found)
