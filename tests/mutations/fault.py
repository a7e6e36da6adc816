"""What a planted fault is."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of one place in one file, and the tests that must fail for it."""

    path: str
    """The file, from the root of the tree."""
    right: str
    """What stands there, once in the file."""
    wrong: str
    """What is planted in its place."""
    caught_by: str
    """The arguments of pytest for the tests that must catch it: few and quick ones."""
    vectors: str = ""
    """The instruction set whose kernels alone have the fault, for one in C++; "": the one in use."""
