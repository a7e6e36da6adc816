"""The implementation that `use_impl` has chosen in this thread or task, as the attribute `impl` of this module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import NamedTuple


class Level(NamedTuple):
    """What holds within a block of `holder`, on top of what holds around it. The lowest level is that of no block."""

    impl: str
    holder: object
    below: Level | None


_LOWEST = Level("auto", None, None)
_levels: ContextVar[Level] = ContextVar("cmab_kernels.use_impl", default=_LOWEST)

now: Callable[[], Level] = _levels.get
"""The level that holds now. Under a compiler, which cannot trace it, read `impl`."""


def enter(holder: object, impl: str) -> None:
    """Begin a block."""
    _levels.set(Level(impl, holder, _levels.get()))


def leave(holder: object) -> None:
    """End the newest block of `holder`, which need not be the newest of all: blocks of two generators may overlap."""
    _levels.set(_without(_levels.get(), holder))


def back_to(level: Level) -> None:
    """Let this level hold again."""
    _levels.set(level)


def _without(level: Level, holder: object) -> Level:
    if level.below is None:  # it was begun in another thread or task
        return level
    return level.below if level.holder is holder else level._replace(below=_without(level.below, holder))


class _Module(ModuleType):
    """A module whose `impl` is read anew at each access: so a compiler's guards see it, which compile again when it has changed.

    The compiler also traces an assignment, and makes it when the compiled code ends.
    """

    @property
    def impl(self) -> str:
        return _levels.get().impl

    @impl.setter
    def impl(self, impl: str) -> None:
        _levels.set(_levels.get()._replace(impl=impl))


impl: str
"""The implementation that is chosen now; assigned, until the block ends, or else from now on."""

sys.modules[__name__].__class__ = _Module
