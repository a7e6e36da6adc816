"""The implementation that `use_impl` has chosen in this thread or task, as the attribute `impl` of this module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import NamedTuple


class Level(NamedTuple):
    """The choice within a block of `holder`, which is placed on top of the choice around the block. The lowest level
    belongs to no block."""

    impl: str
    holder: object
    below: Level | None


_LOWEST = Level("auto", None, None)
_levels: ContextVar[Level] = ContextVar("cmab_kernels.use_impl", default=_LOWEST)

now: Callable[[], Level] = _levels.get
"""Return the current level. A compiler cannot trace this: code under a compiler reads `impl`."""


def enter(holder: object, impl: str) -> None:
    """Begin a block."""
    _levels.set(Level(impl, holder, _levels.get()))


def leave(holder: object) -> None:
    """End the newest block of `holder`. Other blocks may be newer, because blocks of two generators may overlap."""
    _levels.set(_without(_levels.get(), holder))


def back_to(level: Level) -> None:
    """Make this level the current one again."""
    _levels.set(level)


def _without(level: Level, holder: object) -> Level:
    if level.below is None:  # the block began in another thread or task
        return level
    return level.below if level.holder is holder else level._replace(below=_without(level.below, holder))


class _Module(ModuleType):
    """A module that computes `impl` at each access. A compiler's guards then see a change and compile again.

    The compiler also traces an assignment to `impl`, and executes it at the end of the compiled
    code.
    """

    @property
    def impl(self) -> str:
        return _levels.get().impl

    @impl.setter
    def impl(self, impl: str) -> None:
        _levels.set(_levels.get()._replace(impl=impl))


impl: str
"""The implementation that is chosen now. An assignment is valid until the block ends, or outside of blocks until the
next choice."""

sys.modules[__name__].__class__ = _Module
