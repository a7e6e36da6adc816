"""The type of a planted fault."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of one place in one file, and the tests that must fail for it."""

    path: str
    """The file, from the root of the tree."""
    right: str
    """The right text, which occurs once in the file."""
    wrong: str
    """The text that replaces it."""
    caught_by: str
    """The arguments of pytest for the tests that must catch the fault: few and quick ones."""
    vectors: str = ""
    """For a fault in C++: the only instruction set whose kernels have it; "" means the one in use."""
