"""Each planted fault can still be planted, and is caught: a sample of ten in the ordinary tests, two that are compiled
in the thorough tests, and all of them in the nightly tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from . import FAULTS, table
from .tree import ROOT, Tree

SAMPLE = (
    "a batch that shares its neighbour's mask",
    "a merge without its gradient",
    "a packed set with a key of the next",
    "a removal of one key too few",
    "a gradient of the sums without its mirror image",
    "norms of the whole batch",
    "a gate taken for its features",
    "an update that takes the module's own state",
    "a prediction that has seen its target",
    "a survival taken for its complement",
)
"""Faults in Python, for which nothing is compiled, of every family."""


def test_every_fault_can_be_planted() -> None:
    sources = {path: (ROOT / path).read_text() for path in {fault.path for fault in FAULTS.values()}}
    changed = [
        f"{fault.path} has changed: say again where to plant «{name}»"
        for name, fault in FAULTS.items()
        if sources[fault.path].count(fault.right) != 1
    ]
    assert not changed, "\n".join(changed)


def test_the_table_has_all_of_them() -> None:
    """There are more than a hundred faults, and each was caught when it was last planted."""
    caught = {name for name, row in table.read().items() if row.caught_by}
    assert len(FAULTS) >= 100 and caught == set(FAULTS), (
        f"run `make mutants`, which plants {sorted(caught ^ set(FAULTS))}"
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    with contextlib.closing(Tree(tmp_path_factory.mktemp("mutants") / "tree")) as tree:
        yield tree


@pytest.fixture(scope="module")
def built_tree() -> Iterator[Tree]:
    """A tree in which compiled faults are linked with the build's own objects."""
    with contextlib.closing(Tree(ROOT / "build" / f"mutants-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}")) as tree:
        yield tree


def _must_be_caught(name: str, tree: Tree) -> None:
    found = tree.outcome(FAULTS[name])
    assert found.caught, f"«{name}» was not caught:\n{found.output}"


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_caught(name: str, tree: Tree) -> None:
    _must_be_caught(name, tree)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["base 2 for base e", "memory that the library did not make"])
def test_a_compiled_fault_is_caught(name: str, built_tree: Tree) -> None:
    """The second is in a file that reads the headers of pybind11."""
    _must_be_caught(name, built_tree)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in SAMPLE])
def test_the_fault_is_caught(name: str, built_tree: Tree) -> None:
    _must_be_caught(name, built_tree)


def test_what_changes_nothing_is_not_caught(tree: Tree) -> None:
    """A fault that changes nothing passes its tests, so the tests catch the other faults because of their changes."""
    fault = FAULTS[SAMPLE[1]]
    assert not tree.outcome(fault._replace(wrong=fault.right)).caught
